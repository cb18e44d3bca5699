"""GGUF, the file format of llama.cpp, as checkpoints: weights keep the blocks of the file.

A file holds everything: metadata, tokenizer, tensors. It may come from a stranger, so `header`
checks every number in it; the other modules use only what `header` has checked.
"""
