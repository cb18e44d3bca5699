"""What requests leave in the cache saves others work and changes no token of theirs."""

import numpy as np
import pytest

from specops.request import SamplingParams
from tests.simulated_target import (
    VOCAB,
    Served,
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


@pytest.mark.parametrize("chunks", [150, 64 * 3 - 2])
def test_a_key_costs_what_was_typed_and_a_jump_keeps_what_stands_before(chunks: int) -> None:
    """Also where the next key cancels each key's request, after its first pass or a later one."""
    target, rng = SimulatedTarget(context=1024, max_tokens=512), np.random.default_rng(1)
    scheduler = make_scheduler(target)
    context, before, behind, typed, other = (
        tuple(rng.integers(1, VOCAB, size).tolist()) for size in (chunks, 90, 70, 40, 100)
    )
    serve(scheduler, make_request(context, 0, priority=1))  # warms
    prompts = [(*context, *before, *behind, *typed[:key]) for key in range(len(typed))]
    for key, prompt in enumerate((*prompts, (*context, *other, *behind))):
        request, computed = make_request(prompt, 8, priority=-1), target.computed
        scheduler.add(request)
        for _ in range(1 + key % 4):
            scheduler.step()
        scheduler.cancel(request.request_id)
        scheduler.step()
        decoded = key % 4
        read = target.computed - computed - decoded
        most = len(before) + len(behind) if not key else 1
        if key == len(typed):  # the jump
            most = len(other) + len(behind)
        assert read <= most + 8  # where less than 8 tokens of a block are the same, it is computed
    last = make_request(prompts[-1], 8)
    assert serve(scheduler, last).tokens(last) == expected(target.text, last)


def test_who_waits_for_the_same_prompt_computes_it_once() -> None:
    """Requests that come together: the others take over what the first one has computed."""
    target = SimulatedTarget(max_tokens=96)
    scheduler = make_scheduler(target)
    prompt = make_request(600).prompt_tokens
    requests = [make_request((*prompt, index), 4) for index in range(4)]
    served, shared = Served(), 0
    for request in requests:
        scheduler.add(request)
    while scheduler.busy:
        served.step(scheduler)
        shared = max(shared, target.cache.shared_blocks)
    for request in requests:
        assert served.tokens(request) == expected(target.text, request)
    assert target.computed < 600 + 4 * (64 + 4)
    assert shared == 600 // 64
    assert sum(item.cached_tokens for item in served.results) > 3 * 500


def test_answers_to_one_prompt_compute_it_once() -> None:
    """Nobody computes in the same pass what another one does, and the last part is taken over."""
    target = SimulatedTarget(max_tokens=96)
    prompt = make_request(600).prompt_tokens
    requests = [make_request(prompt, 4) for _ in range(4)]
    served = serve(make_scheduler(target), *requests)
    for request in requests:
        assert served.tokens(request) == expected(target.text, request)
    assert target.computed == 600 + 3 * 1 + 4 * 3


def test_what_is_kept_is_told_and_given_up_for_those_who_run() -> None:
    target = SimulatedTarget(num_slots=2, context=320, num_blocks=5)
    scheduler = make_scheduler(target)
    serve(scheduler, make_request(SYSTEM, 20))
    cache = target.cache
    assert (cache.tokens, cache.used_blocks) == (0, 0)
    assert (cache.cached_tokens, cache.cached_blocks) == (len(SYSTEM) + 19, 3)
    request = make_request(300, 20)
    served = Served()
    scheduler.add(request)
    while not served.finish(request):
        most = cache.used_blocks
        served.step(scheduler)
    assert served.tokens(request) == expected(target.text, request)
    assert most == 5
    assert served.stats(request).preemptions == 0
