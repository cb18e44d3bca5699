"""Hostile input for the readers of files and for the kernels: `python -m tests.fuzz`."""
