"""The simulated target says another thing as soon as anything that it read is not what it was."""

from __future__ import annotations

import numpy as np
import pytest

from specops.runtime.batch import Batch
from specops.runtime.sampling import Floats
from tests.simulated_target import TINYLLAMA, VOCAB, SimulatedTarget, Text

PROMPT = tuple(np.random.default_rng(7).integers(1, VOCAB, 150).tolist())


def feed(target: SimulatedTarget, slot: int, tokens: tuple[int, ...], start: int = 0) -> Floats:
    """[1, V] logits after the tokens, the first `start` of which were computed before."""
    assert target.cache.reserve(slot, len(tokens))
    batch = Batch()
    batch.add(slot, start, tokens[start:], 1)
    logits = target.forward(batch).copy()
    target.cache.commit(slot, tokens, len(tokens))
    return logits


def fresh(tokens: tuple[int, ...]) -> Floats:
    target = SimulatedTarget(max_tokens=200)
    target.cache.begin(0, tokens)
    return feed(target, 0, tokens)


def test_logits_are_those_of_the_text_however_the_tokens_are_cut() -> None:
    whole = fresh(PROMPT)
    assert int(whole.argmax()) == Text().continuation(PROMPT, 1)[0]
    target = SimulatedTarget()
    target.cache.begin(3, PROMPT)
    for start, end in ((0, 1), (1, 64), (64, 70), (70, 150)):
        found = feed(target, 3, PROMPT[:end], start)
    assert np.array_equal(found, whole)


@pytest.mark.parametrize("position", [0, 63, 64, 149])
def test_every_token_counts(position: int) -> None:
    other = list(PROMPT)
    other[position] = (other[position] + 1) % 64
    assert not np.array_equal(fresh(tuple(other)), fresh(PROMPT))


@pytest.mark.parametrize("position", [0, 63, 64, 148])
def test_every_number_in_the_cache_counts(position: int) -> None:
    target = SimulatedTarget(max_tokens=200)
    target.cache.begin(0, PROMPT)
    feed(target, 0, PROMPT[:149])
    table = target.cache.block_tables[0]
    target._memory[table[position // 64], position % 64] += 1
    assert not np.array_equal(feed(target, 0, PROMPT, 149), fresh(PROMPT))


def test_a_wrong_block_counts() -> None:
    target = SimulatedTarget(max_tokens=200)
    target.cache.begin(0, PROMPT)
    feed(target, 0, PROMPT[:149])
    target.cache.block_tables[0, 0] = target.cache.block_tables[0, 1]
    assert not np.array_equal(feed(target, 0, PROMPT, 149), fresh(PROMPT))


def test_what_lies_beyond_does_not_count() -> None:
    target = SimulatedTarget(max_tokens=200)
    target.cache.begin(0, PROMPT)
    feed(target, 0, (*PROMPT[:149], 1, 2, 3))  # rejected draft tokens
    target.cache.commit(0, PROMPT, 149)
    assert np.array_equal(feed(target, 0, PROMPT, 149), fresh(PROMPT))


def test_a_pass_takes_what_it_costs() -> None:
    for tokens, milliseconds in TINYLLAMA.items():
        target = SimulatedTarget(slowness=2.0)
        target.cache.begin(0, PROMPT)
        feed(target, 0, PROMPT[:tokens])
        assert target.clock() == pytest.approx(2 * milliseconds / 1000, rel=0.05)
        assert target.computed == tokens


def test_what_is_not_reserved_is_refused() -> None:
    target = SimulatedTarget()
    target.cache.begin(0, PROMPT)
    batch = Batch()
    batch.add(0, 0, PROMPT[:10], 1)
    with pytest.raises(ValueError, match="not within"):
        target.forward(batch)
    with pytest.raises(ValueError, match="1 to 96"):
        target.forward(Batch())


def test_another_seed_agrees_where_neither_text_is_surprised() -> None:
    one, other = Text(surprise=0.3), Text(surprise=0.3, seed=1)
    same = 0
    for length in range(1, 150):
        same += one.continuation(PROMPT[:length], 1) == other.continuation(PROMPT[:length], 1)
    assert 0.35 * 149 < same < 0.65 * 149
    assert Text().continuation(PROMPT, 5) == Text().continuation(PROMPT, 5)
