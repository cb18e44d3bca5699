"""Passes of the model: their operators, the KV cache's elements, and passes of another checkout."""
