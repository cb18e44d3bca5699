"""Real clients, as their users install them, against this service: `python -m tests.clients`."""
