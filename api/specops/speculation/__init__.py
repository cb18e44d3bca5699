"""Speculative decoding: proposes draft tokens, chooses how many to verify, and verifies them.

This package deals with numbers and tokens only. The requests belong to `specops.engine`.
"""
