"""Ollama's protocol: what generates (`generating`), and what tells about the model (`models`)."""
