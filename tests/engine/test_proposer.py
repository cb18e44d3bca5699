"""Which drafters are asked: lookups first, a draft model where it pays and has caught up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specops.engine.proposer import DraftTimes, Proposer, SequenceProposal
from specops.engine.request_state import RequestState
from specops.engine.scheduler import Scheduler
from specops.request import StepStats
from specops.runtime.kv_cache import KvCache
from specops.speculation.controller import Controller, Proposal
from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftRequest, LookupDrafter
from specops.speculation.drafters.cascade import CascadeDrafter
from tests.simulated_target import (
    Clock,
    Served,
    SimulatedTarget,
    Text,
    expected,
    make_request,
    make_scheduler,
    make_sequence,
    serve,
    tinyllama,
)
from tests.speculation.drafters.scripted import Scripted

LONG = 100
PIECE = 40


class FixedLengths(Controller):
    """Chooses as it is told: `most` of what there is."""

    def __init__(self, most: int, pays: bool = True) -> None:
        super().__init__(tinyllama(), None, 8)
        self.most = most
        self.paying = pays

    def choose(self, proposals: Sequence[Proposal], prompt_tokens: int = 0) -> list[int]:
        return [min(item.most, self.most) for item in proposals]

    def model_pays(self, drafter: str) -> bool:
        return self.paying


class Reader(LookupDrafter):
    """A draft model that notes what it takes in, and proposes anything."""

    name = "draft"
    runs_model = True

    def __init__(self) -> None:
        self.read: dict[int, int] = {}
        self.calls: list[str] = []

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        self.read[slot] = 0

    def look_up(self, slot: int, tokens: Sequence[int], count: int, least: float = 0.0) -> Draft:
        return NO_DRAFT

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        self.calls.append("propose")
        for request in requests:
            self.read[request.slot] = len(request.tokens)
        return [Draft((request.tokens[-1],) * request.count) for request in requests]

    def backlog(self, slot: int, length: int) -> int:
        return max(1, length - self.read[slot])

    def prefill(self, slot: int, tokens: Sequence[int], most: int) -> int:
        self.calls.append("prefill")
        taken = min(most, len(tokens) - 1 - self.read[slot])
        self.read[slot] += taken
        return taken


class CrampedReader(Reader):
    """Its cache has no room for the first slot."""

    def prefill(self, slot: int, tokens: Sequence[int], most: int) -> int:
        if slot == 0:
            self.calls.append("prefill")
            return 0
        return super().prefill(slot, tokens, most)


class Silent(LookupDrafter):
    """Never finds anything."""

    name = "suffix"

    def look_up(self, slot: int, tokens: Sequence[int], count: int, least: float = 0.0) -> Draft:
        return NO_DRAFT


def decoding(drafter: str, k_draft: int = 4, output: int = 20, **fields: object) -> RequestState:
    sequence = make_sequence(make_request(20, output, drafter=drafter, k_draft=k_draft, **fields))
    sequence.tokens.append(5)
    sequence.num_computed = 20
    return sequence


def propose(
    drafters: Sequence[LookupDrafter], controller: Controller, *sequences: RequestState
) -> list[SequenceProposal]:
    for slot, sequence in enumerate(sequences):
        sequence.slot = slot
        for drafter in drafters:
            drafter.begin(slot, sequence.tokens, "")
    named = {drafter.name: drafter for drafter in drafters}
    cache = cache_of(*sequences)
    proposer = Proposer(cache, named, controller, Clock(), max_tokens=96)  # type: ignore[arg-type]
    proposals, times = proposer.propose(list(sequences), 0)
    assert times == DraftTimes()
    return proposals


def cache_of(*sequences: RequestState, num_blocks: int | None = None) -> KvCache:
    """A cache in which each of the sequences has a slot, and room for its next token."""
    cache = SimulatedTarget(num_blocks=num_blocks).cache
    for slot, sequence in enumerate(sequences):
        sequence.slot = slot
        cache.begin(slot, sequence.tokens)
        assert cache.reserve(slot, sequence.num_computed + 1)
        cache.commit(slot, sequence.tokens, sequence.num_computed)
    return cache


def test_what_was_looked_up_is_cut_to_what_pays() -> None:
    lookup = Scripted(Text(), 1.0, name="lookup")
    (proposal,) = propose([lookup], FixedLengths(2), decoding("lookup"))
    sequence = proposal.sequence
    assert list(proposal.draft.tokens) == Text().continuation(sequence.tokens, 2)
    assert (proposal.missed, proposal.declined) == (None, None)


def test_a_draft_model_is_asked_for_as_many_as_pay_and_for_all_at_once() -> None:
    model = Scripted(Text(), 1.0, name="model", model=True)
    sequences = [decoding("model"), decoding("model", k_draft=1), decoding("model", output=3)]
    proposals = propose([model], FixedLengths(2), *sequences)
    assert [len(item.draft.tokens) for item in proposals] == [2, 1, 1]
    assert model.asked == [3]


def test_what_does_not_pay_is_declined_and_no_drafter_is_asked() -> None:
    lookup, model = (
        Scripted(Text(), 1.0, name="lookup"),
        Scripted(Text(), 1.0, name="m", model=True),
    )
    proposals = propose([lookup, model], FixedLengths(0), decoding("lookup"), decoding("m"))
    assert [item.declined for item in proposals] == ["lookup", "m"]
    assert [item.missed for item in proposals] == [None, None]
    assert [item.draft for item in proposals] == [NO_DRAFT, NO_DRAFT]
    assert model.asked == []


@pytest.mark.parametrize(
    ("drafter", "missed"), [("suffix", "suffix"), ("none", None), ("unknown", None)]
)
def test_a_drafter_that_has_nothing_has_missed(drafter: str, missed: str | None) -> None:
    (proposal,) = propose([Silent()], FixedLengths(8), decoding(drafter))
    assert (proposal.missed, proposal.declined) == (missed, None)


@pytest.mark.parametrize("fields", [{"k_draft": 0}, {"output": 2}])
def test_where_there_is_no_room_for_a_draft_token_no_drafter_is_asked(
    fields: dict[str, int],
) -> None:
    """The target adds a token of its own to accepted ones: the last one is never drafted."""
    lookup = Scripted(Text(), 1.0, name="lookup")
    (proposal,) = propose([lookup], FixedLengths(8), decoding("lookup", **fields))
    assert (proposal.most, proposal.missed, proposal.declined) == (0, None, None)


def cascade(lookup: LookupDrafter, model: LookupDrafter) -> list[LookupDrafter]:
    return [lookup, model, CascadeDrafter(lookup, model)]  # type: ignore[list-item]


def test_a_cascade_asks_its_model_where_a_lookup_has_nothing() -> None:
    model = Scripted(Text(), 1.0, name="draft", model=True)
    (proposal,) = propose(cascade(Silent(), model), FixedLengths(3), decoding("cascade"))
    assert (proposal.draft.origin, len(proposal.draft.tokens)) == ("draft", 3)
    lookup = Scripted(Text(), 1.0, name="suffix")
    (proposal,) = propose(cascade(lookup, model), FixedLengths(3), decoding("cascade"))
    assert (proposal.draft.origin, len(proposal.draft.tokens)) == ("suffix", 3)
    assert model.asked == [1]


def test_the_time_of_a_draft_model_is_told_apart_from_that_of_lookups() -> None:
    clock = Clock()

    class Slow(Scripted):
        def look_up(self, *arguments: object, **more: object) -> Draft:
            clock.now += 1
            return NO_DRAFT

        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            clock.now += 10
            return super().propose(requests)

    slow = Slow(Text(), 1.0, name="slow", model=True)
    sequences = [decoding("slow"), decoding("slow", adaptive=True)]
    proposer = Proposer(cache_of(*sequences), {"slow": slow}, FixedLengths(2), clock, max_tokens=96)
    _, times = proposer.propose(sequences, 0)
    # The lookup of the request of a fixed length does not count as asking.
    assert times == DraftTimes(total=12.0, model=10.0, asking=1.0)


def test_no_draft_is_made_that_has_no_room_in_the_cache() -> None:
    """A lookup takes what it was asked for as the text: a draft thrown away stood in it twice."""
    full, roomy = (decoding("lookup", output=200) for _ in range(2))
    for sequence, length in ((full, 62), (roomy, 40)):
        sequence.tokens += [5] * (length + 1 - len(sequence.tokens))
        sequence.num_computed = length
    lookup = Scripted(Text(), 1.0, name="lookup")
    cache = cache_of(full, roomy, num_blocks=2)
    proposer = Proposer(cache, {"lookup": lookup}, FixedLengths(8), Clock(), max_tokens=96)
    proposals, _ = proposer.propose([full, roomy], 0)
    assert [len(item.draft.tokens) for item in proposals] == [1, 4]  # one place in its block
    full.tokens.append(5)
    full.num_computed = 63
    assert cache.reserve(full.slot, 64)
    (proposal, _), _ = proposer.propose([full, roomy], 0)
    assert (proposal.draft.tokens, proposal.asked, proposal.missed) == ((), False, None)


def test_a_request_whose_drafter_is_not_worth_asking_is_declined() -> None:
    model = Scripted(Text(), 1.0, name="model", model=True)
    controller = FixedLengths(2)
    fresh, dull = (decoding("model", adaptive=True) for _ in range(2))
    fresh.speculation.gain, dull.speculation.gain = 1.0, -1.0
    lost = Proposal(dull.speculation, asked=True)
    controller.stepped(
        [lost], [1], [1], draft_seconds=1.0, asking_seconds=1.0
    )  # more than may be lost
    asked, declined = propose([model], controller, fresh, dull)
    assert (len(asked.draft.tokens), asked.declined) == (2, None)
    assert (declined.tokens, declined.declined) == ((), "model")
    assert model.asked == [1]


def test_it_is_told_whose_tokens_were_declined() -> None:
    """The lookup's where it had some; else those that the model would have been asked for."""
    model, lookup = (
        Scripted(Text(), 1.0, name=name, model=name == "draft") for name in ("draft", "suffix")
    )
    (proposal,) = propose(cascade(Silent(), model), FixedLengths(0), decoding("cascade"))
    assert proposal.declined == "cascade"
    (proposal,) = propose(cascade(lookup, model), FixedLengths(0), decoding("cascade"))
    assert proposal.declined == "suffix"
    assert model.asked == []


