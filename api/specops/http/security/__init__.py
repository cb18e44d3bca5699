"""Who may send what: API keys, host names and origins, and how large a body may be."""
