"""Speculative decoding: where draft tokens come from, how many pay, and which of them stand.

What it is about is numbers and tokens. The requests they belong to are `specops.engine`'s.
"""
