"""Trains the bundled demo pair from text that every Python installation carries."""
