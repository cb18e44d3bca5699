"""The `specops` command: parses its arguments and prints. Lower packages do the work."""
