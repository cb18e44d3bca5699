"""Rewrites a model's graph for this machine: for our kernels, with weights in the kernels' order.

`weight_cache` is the entry: it keeps the result on disk. The work happens in a child process
(`prepack`), since the library that reads graphs is large.
"""
