"""GGUF, llama.cpp's files, as checkpoints: weights keep the blocks that the file has.

A file holds everything: metadata, tokenizer, tensors. It may be a stranger's, so that its header is
read by code of our own which trusts no number in it; nothing else here looks at bytes that
`header` has not checked.
"""

from specops.models.convert.gguf.checkpoint import GgufCheckpoint

__all__ = ["GgufCheckpoint"]
