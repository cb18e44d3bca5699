"""Recorded requests of agents."""
