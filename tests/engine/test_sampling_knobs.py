"""Every way to choose tokens gives speculative requests what plain decoding gives them."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from scipy.stats import chi2_contingency

from specops.engine.scheduler import Scheduler
from specops.request import FinishReason, GenerationRequest, SamplingParams
from specops.runtime.logits_processor import LogitsProcessor
from specops.speculation.drafters.suffix import SuffixDrafter
from specops.speculation.verifier import verify
from tests.simulated_target import (
    VOCAB,
    Served,
    SimulatedTarget,
    make_request,
    make_scheduler,
    serve,
)
from tests.speculation.drafters.scripted import Scripted

PROMPT = tuple(range(3, 20)) * 2
KNOBS = {
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.4},
    "bias": {"logit_bias": ((9, 4.0), (10, -100.0))},
    "words": {"bad_words": ((12,), (48,), (14, 15), (20, 21, 22))},
    "filters": {"min_p": 0.05, "top_p": 0.9},
    "together": {"presence_penalty": 0.4, "repetition_penalty": 1.1, "min_p": 0.02, "top_k": 20},
}


def made() -> Scheduler:
    target = SimulatedTarget()
    drafters = [SuffixDrafter(), Scripted(target.text, 0.6, name="half", silent=0.2)]
    return make_scheduler(target, drafters, end_tokens=frozenset({0}))


def tokens(request: GenerationRequest) -> list[int]:
    return serve(made(), request).tokens(request)


@pytest.mark.parametrize("knob", KNOBS)
@pytest.mark.parametrize("base", [SamplingParams(), SamplingParams(1.2, seed=4)], ids=["0", "seed"])
def test_drafts_change_no_token(knob: str, base: SamplingParams) -> None:
    sampling = replace(base, **KNOBS[knob])  # type: ignore[arg-type]
    plain = tokens(make_request(PROMPT, 60, sampling=sampling))
    if knob != "filters" or base.temperature:
        assert plain != tokens(make_request(PROMPT, 60, sampling=base))
    for drafter in ("suffix", "half"):
        for k_draft in (1, 4, 8):
            asked = make_request(PROMPT, 60, sampling=sampling, drafter=drafter, k_draft=k_draft)
            assert tokens(asked) == plain


def test_words_and_biases_are_obeyed() -> None:
    sampling = SamplingParams(2.0, seed=1, logit_bias=((30, -100.0),), bad_words=((31,), (33, 34)))
    found = tokens(make_request(PROMPT, 200, sampling=sampling, drafter="suffix", k_draft=4))
    assert not {30, 31} & set(found)
    assert (33, 34) not in set(pairwise(found))
    assert 33 in found


def test_a_stop_token_ends_the_answer_and_not_before_its_time() -> None:
    free = tokens(make_request(PROMPT, 40))
    stop = free[5]

    def ended(**fields: object) -> tuple[Served, GenerationRequest]:
        asked = make_request(
            PROMPT, 40, stop_token_ids=(stop,), drafter="half", k_draft=4, **fields
        )
        return serve(made(), asked), asked

    served, asked = ended()
    assert served.tokens(asked) == free[: free.index(stop) + 1]
    assert served.finish(asked) is FinishReason.STOP
    served, asked = ended(min_tokens=20)
    found = served.tokens(asked)
    assert stop not in found[:20]
    assert len(found) >= 20


def pairs(rule: str) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """How often two tokens are which, with a penalty that the first one lays on the second."""
    logits = np.random.default_rng(1).standard_normal((1, 5)).astype(np.float32).repeat(2, axis=0)
    params, found = SamplingParams(1.0, presence_penalty=2.0), np.zeros((5, 5), np.int64)
    rng = np.random.default_rng(len(rule))
    for _ in range(6000):
        processor = LogitsProcessor(params, (), end_tokens=(), min_tokens=0)
        answer: list[int] = []
        while len(answer) < 2:
            draft = [] if rule == "plain" or answer else [int(rng.integers(5))]
            rows = logits[: len(draft) + 1].copy()
            processor.apply(rows, draft)
            verdict = verify(rows, draft, None, sampling=params, noise=None, rng=rng, position=0)
            for token in [*draft[: verdict.accepted], verdict.next_token]:
                processor.append(token)
                answer.append(token)
        found[answer[0], answer[1]] += 1
    return found


def test_drawn_tokens_are_distributed_as_without_drafts() -> None:
    table = np.stack([pairs("plain").ravel(), pairs("verified").ravel()])
    assert chi2_contingency(table).pvalue > 1e-3


def test_probabilities_are_told_as_the_target_has_them() -> None:
    sampling = SamplingParams(logit_bias=((40, 100.0),))
    asked = make_request(PROMPT, 3, sampling=sampling, logprobs=VOCAB)
    (first, *_) = [
        piece
        for output in serve(made(), asked).outputs[asked.request_id]
        for piece in output.pieces
    ]
    assert first.token == 40
    assert first.logprob is not None
    assert first.logprob.top[0][0] != 40
