"""Makes a table of n-grams for a model, on this machine and only from texts of the model itself.

The engine writes conversations (`conversations`), what mostly follows one to three tokens in them
is counted (`table`), and the suffix lookup is measured with the table and without (`evaluation`).
"""
