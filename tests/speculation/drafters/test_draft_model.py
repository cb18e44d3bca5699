"""Draft tokens by a smaller model: computed as if nothing had ever been rejected."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specops.request import SamplingParams
from specops.runtime.sampling import filtered_probs
from specops.speculation.drafters import guessing
from specops.speculation.drafters.base import NO_DRAFT
from specops.speculation.drafters.draft_model import DraftModelDrafter
from tests.simulated_target import (
    VOCAB,
    SimulatedTarget,
    Text,
    expected,
    make_request,
    make_scheduler,
    serve,
    tinyllama,
)
from tests.speculation.drafters.ask import ask, propose
from tests.speculation.drafters.conftest import DRAFT_TEXT

RNG = np.random.default_rng(0)
PROMPT = [5, 6, 7, 8]


def made(runner: SimulatedTarget, *slots: int, vocab_size: int = VOCAB) -> DraftModelDrafter:
    """A drafter that was told of these slots, or of the first one."""
    costs = tinyllama(0.1)
    drafter = DraftModelDrafter(runner, costs, vocab_size=vocab_size)  # type: ignore[arg-type]
    for slot in slots or (0,):
        drafter.begin(slot, [0], "")
    return drafter


def widths(runner: SimulatedTarget) -> list[int]:
    """Tokens of its passes so far."""
    return [batch.num_tokens for batch in runner.passes]


# -- what it proposes ------------------------------------------------------------------------------


def test_with_a_seed_it_draws_by_the_targets_noise(runner: SimulatedTarget) -> None:
    sampling = SamplingParams(1.3, top_k=9, seed=8)
    draft = propose(made(runner), PROMPT, 5, sampling=sampling)
    assert list(draft.tokens) == DRAFT_TEXT.continuation(PROMPT, 5, sampling)
    assert draft.probs is None


def test_without_a_seed_it_says_what_it_has_drawn_from(runner: SimulatedTarget) -> None:
    sampling = SamplingParams(1.3, top_k=9)
    draft = propose(made(runner, vocab_size=VOCAB + 5), PROMPT, 4, sampling=sampling)
    assert draft.probs.shape == (4, VOCAB + 5)
    assert not draft.probs[:, VOCAB:].any()
    tokens = list(PROMPT)
    for token, probs in zip(draft.tokens, draft.probs, strict=True):
        state = position = 0
        for position, item in enumerate(tokens):
            state = DRAFT_TEXT.grow(state, position, DRAFT_TEXT.key(state, item))
        known = filtered_probs(DRAFT_TEXT.logits([state], tokens[-1:]), sampling)[0]
        assert np.array_equal(probs[:VOCAB], known)
        assert known[token] > 0
        tokens.append(token)


@given(
    st.lists(
        st.tuples(st.integers(0, 4), st.integers(1, VOCAB - 1), st.integers(1, 4)),
        min_size=1,
        max_size=8,
    ),
    st.integers(1, 130),
)
@settings(max_examples=60)
def test_goes_on_as_if_nothing_had_been_rejected(
    jumps: list[tuple[int, int, int]], prompt: int
) -> None:
    """After any accepted part and any correction its draft tokens are those of a fresh model."""
    runner = SimulatedTarget(num_slots=1, context=256, max_tokens=32, text=DRAFT_TEXT)
    drafter = made(runner)
    tokens = [1 + index % 40 for index in range(prompt)]
    drafted: tuple[int, ...] = ()
    for accepted, correction, count in jumps:
        tokens = [*tokens, *drafted[:accepted], correction]
        drafted = propose(drafter, tokens, count).tokens
        assert list(drafted) == DRAFT_TEXT.continuation(tokens, count)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(1.0, seed=3)])
def test_slots_in_one_pass_get_what_each_gets_alone(
    runner: SimulatedTarget, sampling: SamplingParams
) -> None:
    """Of any lengths and counts, with other things rejected: one pass per depth for all."""
    drafter, rng = made(runner, 0, 1, 2, 3), np.random.default_rng(2)
    texts = [[1 + slot] * (4 + 3 * slot) for slot in range(4)]
    for _ in range(12):
        requests = [
            ask(tokens, int(rng.integers(1, 6)), slot, sampling)
            for slot, tokens in enumerate(texts)
            if rng.random() < 0.8
        ]
        passes = len(runner.passes)
        drafts = drafter.propose(requests)
        assert len(runner.passes) - passes == max((item.max_draft for item in requests), default=0)
        for item, draft in zip(requests, drafts, strict=True):
            expected = DRAFT_TEXT.continuation(item.text, item.max_draft, sampling)
            assert list(draft.tokens) == expected
            stands = int(rng.integers(0, len(draft.tokens) + 1))
            texts[item.slot] = [
                *item.text, *draft.tokens[:stands], int(rng.integers(1, VOCAB))
            ]  # fmt: skip


# -- what it computes ------------------------------------------------------------------------------


@pytest.mark.parametrize("accepted", range(5))
def test_no_token_is_computed_twice(runner: SimulatedTarget, accepted: int) -> None:
    """Whatever part of a draft stands: what is computed is what the cache does not hold."""
    drafter = made(runner)
    tokens = list(PROMPT)
    for _ in range(4):
        drafted = propose(drafter, tokens, 4).tokens
        wrong = (drafted[accepted] + 1) % VOCAB if accepted < 4 else 9
        tokens = [*tokens, *drafted[:accepted], wrong]
        passes = len(runner.passes)
        propose(drafter, tokens, 1)
        # The last draft token was never computed.
        assert widths(runner)[passes:] == [2 if accepted == 4 else 1]


def test_it_catches_up_in_chunks_and_proposes_the_same(runner: SimulatedTarget) -> None:
    drafter = made(runner)
    tokens = RNG.integers(1, VOCAB, 100).tolist()
    taken = [drafter.read(0, tokens, 30) for _ in range(5)]
    assert taken == [30, 30, 30, 9, 0]  # all but the last token
    assert runner.cache.length(0) == 99
    assert list(propose(drafter, tokens, 2).tokens) == DRAFT_TEXT.continuation(tokens, 2)
    assert widths(runner) == [30, 30, 30, 9, 1, 1]


def test_what_does_not_fit_into_one_pass_takes_another(runner: SimulatedTarget) -> None:
    """Where drafts are asked for before slots have caught up, beside one that has."""
    drafter = made(runner, 0, 1, 2)
    texts = [[1, 2, 3], RNG.integers(1, VOCAB, 32).tolist(), [4] * 30]
    drafts = drafter.propose([ask(tokens, 2, slot) for slot, tokens in enumerate(texts)])
    for draft, tokens in zip(drafts, texts, strict=True):
        assert list(draft.tokens) == DRAFT_TEXT.continuation(tokens, 2)
    assert widths(runner) == [3, 32, 30, 3]


def test_it_is_asked_once_few_enough_tokens_are_left_to_compute(runner: SimulatedTarget) -> None:
    drafter, tokens = made(runner), RNG.integers(1, VOCAB, 400).tolist()
    assert drafter.is_synced(0, tokens[:32])
    assert not drafter.is_synced(0, tokens[:33])
    drafter.read(0, tokens, 6)
    assert drafter.is_synced(0, tokens[:38])
    while drafter.read(0, tokens, 32):
        pass
    assert drafter.is_synced(0, tokens)  # its context holds no more


@pytest.mark.parametrize("reaches", [(), (0.1,) * 8, (0.1, 0.1) + (0.6,) * 6])
def test_it_stops_where_the_next_token_would_not_pay(
    reaches: tuple[float, ...], runner: SimulatedTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A third of its tokens are wrong, and it learns that: a pass of its own takes 12.5 ms."""
    monkeypatch.setattr(guessing.time, "perf_counter", runner.clock)
    target, drafter, lengths = Text(), made(runner, 3), list[int]()
    for token_seconds in (0.2, 0.0156):
        for number in range(8):
            drafter.begin(0, tokens := [*PROMPT, number], "")
            for _ in range(40):
                passes = len(runner.passes)
                fields = {"adaptive": True, "min_reach": 0.1, "reaches": reaches}
                fields["token_seconds"] = token_seconds
                draft = propose(drafter, tokens, 8, **fields)
                lengths.append(len(runner.passes) - passes)
                assert len(draft.tokens) == len(draft.accept_probs) <= lengths[-1]
                tokens += target.continuation(tokens, 1)
            drafter.release(0)
    # Verifying a third token is dear in one case: two of three guesses in a row are rarely right.
    least, most = (1.5, 2.1) if 0.6 in reaches else (2, 5)
    assert least < np.mean(lengths[160:320]) < most
    assert 1 <= np.mean(lengths[480:]) < 1.5


