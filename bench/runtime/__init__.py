"""Passes of the model: their operators and logits, and passes of another checkout."""
