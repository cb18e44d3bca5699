"""Other servers' own tests, run against this service: see `__main__`."""