def test_a_request_that_is_not_adaptive_keeps_its_length() -> None:
    lookup = Scripted(Text(), 0.0, name="lookup")
    controller = Controller(tinyllama(), None, 8)
    for _ in range(50):
        (proposal,) = propose([lookup], controller, decoding("lookup", k_draft=5))
        assert len(proposal.draft.tokens) == 5
        controller.verified(proposal, 5, 0)
    (proposal,) = propose([lookup], controller, decoding("lookup", k_draft=5, adaptive=True))
    assert proposal.declined == "lookup"


# -- a draft model that has to take in a prompt ----------------------------------------------------


def reading(
    monkeypatch: pytest.MonkeyPatch,
    reader: Reader | None = None,
    *,
    controller: FixedLengths | None = None,
    lookup: LookupDrafter | None = None,
) -> tuple[Scheduler, Reader]:
    """A scheduler that lets a draft model take in so many tokens of a prompt at once."""
    target, reader = SimulatedTarget(), reader or Reader()
    drafters = {"draft": reader}
    if lookup is not None:
        parts = cascade(lookup, reader)
        drafters |= {part.name: part for part in parts}  # type: ignore[misc]
    scheduler = make_scheduler(target, drafters)  # type: ignore[arg-type]
    scheduler.controller = controller or FixedLengths(2)
    monkeypatch.setattr(scheduler._budget, "draft_model_tokens", lambda decoding, position: PIECE)
    return scheduler, reader


