"""Hostile input for what reads files of others, and for the kernels: `python -m tests.fuzz`."""
