"""One step after another: which requests run, what a forward pass computes, what comes of it.

It moves requests and tokens. Tensors are `specops.runtime`'s, draft tokens `specops.speculation`'s;
neither HTTP nor threads are known here.
"""