@pytest.mark.parametrize("slowness", [0.5, 2.0])
def test_its_passes_tell_its_cost_model_what_they_take(
    monkeypatch: pytest.MonkeyPatch, slowness: float
) -> None:
    """Those for draft tokens, those that take a prompt in, and those of a long text."""
    machine = tinyllama(0.1)
    machine.set_speed(slowness, slowness)
    ways: list[Callable[[DraftModelDrafter, list[int]], object]] = [
        lambda drafter, tokens: propose(drafter, tokens[:3], 8),
        lambda drafter, tokens: drafter.read(0, tokens, 20),
        lambda drafter, tokens: propose(drafter, tokens, 1),
    ]
    for way in ways:
        runner = SimulatedTarget(
            num_slots=1, context=256, max_tokens=32, text=DRAFT_TEXT, costs=machine
        )
        monkeypatch.setattr(guessing.time, "perf_counter", runner.clock)
        costs = tinyllama(0.1)
        drafter = DraftModelDrafter(runner, costs, vocab_size=VOCAB)  # type: ignore[arg-type]
        for number in range(60):
            drafter.begin(0, [0], str(number))
            way(drafter, RNG.integers(1, VOCAB, 100).tolist())
            drafter.release(0)
        width, work = runner.passes[-1].num_tokens, runner.passes[-1].attention_work
        assert costs.cost(width, work) == pytest.approx(machine.cost(width, work), rel=0.1)


