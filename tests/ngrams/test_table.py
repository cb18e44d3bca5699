"""A table of n-grams says what mostly followed in a model's own texts, as a scan of them would."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from specops.ngrams.storage import Conversation
from specops.ngrams.table import make_table
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.session import ModelLoadError
from specops.runtime.suffixes import NgramTable
from specops.speculation.drafters.suffix import SuffixDrafter
from tests.speculation.drafters.ask import propose

VOCAB = 300


def conversations(count: int = 60) -> list[Conversation]:
    """Texts in which each token mostly decides about the next one."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        tokens = [int(rng.integers(VOCAB))]
        while len(tokens) < 80:
            tokens.append((7 * tokens[-1] + 3 + int(rng.random() < 0.2)) % VOCAB)
        prompt, answer = np.split(np.array(tokens, np.int32), [5])
        found.append(Conversation(number, prompt, answer))
    return found


def written(path: Path) -> NgramTable:
    np.save(path, make_table(conversations()))
    return NgramTable(path, VOCAB)


def test_a_lookup_says_what_mostly_followed(tmp_path: Path) -> None:
    after = {token: Counter[int]() for token in range(VOCAB)}
    for item in conversations():
        for last, token in pairwise([item.prompt[-1], *item.tokens]):
            after[int(last)][int(token)] += 1
    drafter = SuffixDrafter(PrefixSharing.OFF, ngrams=written(tmp_path / "table.npy"))
    for token in range(VOCAB):
        drafter.begin(0, [token], "ann")
        draft = propose(drafter, [token], 4)
        drafter.release(0)
        if not (often := after[token].most_common(1)) or often[0][1] < 2:
            assert not draft.tokens
            continue
        assert after[token][draft.tokens[0]] == often[0][1]
        assert 0.0 < draft.accept_probs[0] < 1.0
        assert draft.found_in == "table"
    drafter.begin(0, [0], "ann")
    assert len(propose(drafter, [0], 4).tokens) == 4  # behind its own tokens, too


def test_promises_follow_what_comes(tmp_path: Path) -> None:
    drafter = SuffixDrafter(PrefixSharing.OFF, ngrams=written(tmp_path / "table.npy"))
    promised = []
    for token in range(200):
        drafter.begin(0, tokens := [token], "ann")
        found = propose(drafter, tokens, 1, min_reach=0.0)
        promised += found.accept_probs
        propose(drafter, [*tokens, 299], 1)  # another token came
    assert promised[0] > 0.4
    assert promised[-1] < 0.1


@pytest.mark.parametrize("damage", [
    lambda words: words[:2],
    lambda words: words[:-1],
    lambda words: np.concatenate([[len(words)], words[1:]]).astype(np.uint64),
    lambda words: np.concatenate([[0], words[1:]]).astype(np.uint64),
    lambda words: words.astype(np.int64),
    lambda words: np.concatenate([words[:-1], [VOCAB << 8, 0]]).astype(np.uint64),
])  # fmt: skip
def test_a_damaged_table_or_one_of_another_model_is_refused(damage, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "table.npy"
    np.save(file, damage(make_table(conversations())))
    with pytest.raises(ModelLoadError, match=r"damaged|another vocabulary"):
        NgramTable(file, VOCAB)
    whole = file.read_bytes()
    for content in (b"", b"no table of n-grams", whole[:60], whole[:-8]):
        file.write_bytes(content)
        with pytest.raises(ModelLoadError, match=r"whole table .*\): download it again") as caught:
            NgramTable(file, VOCAB)
        assert "pickle" not in str(caught.value)
