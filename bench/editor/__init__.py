"""Suggestions in an editor: a typing trace, played against this service and llama-server."""
