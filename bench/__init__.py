"""Measures this project on this machine: what the layers cost, what speculation gains."""
