"""Runs models: sessions, forward passes, the KV cache, sampling, the kernels, and what they cost.

This package moves tensors and knows slots, not requests. `specops.models` makes the graphs.
"""
