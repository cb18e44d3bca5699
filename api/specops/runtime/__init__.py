"""The model at work: sessions, passes, KV cache, sampling, the kernels, and what they cost.

It moves tensors and knows slots, not requests. How graphs come about is `specops.models`'.
"""
