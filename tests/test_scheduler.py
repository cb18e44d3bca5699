"""Requests through the scheduler: the same answers alone and together, with and without guesses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from specops.config import Settings
from specops.drafters.base import NO_DRAFT, Draft, LookupDrafter
from specops.engine import Engine
from specops.request import (
    TARGET,
    FinishReason,
    GenerationRequest,
    Output,
    SamplingParams,
    StepKind,
    StepStats,
)
from tests.conftest import CONTEXT, ROWS

RNG = np.random.default_rng(7)
PROMPTS = [tuple(RNG.integers(1, 320, length).tolist()) for length in (3, 17, 40, 16, 1, 5)]
_ids = count()


@pytest.fixture(scope="module")
def loaded(tiny_settings: Settings) -> Engine:
    return Engine.load(tiny_settings)


@pytest.fixture
def engine(loaded: Engine) -> Engine:
    assert not loaded.scheduler.busy
    assert loaded.scheduler.rows.tokens == 0
    return loaded


def request(prompt: tuple[int, ...] = PROMPTS[0], **fields: object) -> GenerationRequest:
    defaults: dict[str, object] = {"max_new_tokens": 24, "ignore_eos": True, "exact": True}
    return GenerationRequest(
        request_id=str(next(_ids)),
        prompt_tokens=prompt,
        **{**defaults, **fields},  # type: ignore[arg-type]
    )


def run(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[Output]]:
    """All outputs by request; the requests arrive at once."""
    outputs: dict[str, list[Output]] = {item.request_id: [] for item in requests}
    for item in requests:
        engine.scheduler.add(item)
    while engine.scheduler.busy:
        for output in engine.scheduler.step().outputs:
            outputs[output.request_id].append(output)
    return outputs


def tokens(outputs: list[Output]) -> list[int]:
    return [piece.token for output in outputs for piece in output.pieces]


def generate(engine: Engine, item: GenerationRequest) -> list[int]:
    return tokens(list(engine.generate(item)))


class Oracle(LookupDrafter):
    """Guesses a known continuation, with an error now and then."""

    name = "draft"
    runs_model = True

    def __init__(self, known: list[int], wrong_every: int = 0) -> None:
        self._known = known
        self._wrong_every = wrong_every

    def look_up(self, row: int, tokens: Sequence[int], count: int) -> Draft:
        return NO_DRAFT

    def backlog(self, row: int, length: int) -> int:
        return 1

    def propose(
        self,
        row: int,
        tokens: Sequence[int],
        count: int,
        sampling: SamplingParams,
        rng: np.random.Generator,
    ) -> Draft:
        guesses = list(self._known[len(tokens) : len(tokens) + count])
        for index in range(len(guesses)):
            if self._wrong_every and (len(tokens) + index) % self._wrong_every == 0:
                guesses[index] = (guesses[index] + 1) % 320
        return Draft(tuple(guesses))


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
@pytest.mark.parametrize("k_draft", range(1, 9))
def test_speculative_output_is_plain_output(engine: Engine, drafter: str, k_draft: int) -> None:
    for prompt in PROMPTS:
        plain = generate(engine, request(prompt))
        assert len(plain) == 24
        assert generate(engine, request(prompt, drafter=drafter, k_draft=k_draft)) == plain


def test_requests_together_get_what_each_gets_alone(engine: Engine) -> None:
    kinds = [("none", 0), ("ngram", 4), ("draft", 3), ("draft", 8), ("none", 0), ("ngram", 1)]
    items = [
        request(prompt, drafter=drafter, k_draft=k, max_new_tokens=10 + 5 * index)
        for index, (prompt, (drafter, k)) in enumerate(zip(PROMPTS, kinds, strict=True))
    ]
    together = run(engine, items)
    for item in items:
        alone = generate(engine, replace(item, request_id=item.request_id + "-alone"))
        assert tokens(together[item.request_id]) == alone


def test_plain_requests_share_passes(engine: Engine) -> None:
    for prompt in PROMPTS[:ROWS]:
        engine.scheduler.add(request(prompt, exact=False))
    widest = 0
    while engine.scheduler.busy:
        steps = engine.scheduler.step().stats
        widest = max([widest, *(step.rows for step in steps if step.kind is StepKind.DECODE)])
    assert widest == ROWS


def test_whoever_verifies_does_not_part_the_others(engine: Engine) -> None:
    """Rows 0 and 2 share a pass although row 1, up to the end of its context, has its own."""
    longest = tuple(RNG.integers(1, 320, CONTEXT - 20).tolist())
    prompts = [PROMPTS[1], longest, PROMPTS[2]]
    alone = [generate(engine, request(prompt, exact=False)) for prompt in prompts]
    drafters = engine.scheduler.drafters
    engine.scheduler.drafters = {"draft": Oracle([*longest, *alone[1]], wrong_every=3)}
    guessing = {"drafter": "draft", "k_draft": 4, "max_new_tokens": 20}
    items = [
        request(prompt, exact=False, **(guessing if prompt is longest else {}))
        for prompt in prompts
    ]
    for item in items:
        engine.scheduler.add(item)
    found: dict[str, list[int]] = {item.request_id: [] for item in items}
    rounds = []
    try:
        while engine.scheduler.busy:
            result = engine.scheduler.step()
            rounds.append([step.kind for step in result.stats if step.kind is not StepKind.PREFILL])
            for output in result.outputs:
                found[output.request_id] += [piece.token for piece in output.pieces]
    finally:
        engine.scheduler.drafters = drafters
    assert [StepKind.VERIFY, StepKind.DECODE] in rounds
    assert max(kinds.count(StepKind.DECODE) for kinds in rounds) == 1
    assert [found[item.request_id] for item in items] == [alone[0], alone[1], alone[2]]


def test_the_outputs_origin_is_told(engine: Engine) -> None:
    prompt = PROMPTS[1]
    plain = generate(engine, request(prompt))
    drafters = engine.scheduler.drafters
    engine.scheduler.drafters = {"draft": Oracle([*prompt, *plain], wrong_every=3)}
    try:
        outputs = list(engine.generate(request(prompt, drafter="draft", k_draft=4)))
    finally:
        engine.scheduler.drafters = drafters
    assert tokens(outputs) == plain
    stats = outputs[-1].stats
    assert stats is not None
    origins = [piece.origin for output in outputs for piece in output.pieces]
    assert origins[0] == TARGET
    assert origins.count("draft") == stats.accepted_tokens > 0
    assert origins.count(TARGET) == 1 + stats.sequence_steps
    assert stats.tokens_per_jump == pytest.approx(23 / stats.sequence_steps)


def test_the_counts_add_up(engine: Engine) -> None:
    """Tokens, steps and guesses: the same in the request's statistics and in its steps'."""
    item = request(PROMPTS[2], drafter="draft", k_draft=3, max_new_tokens=40)
    engine.scheduler.add(item)
    steps: list[StepStats] = []
    outputs: list[Output] = []
    while engine.scheduler.busy:
        result = engine.scheduler.step()
        steps += result.stats
        outputs += result.outputs
    stats = outputs[-1].stats
    assert stats is not None
    computed, cached = (
        sum(getattr(step, name) for step in steps) for name in ("prompt_tokens", "cached_tokens")
    )
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (computed + cached, cached)
    assert stats.generated_tokens == sum(step.emitted_tokens for step in steps) == 40
    assert len(tokens(outputs)) == 40
    decoding = [step for step in steps if step.kind is not StepKind.PREFILL]
    assert stats.sequence_steps == sum(step.rows for step in decoding)
    assert stats.draft_tokens == sum(step.draft_tokens for step in steps)
    assert stats.accepted_tokens == sum(step.accepted_tokens for step in steps)
    assert stats.drafts == sum(step.draft_tokens > 0 for step in steps)
    assert stats.draft_misses == sum(len(step.missed_drafters) for step in steps)
    assert stats.sequence_steps + stats.accepted_tokens == 39
    assert stats.accepted_tokens == sum(stats.accepted_per_position)
    assert sorted(stats.accepted_per_position, reverse=True) == list(stats.accepted_per_position)


@pytest.mark.parametrize("k_draft", [0, 1, 5, 8])
@pytest.mark.parametrize("most", [1, 2, 7])
def test_max_new_tokens_is_never_overrun(engine: Engine, k_draft: int, most: int) -> None:
    item = request(PROMPTS[1], drafter="ngram", k_draft=k_draft, max_new_tokens=most)
    outputs = list(engine.generate(item))
    assert len(tokens(outputs)) == most
    assert outputs[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("drafter", ["none", "ngram", "draft"])
def test_the_context_can_be_filled_to_its_end(engine: Engine, drafter: str, exact: bool) -> None:
    prompt = tuple(RNG.integers(1, 320, CONTEXT - 20).tolist())
    item = request(prompt, drafter=drafter, k_draft=8, max_new_tokens=999, exact=exact)
    outputs = list(engine.generate(item))
    assert len(tokens(outputs)) == 20
    longest = tuple(RNG.integers(1, 320, CONTEXT - 1).tolist())
    assert len(generate(engine, request(longest, drafter=drafter, k_draft=8, exact=exact))) == 1


def test_an_end_token_inside_of_accepted_guesses_ends_the_text(engine: Engine) -> None:
    prompt = PROMPTS[3]
    plain = generate(engine, request(prompt))
    end = plain[6]
    first = plain.index(end)
    scheduler = engine.scheduler
    drafters, ends = scheduler.drafters, scheduler._end_tokens
    scheduler.drafters = {"draft": Oracle([*prompt, *plain])}
    scheduler._end_tokens = frozenset({end})
    try:
        item = request(prompt, drafter="draft", k_draft=8, ignore_eos=False)
        outputs = list(engine.generate(item))
        ignoring = generate(engine, request(prompt, drafter="draft", k_draft=8))
    finally:
        scheduler.drafters, scheduler._end_tokens = drafters, ends
    assert tokens(outputs) == plain[: first + 1]
    assert outputs[-1].finish is FinishReason.STOP
    assert ignoring == plain
    stats = outputs[-1].stats
    assert stats is not None
    assert stats.accepted_tokens <= stats.generated_tokens


@pytest.mark.parametrize("where", ["waiting", "prefilling", "decoding"])
def test_a_cancelled_request_frees_its_place_within_a_step(engine: Engine, where: str) -> None:
    scheduler = engine.scheduler
    others = [request(prompt, exact=True, max_new_tokens=30) for prompt in PROMPTS[:ROWS]]
    expected = {item.request_id: generate(engine, replace(item, request_id="x")) for item in others}
    leaving = request(PROMPTS[2], max_new_tokens=30)
    before = others if where == "waiting" else others[: ROWS - 1]
    for item in before:
        scheduler.add(item)
    scheduler.add(leaving)
    outputs: list[Output] = []
    for _ in range({"waiting": 2, "prefilling": 2, "decoding": 9}[where]):
        outputs += scheduler.step().outputs
    scheduler.cancel(leaving.request_id)
    outputs += scheduler.step().outputs
    assert leaving.request_id not in {slot.taken.request.request_id for slot in scheduler.rows}
    assert len(scheduler.rows) == len(before)
    assert not len(scheduler.waiting)
    last = [item for item in outputs if item.request_id == leaving.request_id][-1]
    assert last.finish is FinishReason.CANCELLED
    while scheduler.busy:
        outputs += scheduler.step().outputs
    for item in before:
        mine = [output for output in outputs if output.request_id == item.request_id]
        assert tokens(mine) == expected[item.request_id]
    assert scheduler.rows.tokens == 0


def test_a_request_ends_at_its_deadline(engine: Engine) -> None:
    now = 0.0
    scheduler = engine.scheduler
    clock, scheduler._clock = scheduler._clock, lambda: now
    try:
        scheduler.add(request(max_new_tokens=100, deadline=5.0))
        for _ in range(4):
            assert not any(output.finish for output in scheduler.step().outputs)
        now = 5.1
        (output,) = scheduler.step().outputs
    finally:
        scheduler._clock = clock
    assert output.finish is FinishReason.TIMEOUT
    assert output.stats is not None
    assert output.stats.generated_tokens >= 3
    assert not scheduler.busy


def test_the_first_token_is_shown_before_the_second_is_computed(engine: Engine) -> None:
    engine.scheduler.add(request(PROMPTS[0], drafter="draft", k_draft=4))
    result = engine.scheduler.step()
    assert [step.kind for step in result.stats] == [StepKind.PREFILL]
    assert len(tokens(list(result.outputs))) == 1
    while engine.scheduler.busy:
        engine.scheduler.step()


def test_first_come_first_served(engine: Engine) -> None:
    items = [request(PROMPTS[0], max_new_tokens=6) for _ in range(2 * ROWS)]
    for item in items:
        engine.scheduler.add(item)
    ended: list[str] = []
    while engine.scheduler.busy:
        ended += [item.request_id for item in engine.scheduler.step().outputs if item.finish]
    assert ended.index(items[0].request_id) < ended.index(items[-1].request_id)
    assert set(ended[:ROWS]) == {item.request_id for item in items[:ROWS]}


def test_a_long_prompt_does_not_stop_the_others(engine: Engine) -> None:
    """Between two chunks of a prompt every running request gets a token."""
    running = request(PROMPTS[0], max_new_tokens=60)
    engine.scheduler.add(running)
    engine.scheduler.step()
    engine.scheduler.add(request(tuple(RNG.integers(1, 320, 96).tolist()), max_new_tokens=1))
    chunks = 0
    while engine.scheduler.busy:
        result = engine.scheduler.step()
        if any(step.kind is StepKind.PREFILL for step in result.stats):
            chunks += 1
            assert any(output.request_id == running.request_id for output in result.outputs)
    assert chunks == 6
