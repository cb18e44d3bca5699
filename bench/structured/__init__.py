"""Structured output: what a grammar costs and saves, and whether answers fit it."""
