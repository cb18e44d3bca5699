"""The engine without HTTP: requests sent at once, and what requests cost each other."""
