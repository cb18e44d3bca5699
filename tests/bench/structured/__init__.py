"""Structured output is measured and checked."""
