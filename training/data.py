"""Turns the corpus into token arrays and draws windows of them, each once per epoch.

Documents are joined with the end-of-text mark before each. Windows are drawn without
replacement, from an offset that changes every epoch, in an order that depends on the seed alone.
"""

from collections import Counter
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from training.corpus import Corpus, Document
from training.tokenizer import END_OF_TEXT

Tokens = NDArray[np.uint16]


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> Tokens:
    """All documents as one array, the end-of-text mark before each of them."""
    mark = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return np.concatenate([np.array([mark, *e.ids], dtype=np.uint16) for e in encodings])


def token_arrays(tokenizer: Tokenizer, corpus: Corpus, cache: Path) -> dict[str, Tokens]:
    """The arrays `library` and `tests`; kept in `cache` because encoding takes a while."""
    arrays = {}
    for name, documents in (("library", corpus.library), ("tests", corpus.tests)):
        file = cache / f"{name}.npy"
        if not file.exists() and documents:
            cache.mkdir(parents=True, exist_ok=True)
            np.save(file, encode_documents(tokenizer, documents))
        arrays[name] = np.load(file) if documents else np.zeros(0, dtype=np.uint16)
    return arrays


class Sampler:
    """Draws batches of windows; its whole state is one counter per (source, length)."""

    def __init__(self, arrays: dict[str, Tokens], seed: int) -> None:
        self.arrays = arrays
        self.seed = seed
        self.dealt: Counter[tuple[str, int]] = Counter()
        self._order: dict[tuple[str, int], tuple[int, NDArray[np.int64]]] = {}

    def batch(self, counts: dict[str, int], length: int) -> NDArray[np.int64]:
        """`[sum(counts), length + 1]` tokens: `counts` windows from each source."""
        rows = [self._window(name, length) for name, n in counts.items() for _ in range(n)]
        return np.stack(rows).astype(np.int64)

    def _window(self, name: str, length: int) -> Tokens:
        tokens, key = self.arrays[name], (name, length)
        per_epoch = (len(tokens) - length) // length - 1
        if per_epoch < 1:
            raise ValueError(f"{name} has {len(tokens)} tokens, too few for windows of {length}")
        epoch, index = divmod(self.dealt[key], per_epoch)
        if self._order.get(key, (-1, None))[0] != epoch:
            rng = np.random.default_rng([self.seed, *name.encode(), length, epoch])
            self._order[key] = (epoch, rng.permutation(per_epoch) * length + rng.integers(length))
        self.dealt[key] += 1
        start = int(self._order[key][1][index])
        return tokens[start : start + length + 1]


def rows_of_tests(progress: float, batch: int) -> int:
    """How many rows of a batch come from the library's tests at `progress` in [0, 1].

    There are twice as many tests as library text, but the model is not for tests. So their share
    falls linearly from 60 % to nothing at 90 %, and the last passes see only the library.
    """
    return round(batch * 0.6 * max(0.0, 1 - progress / 0.9))
