"""A long prompt makes nobody wait longer than allowed, and does not wait long itself."""

from collections.abc import Sequence

import numpy as np
import pytest

from specops.engine import prompt_pooler
from specops.engine.scheduler import Scheduler
from specops.request import Logprob
from specops.runtime.batch import Batch
from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftContext, Drafter
from tests.simulated_target import (
    Clock,
    SimulatedTarget,
    make_budget,
    make_request,
    make_scheduler,
    tinyllama,
)

PROMPT = 1500
NO_BOUND = float("inf")


def read_prompt(
    target: SimulatedTarget, scheduler: Scheduler, prompts: int = 1
) -> tuple[float, list[float]]:
    """Add long prompts: the time until their first tokens, and everybody else's pauses."""
    waiting = set()
    for _ in range(prompts):
        request = make_request(PROMPT, 1)
        waiting.add(request.request_id)
        scheduler.add(request)
    start, last = target.clock(), dict[str, float]()
    pauses = []
    while waiting:
        for output in scheduler.step().outputs:
            waiting.discard(output.request_id)
            if output.request_id in last:
                pauses.append(target.clock() - last[output.request_id])
            last[output.request_id] = target.clock()
    return target.clock() - start, pauses


def machine(
    max_inter_token_latency: float = NO_BOUND, **fields: float
) -> tuple[SimulatedTarget, Scheduler]:
    target = SimulatedTarget(context=2048, **fields)  # type: ignore[arg-type]
    return target, make_scheduler(target, max_inter_token_latency=max_inter_token_latency)


def beside(
    running: int,
    max_inter_token_latency: float,
    prompts: int = 1,
    stream: bool = True,
    **fields: float,
) -> tuple[float, list[float]]:
    """Beside others that have been decoding for a while."""
    target, scheduler = machine(max_inter_token_latency, **fields)
    for _ in range(running):
        scheduler.add(make_request(20, 1000, stream=stream))
    for _ in range(30):
        scheduler.step()
    return read_prompt(target, scheduler, prompts)


def alone(**fields: float) -> float:
    return read_prompt(*machine(**fields))[0]


