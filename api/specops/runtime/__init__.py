"""Runs models: sessions, forward passes, KV cache, sampling, kernels, and the cost of passes.

This package moves tensors. It knows slots, not requests. `specops.models` builds the graphs.
"""
