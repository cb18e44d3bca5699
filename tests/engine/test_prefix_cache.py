"""What requests leave in the cache saves others work and changes no token of theirs."""

from __future__ import annotations

import numpy as np
import pytest

from specops.request import SamplingParams
from tests.simulated_target import (
    VOCAB,
    SimulatedTarget,
    expected,
    make_request,
    make_scheduler,
    serve,
)
from tests.speculation.drafters.scripted import Scripted

SYSTEM = tuple(np.random.default_rng(5).integers(1, VOCAB, 141).tolist())


@pytest.mark.parametrize("drafter", ["none", "half"])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(0.8, seed=3)], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("slots", [1, 8])
def test_a_conversation_is_the_same_and_only_its_new_part_is_computed(
    drafter: str, sampling: SamplingParams, slots: int
) -> None:
    target = SimulatedTarget(num_slots=slots)
    scheduler = make_scheduler(target, [Scripted(target.text, 0.6, name="half")])
    rng = np.random.default_rng(1)
    prompt, held = SYSTEM, 0
    for _ in range(5):
        request = make_request(prompt, 22, drafter=drafter, k_draft=3, sampling=sampling)
        served = serve(scheduler, request)
        answer = expected(target.text, request)
        assert served.tokens(request) == answer
        assert served.stats(request).cached_prompt_tokens == held
        held = len(prompt) + len(answer) - 1  # the last token was never computed
        prompt += (*answer, *rng.integers(1, VOCAB, int(rng.integers(1, 8))).tolist())


@pytest.mark.parametrize("kept", [*range(7, 12), 63, 64, 65, 100, 127, 128, 129, 140])
def test_a_beginning_of_any_length_gives_the_same_text(kept: int) -> None:
    target = SimulatedTarget()
    scheduler = make_scheduler(target)
    serve(scheduler, make_request((*SYSTEM[:kept], 0), 1))
    request = make_request(SYSTEM, 30)
    served = serve(scheduler, request)
    assert served.tokens(request) == expected(target.text, request)
    found = served.stats(request).cached_prompt_tokens
    whole, part = divmod(kept, 64)
    assert found == 64 * whole + (part if part >= 8 else 0)


def test_who_waits_for_the_same_prompt_computes_it_once() -> None:
    """Requests that come together: the others take over what the first one has computed."""
    target = SimulatedTarget(max_tokens=96)
    scheduler = make_scheduler(target)
    prompt = make_request(600).prompt_tokens
    requests = [make_request((*prompt, index), 4) for index in range(4)]
    served = serve(scheduler, *requests)
    for request in requests:
        assert served.tokens(request) == expected(target.text, request)
    assert target.computed < 600 + 4 * (64 + 4)
    assert max(result.shared_blocks for result in served.results) == 600 // 64
    assert sum(item.cached_tokens for item in served.results) > 3 * 500


def test_what_is_kept_is_told_and_given_up_for_those_who_run() -> None:
    target = SimulatedTarget(num_slots=2, context=320, num_blocks=5)
    scheduler = make_scheduler(target)
    served = serve(scheduler, make_request(SYSTEM, 20))
    last = served.results[-1]
    assert (last.kv_tokens, last.used_blocks) == (0, 0)
    assert last.kept_tokens == len(SYSTEM) + 19
    assert last.kept_blocks == 3
    request = make_request(300, 20)
    served = serve(scheduler, request)
    assert served.tokens(request) == expected(target.text, request)
    assert max(result.used_blocks for result in served.results) == 5
    assert served.stats(request).preemptions == 0
