"""The engine without HTTP: requests sent at once."""
