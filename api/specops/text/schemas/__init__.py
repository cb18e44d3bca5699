"""JSON schemas as clients write them, rewritten for the grammar library.

llguidance knows most of JSON Schema, refuses the rest, and leaves an object open unless its schema
says otherwise. Here a schema becomes one that says the same in the library's words. What it has no
words for is left out and reported by its path.
"""
