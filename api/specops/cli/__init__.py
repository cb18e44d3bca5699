"""The `specops` command: what a person types. It parses and prints; all else is below."""
