"""The making of draft heads: what a model writes, what is learnt of it, what comes of it."""
