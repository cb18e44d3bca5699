"""Turns the corpus into token arrays and draws windows from them, each once per epoch.

Documents are concatenated, each after an end-of-text mark. Windows are drawn without replacement,
from an offset that changes every epoch, in an order that depends only on the seed.
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
    """All documents as one array, each after an end-of-text mark."""
    mark = tokenizer.token_to_id(END_OF_TEXT)
    encodings = tokenizer.encode_batch([document.text for document in documents])
    return np.concatenate([np.array([mark, *e.ids], dtype=np.uint16) for e in encodings])


def token_arrays(tokenizer: Tokenizer, corpus: Corpus, cache: Path) -> dict[str, Tokens]:
    """The arrays `library` and `tests`, cached in a folder because encoding takes a while."""
    arrays = {}
    for name, documents in (("library", corpus.library), ("tests", corpus.tests)):
        file = cache / f"{name}.npy"
        if not file.exists() and documents:
            cache.mkdir(parents=True, exist_ok=True)
            np.save(file, encode_documents(tokenizer, documents))
        arrays[name] = np.load(file) if documents else np.zeros(0, dtype=np.uint16)
    return arrays


class Sampler:
    """Draws batches of windows. Its whole state is one counter per source and length."""

    def __init__(self, arrays: dict[str, Tokens], seed: int) -> None:
        self.arrays = arrays
        self.seed = seed
        self.dealt: Counter[tuple[str, int]] = Counter()
        self._order: dict[tuple[str, int], tuple[int, NDArray[np.int64]]] = {}

    def batch(self, counts: dict[str, int], length: int) -> NDArray[np.int64]:
        """Draw `counts` windows from each source: tokens [sum(counts), length + 1]."""
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
    """The number of rows of a batch from the library's tests, at `progress` in [0, 1].

    There is twice as much test code as library code, but the model is not for tests. So their share
    falls linearly from 60 % to 0 at a progress of 90 %, and the last steps see only the library.
    """
    return round(batch * 0.6 * max(0.0, 1 - progress / 0.9))