@pytest.mark.parametrize("scatter", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("pause", [0.06, 0.1, 0.15])
@pytest.mark.parametrize("running", [1, 2, 4])
def test_ninety_nine_of_a_hundred_pauses_are_within_the_bound(
    running: int, pause: float, scatter: float
) -> None:
    _, pauses = beside(running, pause, prompts=3, scatter=scatter)
    assert len(pauses) >= 30
    assert np.quantile(pauses, 0.99) <= pause


@pytest.mark.parametrize(("running", "longer"), [(1, 1.35), (2, 1.4), (4, 1.55)])
def test_the_prompt_is_hardly_slower_than_alone(running: int, longer: float) -> None:
    """Beside those who decode; a chunk is half as wide then, and narrower passes cost more."""
    seconds, _ = beside(running, 0.15)
    assert seconds <= longer * alone()


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_a_machine_of_another_speed_is_learned(slowness: float) -> None:
    """The costs that it begins with are wrong by a factor of 2."""
    _, pauses = beside(2, 0.15, slowness=slowness)
    assert np.quantile(pauses, 0.95) <= 0.15
    assert max(pauses[8:]) <= 0.15


def test_what_a_head_reads_of_a_prompt_is_part_of_the_pause() -> None:
    """Its pass comes behind the target's, and those that decode wait for both."""

    class Reading(Drafter):
        name = "head"

        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def read_seconds(self, slot: int) -> float:
            return self.seconds

        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            return [NO_DRAFT] * len(contexts)

    pieces = []
    for seconds in (0.0, 1e-3):
        target, head = SimulatedTarget(context=2048), Reading(seconds)
        scheduler = make_scheduler(target, [head], max_inter_token_latency=0.15)
        scheduler.add(make_request(20, 1000))
        scheduler.step()
        scheduler.add(make_request(PROMPT, 9, drafter="head", k_draft=4))
        scheduler.step()
        pieces.append(target.passes[-1].num_tokens - 1)
    without, read = pieces
    saved = tinyllama().cost(without) - tinyllama().cost(read)
    assert saved == pytest.approx(read * 1e-3, rel=0.15)


def test_where_decoding_alone_takes_longer_than_the_bound_prompts_still_get_on() -> None:
    seconds, pauses = beside(7, 0.01)
    assert min(pauses) > 0.01
    assert seconds < 8 * alone()
    position = 1_000_000  # and however dear a token has become
    budget = make_budget(max_inter_token_latency=0.01)
    batch = decoding(7)
    seconds = budget.pass_seconds(batch, client_waits=True)
    assert budget.prompt_tokens(batch, position, seconds, first=True) == 8
    assert budget.prompt_tokens(batch, position, seconds, first=False) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_where_nobody_watches_prompts_get_all_the_room(stream: bool) -> None:
    target, scheduler = machine(0.05)
    scheduler.add(make_request(20, 1000, stream=stream))
    scheduler.step()
    prompt = make_request(500, 1)
    scheduler.add(prompt)
    told: set[str] = set()
    while prompt.request_id not in told:
        told = {output.request_id for output in scheduler.step().outputs}
    assert (max(batch.num_tokens for batch in target.passes) == 96) == (not stream)


def test_a_prompt_that_can_wait_hardly_slows_a_suggestion_and_does_not_starve() -> None:
    target, scheduler = machine()
    suggestions = [make_request(20, 200, stream=False, priority=-1) for _ in range(2)]
    scheduler.add(suggestions[0])
    scheduler.step()
    long = make_request(1500, 1)
    scheduler.add(long)
    scheduler.add(suggestions[1])
    scheduler.step()
    assert target.passes[1].spans[1].tokens == list(suggestions[1].prompt_tokens)  # goes before it
    least, sizes = tinyllama().cost(2) * 4 / 3, []
    for _ in range(20):
        scheduler.step()
        sizes.append(target.passes[-1].num_tokens)
    assert max(sizes) == 2 + 8  # some tokens come with each pass
    assert tinyllama().cost(2 + 8) < 2 * least
    while scheduler.busy and target.clock() < 30:
        if len(scheduler.running) < 3:
            scheduler.add(make_request(20, 200, stream=False, priority=-1))
        if any(output.request_id == long.request_id for output in scheduler.step().outputs):
            return
    raise AssertionError("the long prompt starves")


def test_who_comes_while_a_cache_is_warmed_waits_for_a_short_pass() -> None:
    target, scheduler = machine(0.15)
    scheduler.add(make_request(500, 0, stream=False, priority=1))
    while scheduler.busy:
        began = target.clock()
        scheduler.step()
        assert target.clock() - began <= 0.15
    assert len(target.passes) > 500 / 96 + 1


def decoding(requests: int, position: int = 20) -> Batch:
    batch = Batch()
    for slot in range(requests):
        batch.add(slot, position, [1], 1)
    return batch


@pytest.mark.parametrize("logit_seconds", [0.0, 0.001])
def test_a_machine_that_keeps_its_times_gets_nearly_all_of_the_bound(logit_seconds: float) -> None:
    costs = tinyllama(logit_seconds=logit_seconds)
    budget = make_budget(costs=costs, max_inter_token_latency=0.1)

    def seconds(prompt: int) -> float:
        batch = decoding(4)
        batch.add(4, 0, [1] * prompt, 0)  # a piece, not the end
        taken = costs.cost(prompt + 4, batch.attention_work, logits=4)
        budget.observe(batch, taken)
        return taken

    for _ in range(60):
        seconds(40)
        seconds(70)
    allowed = budget.pass_seconds(decoding(4), client_waits=True)
    assert allowed > 0.099
    found = budget.prompt_tokens(decoding(4), 0, allowed, first=True)
    assert seconds(found) <= 0.1 < seconds(found + 2)


def test_a_bad_moment_is_forgotten() -> None:
    """Also where it has made the chunks so short that none of their passes is long."""
    costs = tinyllama()
    budget = make_budget(max_inter_token_latency=0.1)

    def room(passes: int, slowness: float) -> int:
        for _ in range(passes):
            batch = decoding(1)
            seconds = budget.pass_seconds(batch, client_waits=True)
            found = budget.prompt_tokens(batch, 0, seconds, first=True)
            batch.add(1, 0, [1] * found, 1)
            budget.observe(batch, slowness * costs.cost(batch.num_tokens, batch.attention_work))
        return found

    before = room(40, 1.0)
    assert room(10, 1.7) < before / 2
    assert room(60, 1.0) == before


def test_short_passes_tell_nothing_of_long_ones() -> None:
    budget = make_budget(max_inter_token_latency=0.1)
    before = budget.pass_seconds(decoding(1), client_waits=True)
    for _ in range(20):
        budget.observe(decoding(2), 0.04)
    assert budget.pass_seconds(decoding(1), client_waits=True) == before


def test_a_draft_model_takes_in_as_much_as_fits_into_the_bound() -> None:
    draft = tinyllama(0.1)
    budget = make_budget(draft, max_inter_token_latency=0.05, max_batched_tokens=512)
    one, eight = (budget.draft_model_tokens(requests, 0) for requests in (1, 8))
    assert one > eight >= 8
    assert tinyllama().cost(1) + draft.cost(one) <= 0.05
    unbound = make_budget(draft, max_batched_tokens=64)
    assert unbound.draft_model_tokens(8, 0) == 64
    without = make_budget(max_inter_token_latency=0.05, max_batched_tokens=64)
    assert without.draft_model_tokens(1, 0) == 0


def test_the_time_to_read_a_prompts_probabilities_is_a_part_of_the_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With 5 others beside each token it took 9 ms a pass, in no budget."""
    pauses = []
    for slowness in (0.0, 0.002):  # seconds for each token
        target = SimulatedTarget(context=2048)
        scheduler = make_scheduler(target, max_inter_token_latency=0.1)

        def slow(*_: object, clock: Clock = target.clock, seconds: float = slowness) -> Logprob:
            clock.now += seconds
            return Logprob(0.0, ())

        monkeypatch.setattr(prompt_pooler, "logprob", slow)
        for _ in range(2):
            scheduler.add(make_request(20, 1000))
        for _ in range(30):
            scheduler.step()
        scheduler.add(make_request(1200, 1, prompt_logprobs=5))
        scheduler.step()  # the first piece is a measurement
        before, read = target.clock(), target.passes[-1].num_tokens
        scheduler.step()
        pauses.append(target.clock() - before)
        assert target.passes[-1].num_tokens < read or not slowness
    assert pauses[1] < pauses[0]  # the next piece is shorter by what its reading takes
