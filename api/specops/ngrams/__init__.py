"""Makes a table of n-grams for a model, on this machine and only from texts that the model writes.

The engine writes conversations (`conversations`), `table` counts the most frequent successors of
one to three tokens, and `evaluation` measures the suffix lookup with and without the table.
"""