# -- its vocabulary, context and cache -------------------------------------------------------------


@pytest.mark.parametrize("own", [VOCAB - 8, VOCAB + 8])
@pytest.mark.parametrize(
    "sampling", [SamplingParams(), SamplingParams(3.0), SamplingParams(3.0, seed=2)]
)
def test_a_vocabulary_of_another_size_is_no_obstacle(own: int, sampling: SamplingParams) -> None:
    """It proposes only what the target knows, and takes in what it does not know itself."""
    text = Text(surprise=1.0, seed=1, vocab_size=own)
    runner = SimulatedTarget(num_slots=2, context=256, max_tokens=32, text=text)
    drafter = made(runner)
    tokens = [VOCAB - 1, VOCAB - 3, 5]
    for _ in range(12):
        draft = propose(drafter, tokens, 3, sampling=sampling)
        assert len(draft.tokens) == 3
        assert max(draft.tokens) < min(own, VOCAB)
        assert draft.probs is None or draft.probs.shape == (3, VOCAB)
        tokens = [*tokens, draft.tokens[0], VOCAB - 2]
        for span in runner.passes[-1].spans:
            assert max(span.tokens) < own


def test_it_stops_at_its_context() -> None:
    runner = SimulatedTarget(num_slots=1, context=64, max_tokens=32, text=DRAFT_TEXT)
    drafter = made(runner)
    tokens = RNG.integers(1, VOCAB, 70).tolist()
    assert len(propose(drafter, tokens[:62], 8).tokens) == 3
    assert len(propose(drafter, tokens[:64], 8).tokens) == 1
    assert propose(drafter, tokens[:65], 8) is NO_DRAFT
    assert drafter.read(0, tokens, 32) == 0


