"""The service over HTTP: a server in a process of its own, its clients, and requests at once."""
