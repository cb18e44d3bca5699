"""Probabilities of tokens: the target's own, for any drafter and any way to choose tokens."""

from dataclasses import replace

import numpy as np
import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest, Logprob, SamplingParams, TokenOutput
from specops.runtime.batch import Batch
from specops.runtime.sampling import logprob

PROMPT = tuple(range(1, 40))
REQUEST = GenerationRequest(
    request_id="r", prompt_tokens=PROMPT, max_new_tokens=24, ignore_eos=True, logprobs=3
)


@pytest.fixture(scope="module")
def engine(tiny_settings: Settings) -> Engine:
    return Engine.load(tiny_settings)


def generated(engine: Engine, request: GenerationRequest) -> list[TokenOutput]:
    return [piece for output in engine.generate(request) for piece in output.pieces]


def test_it_is_the_logarithm_of_the_softmax() -> None:
    logits = np.random.default_rng(1).normal(0, 8, 5000).astype(np.float32)
    exact = logits.astype(np.float64)
    expected = exact - np.log(np.exp(exact - exact.max()).sum()) - exact.max()
    told = logprob(logits, 17, 20)
    assert told.chosen == pytest.approx(expected[17], abs=1e-5)
    order = np.argsort(-expected)[:20]
    assert [token for token, _ in told.top] == order.tolist()
    assert [value for _, value in told.top] == pytest.approx(expected[order], abs=1e-5)


def test_of_equally_likely_tokens_the_first_come_first() -> None:
    told = logprob(np.zeros(8, np.float32), 5, 8)
    assert [token for token, _ in told.top] == list(range(8))
    assert told.chosen == pytest.approx(-np.log(8))


@pytest.mark.parametrize("top", [0, 1, 320])
def test_as_many_are_told_as_were_asked_for(engine: Engine, top: int) -> None:
    for piece in generated(engine, replace(REQUEST, logprobs=top)):
        assert len(piece.logprob.top) == top


def test_greedy_takes_the_likeliest_and_says_so(engine: Engine) -> None:
    for piece in generated(engine, REQUEST):
        assert piece.logprob.top[0] == (piece.token, piece.logprob.chosen)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("drawn", [False, True])
def test_drafting_changes_no_probability(engine: Engine, temperature: float, drawn: bool) -> None:
    sampling = SamplingParams(temperature, top_k=50, seed=3, repetition_penalty=1.2)
    plain = replace(REQUEST, sampling=sampling, drawn_logprobs=drawn)
    pieces = generated(engine, replace(plain, drafter="draft", k_draft=4))
    assert any(piece.origin == "draft" for piece in pieces)
    assert [(item.token, item.logprob) for item in pieces] == [
        (item.token, item.logprob) for item in generated(engine, plain)
    ]


def test_those_that_a_token_is_drawn_with_are_behind_penalties_and_filters(engine: Engine) -> None:
    banned = generated(engine, replace(REQUEST, max_new_tokens=1))[0].token
    sampling = SamplingParams(2.0, top_k=3, seed=3, logit_bias=((banned, -1e9),))
    asked = replace(REQUEST, max_new_tokens=1, sampling=sampling, logprobs=5)
    (before,), (behind,) = (
        generated(engine, replace(asked, drawn_logprobs=drawn)) for drawn in (False, True)
    )
    assert before.token == behind.token
    candidates = [item for item in before.logprob.top if item[0] != banned][:3]
    weights = np.exp([value / 2.0 for _, value in candidates])
    assert [token for token, _ in behind.logprob.top] == [token for token, _ in candidates]
    assert np.exp([value for _, value in behind.logprob.top]) == pytest.approx(
        weights / weights.sum(), abs=1e-5
    )


def test_a_greedy_token_is_drawn_with_certainty(engine: Engine) -> None:
    for piece in generated(engine, replace(REQUEST, drawn_logprobs=True)):
        assert piece.logprob == Logprob(0.0, ((piece.token, 0.0),))


def test_those_of_a_prompt_are_those_of_its_own_tokens(engine: Engine) -> None:
    """In chunks, beside a request that decodes, and although another has computed the same."""
    asked = replace(REQUEST, prompt_logprobs=3, drafter="draft", k_draft=4)
    told = [tuple(next(engine.generate(asked)).prompt) for _ in range(2)]
    assert told[0] == told[1]
    assert told[0][0] is None
    assert len(told[0]) == len(PROMPT)
    for place in (1, 7, len(PROMPT) - 1):  # each one as the first token of an answer
        before = replace(REQUEST, prompt_tokens=PROMPT[:place], max_new_tokens=1, logprobs=320)
        (piece,) = generated(engine, before)
        found = told[0][place]
        assert dict(piece.logprob.top)[PROMPT[place]] == found.chosen
        assert piece.logprob.top[:3] == found.top


def test_they_are_those_of_the_models_logits(engine: Engine) -> None:
    sampling = SamplingParams(1.5, top_k=5, seed=4)
    pieces = generated(engine, replace(REQUEST, sampling=sampling))
    tokens = [*PROMPT, *(piece.token for piece in pieces)]
    target = engine.scheduler.target
    cache, logits = target.cache, []
    cache.allocate(0, tokens, "nobody has asked for this before")
    cache.reserve(0, len(tokens))
    for start in range(0, len(tokens), 16):
        batch = Batch()
        piece_of = tokens[start : start + 16]
        batch.add(0, start, piece_of, len(piece_of))
        logits.append(target.forward(batch).copy())
    cache.release(0)
    rows = np.concatenate(logits)[len(PROMPT) - 1 : -1]
    for row, piece in zip(rows, pieces, strict=True):
        assert piece.logprob == logprob(row, piece.token, 3)