def steps(served: Served) -> list[StepStats]:
    return [result.stats for result in served.results if result.stats is not None]


def test_a_prompt_is_taken_in_piece_by_piece_while_plain_tokens_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, reader = reading(monkeypatch)
    served = Served()
    request = make_request(LONG, 20, drafter="draft", k_draft=2)
    scheduler.add(request)
    while not served.tokens(request):
        served.step(scheduler)
    stats = served.step(scheduler).stats
    assert reader.read == {0: PIECE}
    assert stats.emitted_tokens == 1
    assert stats.missed_drafters == stats.declined_drafters == stats.drafts == ()  # not asked
    stats = served.step(scheduler).stats
    assert reader.calls == ["prefill", "prefill", "propose"]
    assert len(stats.drafts) == 1
    while scheduler.busy:
        served.step(scheduler)
    assert reader.calls.count("prefill") == 2  # the rest comes with the first draft token
    assert served.tokens(request) == expected(Text(), request)


def test_a_full_draft_cache_keeps_no_other_request_from_catching_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first request cannot catch up any further, so the next one does."""
    scheduler, reader = reading(monkeypatch, CrampedReader())
    served, requests = Served(), [make_request(LONG, 30, drafter="draft", k_draft=2) for _ in "ab"]
    for request in requests:
        scheduler.add(request)
    while reader.read.get(1, 0) < LONG:
        assert scheduler.busy
        served.step(scheduler)
    assert reader.read[0] == 0
    assert reader.calls.count("prefill") >= 4  # each time the first one was tried, too
    while scheduler.busy:
        served.step(scheduler)
    drafts = []
    for request in requests:
        stats = served.stats(request)
        drafts.append(stats.drafts)
        assert served.tokens(request) == expected(Text(), request)
    assert drafts[0] == 0 < drafts[1]


def test_no_prompt_is_taken_in_for_drafts_that_do_not_pay_or_have_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler, reader = reading(monkeypatch, controller=FixedLengths(0, pays=False))
    serve(scheduler, make_request(LONG, 2, drafter="draft", k_draft=2))
    assert reader.calls == []
    serve(scheduler, make_request(LONG, 20, drafter="draft", k_draft=2, adaptive=True))
    assert reader.calls == []


def test_a_draft_model_that_is_far_behind_catches_up_at_once_where_it_came_to_pay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its backlog is counted when that is decided; see the controller."""
    scheduler, reader = reading(monkeypatch, controller=FixedLengths(2, pays=False))
    request = make_request(LONG, 20, drafter="draft", k_draft=2, adaptive=True)
    served = serve(scheduler, request)
    assert set(reader.calls) == {"propose"}
    assert served.tokens(request) == expected(Text(), request)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("drafter", "missed"), [("draft", []), ("cascade", ["suffix"])])
def test_a_draft_model_that_still_reads_misses_nothing(
    monkeypatch: pytest.MonkeyPatch, drafter: str, missed: list[str], adaptive: bool
) -> None:
    """A lookup in the meantime can miss, and that is told."""
    scheduler, _ = reading(monkeypatch, lookup=Silent())
    request = make_request(LONG, 20, drafter=drafter, k_draft=2, adaptive=adaptive)
    served = serve(scheduler, request)
    assert [name for step in steps(served) for name in step.missed_drafters] == missed
    assert [name for step in steps(served) for name in step.declined_drafters] == []
    stats = served.stats(request)
    assert stats.draft_misses == len(missed)
    # One step before it had read enough; the last of all may have had no room for a draft token.
    assert stats.sequence_steps - 2 <= stats.drafts <= stats.sequence_steps - 1
