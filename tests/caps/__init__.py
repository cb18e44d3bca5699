"""A model served under a real memory limit, with requests of every kind; see `__main__`."""
