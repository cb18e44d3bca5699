"""Penalties, biases and forbidden words: each position's logits by the tokens before it."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest

from specops.request import SamplingParams
from specops.runtime.logits_processor import LogitsProcessor
from specops.runtime.sampling import Floats

VOCAB = 12
PROMPT = (1, 2, 2, 3)
END = 11
KNOBS = {
    "presence": SamplingParams(presence_penalty=0.7),
    "frequency": SamplingParams(frequency_penalty=-0.4),
    "repetition": SamplingParams(repetition_penalty=1.3),
    "bias": SamplingParams(logit_bias=((4, 2.0), (5, -100.0))),
    "words": SamplingParams(bad_words=((6,), (7, 8), (2, 7, 9))),
    "all": SamplingParams(
        presence_penalty=-1.0,
        frequency_penalty=0.3,
        repetition_penalty=0.8,
        logit_bias=((2, 1.5),),
        bad_words=((8, 8),),
    ),
}


def plainly(logits: Floats, params: SamplingParams, answer: Sequence[int], least: int) -> Floats:
    """The same token by token, as the definitions say."""
    found = logits.copy()
    for word in params.bad_words:
        if tuple(answer[len(answer) - len(word) + 1 :]) == word[:-1]:
            found[word[-1]] = -np.inf
    if len(answer) < least:
        found[END] = -np.inf
    for token, bias in params.logit_bias:
        found[token] += np.float32(bias)
    counts = Counter(answer)
    for token in range(VOCAB):
        if token in (*PROMPT, *answer):
            factor = np.float32(params.repetition_penalty)
            found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
        found[token] -= np.float32(params.frequency_penalty) * np.float32(counts[token])
        found[token] -= np.float32(params.presence_penalty) * np.float32(counts[token] > 0)
    return found


@pytest.mark.parametrize("name", KNOBS)
@pytest.mark.parametrize("least", [0, 5])
def test_every_position_is_adjusted_by_the_tokens_before_it(name: str, least: int) -> None:
    """Draft tokens count as well; `apply` leaves the answer as it was."""
    params, rng = KNOBS[name], np.random.default_rng(3)
    processor = LogitsProcessor(params, PROMPT, end_tokens={END}, min_tokens=least)
    answer: list[int] = []
    for step in range(30):
        forced, draft = rng.integers(0, 11, step % 3), rng.integers(0, 11, step % 4)
        tokens = [*forced.tolist(), *draft.tolist()]
        logits = rng.standard_normal((len(draft) + 1, VOCAB)).astype(np.float32) * 3
        expected = [
            plainly(row, params, answer + tokens[: len(forced) + index], least)
            for index, row in enumerate(logits)
        ]
        processor.apply(logits, tokens)
        assert np.array_equal(logits, np.stack(expected))
        for token in tokens[: 1 + step % 2]:
            processor.append(token)
            answer.append(token)


def test_many_different_tokens_are_counted() -> None:
    processor = LogitsProcessor(
        SamplingParams(presence_penalty=1.0), (), end_tokens=(), min_tokens=0
    )
    for token in range(500):
        processor.append(token)
    logits = np.zeros((1, 600), np.float32)
    processor.apply(logits, ())
    assert (logits[0, :500] == -1).all()
    assert not logits[0, 500:].any()


def test_no_penalty_makes_logits_infinite() -> None:
    params = SamplingParams(repetition_penalty=5e-324)
    processor = LogitsProcessor(params, PROMPT, end_tokens={END}, min_tokens=0)
    logits = np.full((1, VOCAB), 1e4, np.float32)
    processor.apply(logits, ())
    assert np.isfinite(logits).all()