def test_a_prompt_beyond_its_context_can_begin() -> None:
    runner = SimulatedTarget(num_slots=1, context=64, max_tokens=32, text=DRAFT_TEXT)
    drafter = made(runner, 0)
    drafter.release(0)
    tokens = RNG.integers(1, VOCAB, 200).tolist()
    drafter.begin(0, tokens, "")
    assert sum(drafter.read(0, tokens, 30) for _ in range(9)) == 64
    assert propose(drafter, tokens, 8) is NO_DRAFT


def test_without_room_in_its_cache_there_is_no_draft_and_nobody_else_loses_his() -> None:
    runner = SimulatedTarget(num_slots=3, context=128, num_blocks=2, max_tokens=32, text=DRAFT_TEXT)
    drafter = made(runner, 0, 1, 2)
    texts = [[1] * 60, [2] * 60, [3] * 60]
    for slot in (0, 0, 1, 1):
        drafter.read(slot, texts[slot], 30)
    drafts = drafter.propose([ask(tokens, 3, slot) for slot, tokens in enumerate(texts)])
    assert [len(draft.tokens) for draft in drafts] == [3, 3, 0]
    assert drafts[2] is NO_DRAFT
    assert drafter.read(2, texts[2], 30) == 0
    (shorter,) = drafter.propose([ask(texts[0], 8)])  # to the end of the block that it has
    assert len(shorter.tokens) == 4
    drafter.release(0)
    assert len(propose(drafter, texts[2], 3, slot=2).tokens) == 3


# -- whose tokens it knows -------------------------------------------------------------------------

LONG = RNG.integers(1, VOCAB, 100).tolist()


def test_a_clients_next_prompt_goes_on_from_the_last(runner: SimulatedTarget) -> None:
    drafter = made(runner, 3)
    for number in range(2):
        tokens = [*LONG, number]
        drafter.begin(0, tokens, "ann")
        assert drafter.is_synced(0, tokens) == bool(number)
        found = propose(drafter, tokens, 3)
        assert list(found.tokens) == DRAFT_TEXT.continuation(tokens, 3)
        drafter.release(0)


def test_a_request_that_never_asks_takes_nothing_of_its_cache(runner: SimulatedTarget) -> None:
    drafter = made(runner, 3)
    for number in range(2):
        drafter.begin(1, [*LONG, number], "ann")
        drafter.release(1)
    assert runner.cache.used_blocks == runner.cache.cached_blocks == 0


@pytest.mark.parametrize("slot", [0, 1])
def test_another_client_finds_nothing(runner: SimulatedTarget, slot: int) -> None:
    """Neither in the slot that the other one had, nor beside it."""
    drafter = made(runner, 3)
    drafter.begin(0, LONG, "ann")
    propose(drafter, LONG, 1)
    if slot == 0:
        drafter.release(0)
    drafter.begin(slot, LONG, "bob")
    passes = len(runner.passes)
    propose(drafter, LONG, 1, slot=slot)
    assert sum(widths(runner)[passes:]) == 100


def test_through_the_scheduler_it_changes_no_output() -> None:
    """Few blocks for the draft model, too, and requests that come and go."""
    target = SimulatedTarget(num_slots=4, context=512, num_blocks=12)
    runner = SimulatedTarget(
        num_slots=4, context=256, num_blocks=6, text=DRAFT_TEXT, clock=target.clock
    )
    drafter = DraftModelDrafter(runner, tinyllama(0.1), vocab_size=VOCAB)  # type: ignore[arg-type]
    rng = np.random.default_rng(6)
    scheduler = make_scheduler(target, [drafter], draft_costs=tinyllama(0.1))
    requests = [
        make_request(
            int(rng.integers(1, 300)),
            int(rng.integers(1, 100)),
            drafter="draft",
            k_draft=int(rng.integers(1, 9)),
            adaptive=bool(rng.random() < 0.5),
            sampling=SamplingParams(index % 2, top_k=5, seed=index),
        )
        for index in range(16)
    ]
    served = serve(scheduler, *requests)
    accepted = 0
    for request in requests:
        assert served.tokens(request) == expected(target.text, request)
        stats = served.stats(request)
        accepted += stats.accepted_tokens
    assert accepted > 10
    assert runner.cache.used_blocks == target.cache.used_blocks == 0
