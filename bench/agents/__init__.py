"""Coding agents: requests recorded from their programs, and how much of them the cache finds."""
