"""Runs requests step by step: admits them, plans a forward pass, and turns logits into tokens.

`specops.runtime` computes, `specops.speculation` decides about draft tokens. HTTP and threads are
above this package.
"""
