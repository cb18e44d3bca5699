"""A model's graph as this machine runs it: rewritten for our kernels, its weights in their order.

`weight_cache` is the entry: it keeps the result on disk. The work happens in a process of its own
(`prepack`), since the library that reads graphs is large.
"""
