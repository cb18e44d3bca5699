"""Rewrites clients' JSON schemas for the grammar library.

llguidance supports most of JSON Schema, refuses the rest, and leaves an object open unless its
schema closes it. This package rewrites a schema as an equivalent one that the library supports.
What the library cannot express is left out, and reported by its path.
"""
