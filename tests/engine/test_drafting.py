"""Which drafters are asked: lookups first, a draft model where it pays and has caught up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from specops.engine.request_state import NO_DRAFTERS, RequestState
from specops.engine.scheduled import Scheduled
from specops.engine.scheduler import Scheduler
from specops.request import FinishReason, Grammar, GrammarKind, SamplingParams
from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.manager import KvCache
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import (
    NO_DRAFT,
    Asked,
    Chain,
    Draft,
    DraftRequest,
    LookupDrafter,
)
from tests.simulated_target import (
    Clock,
    Served,
    SimulatedTarget,
    Text,
    chains,
    expected,
    make_drafting,
    make_request,
    make_scheduler,
    make_state,
    serve,
    tinyllama,
)
from tests.speculation.drafters.scripted import Scripted, ScriptedModel

LONG = 100
PIECE = 40


class FixedLengths(Controller):
    """Chooses as it is told: `most` of what there is, and a model where nothing was looked up."""

    def __init__(self, most: int, pays: bool = True, model: bool = False) -> None:
        super().__init__(tinyllama(), None, 8)
        self.most = most
        self.paying = pays
        self.model = model

    def choose(self, requests: Sequence[DraftRequest], prompt_tokens: int = 0) -> list[int]:
        return [min(item.max_draft, self.most) for item in requests]

    def follows(self, drafter: str) -> bool:
        return self.paying

    def prefers(
        self, request: DraftRequest, model: str, most: int, uncomputed: int, requests: int
    ) -> bool:
        return self.model or not request.draft.tokens


class Promising(LookupDrafter):
    """Finds one token of its own, as likely as it is told; none with probability 0."""

    def __init__(self, name: str, probability: float = 0.0) -> None:
        self.name = name  # type: ignore[misc]
        self.probability = probability
        self.asked = 0

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = 0.0
    ) -> Draft:
        self.asked += 1
        found = self.probability > min_reach
        token = 9 + len(self.name)
        return Draft((token,), accept_probs=(self.probability,)) if found else NO_DRAFT


class Drawing(LookupDrafter):
    """Draws what the target draws; notes the noise by which it does."""

    name = "drawing"
    draws = True

    def __init__(self, text: Text) -> None:
        self.noises: set[int | None] = set()
        self._text, self._sampling = text, SamplingParams()

    def prepare(self, requests: Sequence[DraftRequest], token_seconds: float) -> None:
        (request,) = requests
        self.noises.add(request.noise)
        self._sampling = replace(request.sampling, seed=request.noise)

    def look_up(
        self, slot: int, tokens: Sequence[int], count: int, min_reach: float = 0.0
    ) -> Draft:
        return Draft(tuple(self._text.continuation(tokens, count, self._sampling)))


class CrampedModel(ScriptedModel):
    """Its cache has no room for the first slot."""

    def prefill(self, slot: int, tokens: Sequence[int], max_tokens: int) -> int:
        return super().prefill(slot, tokens, max_tokens if slot else 0)


def decoding(drafter: str, k_draft: int = 4, output: int = 20, **fields: object) -> RequestState:
    state = make_state(make_request(20, output, drafter=drafter, k_draft=k_draft, **fields))
    state.tokens.append(5)
    state.num_computed = 20
    return state


def cache_of(*states: RequestState, num_blocks: int | None = None) -> KvCache:
    """A cache in which each of the requests has a slot, and room for its next token."""
    cache = SimulatedTarget(num_blocks=num_blocks).cache
    for slot, state in enumerate(states):
        state.slot = slot
        cache.allocate(slot, state.tokens)
        assert cache.reserve(slot, state.num_computed + 1)
        cache.commit(slot, state.tokens, state.num_computed)
    return cache


def propose(
    asked: Mapping[str, Chain],
    controller: Controller,
    *states: RequestState,
    clock: Clock | None = None,
    prompt_tokens: int = 0,
) -> list[Scheduled]:
    drafting = make_drafting(cache_of(*states), asked, controller, clock)
    for state in states:
        state.chain = asked.get(state.request.drafter, NO_DRAFTERS)
    for drafter in {one for chain in asked.values() for one in chain.drafters}:
        for state in states:
            drafter.begin(state.slot, state.tokens, "")
    return drafting.propose(list(states), prompt_tokens)


def test_what_was_looked_up_is_cut_to_what_pays() -> None:
    lookup = Scripted(Text(), 1.0, name="lookup")
    (item,) = propose(chains(lookup), FixedLengths(2), decoding("lookup"))
    assert list(item.draft.tokens) == Text().continuation(item.state.tokens, 2)
    assert item.tokens == [5, *item.draft.tokens]
    assert (item.num_logits, item.missed, item.declined) == (3, None, None)


def test_a_draft_model_is_asked_for_as_many_as_pay_and_for_all_at_once() -> None:
    model = ScriptedModel(Text(), name="model")
    states = [decoding("model"), decoding("model", k_draft=1), decoding("model", output=3)]
    found = propose(chains(model), FixedLengths(2), *states)
    assert [len(item.draft.tokens) for item in found] == [2, 1, 1]
    assert model.asked == [3]


@pytest.mark.parametrize(("drafter", "missed"), [("silent", "silent"), ("none", None)])
def test_a_drafter_that_has_nothing_has_missed(drafter: str, missed: str | None) -> None:
    (item,) = propose(chains(Promising("silent")), FixedLengths(8), decoding(drafter))
    assert (item.missed, item.declined) == (missed, None)


@pytest.mark.parametrize("fields", [{"k_draft": 0}, {"output": 2}])
def test_where_there_is_no_room_for_a_draft_token_no_drafter_is_asked(
    fields: dict[str, int],
) -> None:
    """The target adds a token of its own to accepted ones: the last one is never drafted."""
    lookup = Promising("lookup", 0.9)
    (item,) = propose(chains(lookup), FixedLengths(8), decoding("lookup", **fields))
    assert (lookup.asked, item.missed, item.declined) == (0, None, None)


# Probabilities of a lookup and of a head; draft tokens that pay; source, missed, declined; who was
# asked: the lookup, the head, the model.
Case = tuple[float, float, int, str, str | None, str | None, tuple[int, int, int]]
CHAIN: list[Case] = [
    (0.6, 0.9, 4, "suffix", None, None, (1, 0, 0)),  # as much as the head mostly promises
    (0.45, 0.4, 4, "suffix", None, None, (1, 1, 0)),  # the likelier one is taken
    (0.35, 0.4, 4, "head", None, None, (1, 1, 0)),
    (0.0, 0.0, 4, "draft", None, None, (1, 1, 1)),
    (0.6, 0.9, 0, "", None, "suffix", (1, 0, 0)),
    (0.0, 0.0, 0, "", None, "cascade", (1, 1, 0)),
]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("case", CHAIN)
def test_a_chain_asks_the_cheapest_first_and_the_next_where_that_promises_too_little(
    case: Case, adaptive: bool
) -> None:
    lookup, head, most, source, missed, declined, asked = case
    parts, model = (Promising("suffix", lookup), Promising("head", head)), ScriptedModel(Text())
    chain, controller = {"cascade": Chain(parts, model)}, FixedLengths(most)
    for _ in range(400):
        controller.found("head", Draft((9,), accept_probs=(0.5,)))
    (item,) = propose(chain, controller, decoding("cascade", adaptive=adaptive))
    assert (item.draft.drafter, item.missed, item.declined) == (source, missed, declined)
    assert (*(part.asked for part in parts), len(model.asked)) == asked


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_draft_model_that_promises_more_replaces_what_was_looked_up(adaptive: bool) -> None:
    lookup, model = Promising("suffix", 0.6), ScriptedModel(Text())
    chain = {"cascade": Chain((lookup,), model)}
    state = decoding("cascade", adaptive=adaptive)
    (item,) = propose(chain, FixedLengths(4, model=True), state)
    assert (item.draft.drafter, len(item.draft.tokens), item.missed) == ("draft", 4, None)
    if adaptive:  # it is credited with what it adds to the lookup
        assert item.asked["draft"].before == Draft((15,), drafter="suffix", accept_probs=(0.6,))


def test_the_time_of_each_drafter_is_told_apart_and_fixed_lengths_have_no_part_in_it() -> None:
    clock = Clock()

    class SlowLookup(Promising):
        def look_up(self, *arguments: object, **more: object) -> Draft:
            clock.now += 1
            return NO_DRAFT

    class SlowModel(ScriptedModel):
        def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
            clock.now += 10
            return super().propose(requests)

    chain = {"slow": Chain((SlowLookup("lookup"),), SlowModel(Text(), name="model"))}
    states = [decoding("slow"), decoding("slow", adaptive=True)]
    fixed, adaptive = propose(chain, FixedLengths(2), *states, clock=clock)
    assert fixed.asked == {}
    assert {name: one.seconds for name, one in adaptive.asked.items()} == {
        "lookup": 1.0,
        "model": 0.0,
    }
    assert fixed.draft_seconds == adaptive.draft_seconds == 5.0


def test_a_lookup_hears_of_all_that_ask_it_together_and_of_nobody_else() -> None:
    told: list[tuple[list[int], float]] = []

    class Head(Promising):
        def prepare(self, requests: Sequence[DraftRequest], token_seconds: float) -> None:
            told.append(([item.slot for item in requests], token_seconds))

    lookup, head = Scripted(Text(), 1.0, name="lookup"), Head("head", 0.9)
    both = {"lookup": Chain((lookup,)), "head": Chain((head,)), "both": Chain((lookup, head))}
    states = [decoding(name) for name in ("lookup", "head", "both", "head")]
    found = propose(both, FixedLengths(2), *states)
    assert told == [([1, 2, 3], pytest.approx(tinyllama().cost(4) / 4))]
    assert [item.draft.drafter for item in found] == ["lookup", "head", "head", "head"]


@pytest.mark.parametrize("adaptive", [False, True])
def test_a_request_with_which_a_head_s_pass_fails_fails_alone(adaptive: bool) -> None:
    class Failing(Promising):
        def prepare(self, requests: Sequence[DraftRequest], token_seconds: float) -> None:
            if any(item.slot == 0 for item in requests):
                raise RuntimeError("no such pass")

    asked = chains(Scripted(Text(), 1.0, name="lookup"))
    asked["head"] = Chain((Promising("silent"), Failing("head", 0.9)))
    names = ("head", "head", "lookup")
    states = [decoding(name, adaptive=adaptive) for name in names]
    found = propose(asked, FixedLengths(2), *states)
    assert [(item.state, len(item.draft.tokens)) for item in found] == [
        (states[1], 1),
        (states[2], 2),
    ]
    assert states[0].error == "no such pass"


def test_a_request_whose_head_fails_before_its_prompt_is_computed_fails_alone() -> None:
    class Failing(Promising):
        def __init__(self) -> None:
            super().__init__("head", 0.5)
            self.looks = Counter[int]()

        def held(self, slot: int, tokens: Sequence[int]) -> int | None:
            self.looks[slot] += 1
            if slot == 1 and self.looks[slot] > 1:  # the first is at its admission
                raise RuntimeError("no such pass")
            return None

    scheduler = make_scheduler(SimulatedTarget(), [Failing()])
    first, second = (make_request(20, 1, drafter="head", k_draft=2) for _ in range(2))
    served = serve(scheduler, first, second)
    assert served.finish(second) is FinishReason.ERROR
    assert served.outputs[second.request_id][-1].error == "no such pass"
    assert served.tokens(first) == expected(Text(), first)


def test_a_drafter_is_asked_only_for_texts_that_it_follows() -> None:
    """Of others it knows nothing, which says nothing of what it brings where it is asked."""

    class Behind(Promising):
        def follows(self, slot: int, tokens: Sequence[int]) -> bool:
            return slot == 1

    head = Behind("head", 0.9)
    behind, followed = propose(
        chains(head), FixedLengths(2), decoding("head", adaptive=True), decoding("head")
    )
    assert (behind.draft.tokens, behind.missed, behind.asked) == ((), None, {})
    assert (len(followed.draft.tokens), head.asked) == (1, 1)


@pytest.mark.parametrize("seed", [None, 4])
def test_what_is_drawn_by_the_targets_noise_is_the_targets_token(seed: int | None) -> None:
    """With a seed of the client's or not. Tokens that a lookup knows are mostly others."""
    sampling, text = SamplingParams(1.5, seed=seed), Text(surprise=1.0, seed=1)
    drawing = Drawing(text)
    for drafter, least, most in ((drawing, 1.0, 1.0), (Scripted(text, 1.0), 0.0, 0.6)):
        target = SimulatedTarget(text=text)
        request = make_request(
            9, 80, drafter=drafter.name, k_draft=4, adaptive=False, sampling=sampling
        )
        stats = serve(make_scheduler(target, [drafter]), request).stats(request)
        assert least <= stats.accepted_tokens / stats.draft_tokens <= most
    assert len(drawing.noises) == 1
    assert drawing.noises == {seed} or (seed is None and None not in drawing.noises)


def test_requests_have_noise_of_their_own_where_a_drafter_draws_by_it() -> None:
    drawing, text = Drawing(Text()), Text()
    scheduler = make_scheduler(SimulatedTarget(text=text), [drawing, Scripted(text, 1.0)])
    for drafter, k_draft, temperature in [
        *[(drawing.name, 2, 1.0)] * 3, (drawing.name, 0, 1.0), (drawing.name, 2, 0.0),
        ("scripted", 2, 1.0), ("none", 2, 1.0),
    ]:  # fmt: skip
        sampling = SamplingParams(temperature)
        scheduler.add(make_request(9, 5, drafter=drafter, k_draft=k_draft, sampling=sampling))
    found = [state.noise for state in scheduler.waiting]
    assert found[3:] == [None] * 4
    assert None not in found[:3]
    assert len(set(found[:3])) == 3


def test_no_draft_is_made_that_has_no_room_in_the_cache() -> None:
    """A lookup takes what it was asked for as the text: a draft thrown away stood in it twice."""
    full, roomy = (decoding("lookup", output=200) for _ in range(2))
    for state, length in ((full, 62), (roomy, 40)):
        state.tokens += [5] * (length + 1 - len(state.tokens))
        state.num_computed = length
    lookup = Scripted(Text(), 1.0, name="lookup")
    cache = cache_of(full, roomy, num_blocks=2)
    drafting = make_drafting(cache, chains(lookup), FixedLengths(8))
    full.chain = roomy.chain = Chain((lookup,))
    found = drafting.propose([full, roomy], 0)
    assert [len(item.draft.tokens) for item in found] == [1, 4]  # one place in its block
    full.tokens.append(5)
    full.num_computed = 63
    assert cache.reserve(full.slot, 64)
    item, _ = drafting.propose([full, roomy], 0)
    assert (item.draft.tokens, item.missed) == ((), None)


def test_a_drafter_may_keep_its_draft_and_propose_more_than_it_was_asked_for() -> None:
    kept = Draft((9,) * 8, accept_probs=(0.9,) * 8)

    class Keeping(Promising):
        def look_up(self, *arguments: object, **more: object) -> Draft:
            return kept

    (item,) = propose(chains(Keeping("keeping")), FixedLengths(8), decoding("keeping"))
    assert (len(item.draft.tokens), item.draft.drafter) == (4, "keeping")
    assert kept == Draft((9,) * 8, accept_probs=(0.9,) * 8)


@pytest.mark.parametrize(("prompt_tokens", "most"), [(0, 96), (5, 91), (400, 48)])
def test_forced_tokens_leave_room_to_prompts_that_wait(prompt_tokens: int, most: int) -> None:
    """Eight answers whose grammar forces far more than a pass takes."""
    grammar = Grammar(GrammarKind.CHOICE, '["one answer, and no other that could be given"]')
    fields = {"sampling": SamplingParams(grammar=grammar), "drafter": "silent", "output": 60}
    states = [make_state(make_request(20, k_draft=2, **fields)) for _ in range(8)]
    for state in states:
        state.num_computed = 19
    found = propose(
        chains(Promising("silent")), FixedLengths(8), *states, prompt_tokens=prompt_tokens
    )
    assert all(item.forced for item in found)
    assert most - 16 <= sum(len(item.tokens) + 2 for item in found) <= most


def test_a_request_whose_drafter_is_not_worth_asking_is_declined() -> None:
    model = ScriptedModel(Text(), name="model")
    controller = FixedLengths(2)
    fresh, dull = (decoding("model", adaptive=True) for _ in range(2))
    lost = DraftRequest(
        0, (), speculation=dull.speculation, asked={"model": Asked(1.0)}, tokens=(5,)
    )
    lost.emitted = 1
    for _ in range(2):  # more than may be lost
        controller.stepped([lost], 1.0)
        dull.speculation.gains["model"] = -1.0
    asked, declined = propose(chains(model), controller, fresh, dull)
    assert (len(asked.draft.tokens), asked.declined) == (2, None)
    assert (declined.tokens, declined.declined) == ([5], "model")
    assert model.asked == [1]


def test_a_request_that_is_not_adaptive_keeps_its_length() -> None:
    lookup = Scripted(Text(), 0.0, name="lookup")
    controller = Controller(tinyllama(), None, 8)
    for _ in range(50):
        (item,) = propose(chains(lookup), controller, decoding("lookup", k_draft=5))
        assert len(item.draft.tokens) == 5
        controller.verified(item, 0)
    for length in (1, 0):  # one is a probe
        (item,) = propose(chains(lookup), controller, decoding("lookup", k_draft=5, adaptive=True))
        assert len(item.draft.tokens) == length
    assert item.declined == "lookup"


# -- a draft model that has to compute a prompt ----------------------------------------------------


def reading(
    model: ScriptedModel | None = None, *, controller: FixedLengths | None = None
) -> tuple[Scheduler, ScriptedModel]:
    """A scheduler beside whose passes a draft model has time for so many tokens of a prompt."""
    model = model or ScriptedModel(Text(), reads=True)
    seconds = tinyllama().cost(1) / 3 / PIECE * 1.01
    costs = CostModel([1, 2], [seconds, 2 * seconds])
    scheduler = make_scheduler(
        SimulatedTarget(), [model], draft_costs=costs, max_inter_token_latency=1e-9
    )
    scheduler.drafters["cascade"] = Chain((Promising("suffix"),), model)  # type: ignore[index]
    scheduler.controller = controller or FixedLengths(2)
    return scheduler, model


def test_a_prompt_is_computed_piece_by_piece_while_plain_tokens_come() -> None:
    scheduler, model = reading()
    served = Served()
    request = make_request(LONG, 20, drafter="draft", k_draft=2)
    scheduler.add(request)
    while not served.tokens(request):
        served.step(scheduler)
    step = served.step(scheduler)
    assert model.calls == ["prefill"]
    (first,) = model.read.values()
    assert 0 < first < LONG - 32
    assert step.emitted_tokens == 1
    assert step.missed_drafters == step.declined_drafters == step.drafts == []  # not asked
    while "propose" not in model.calls:
        served.step(scheduler)
    before = len(model.calls)
    while scheduler.busy:
        served.step(scheduler)
    assert "prefill" not in model.calls[before:]  # the rest comes with the first draft token
    assert served.tokens(request) == expected(Text(), request)


def test_a_full_draft_cache_keeps_no_other_request_from_catching_up() -> None:
    """The first request cannot catch up any further, so the next one does."""
    scheduler, _ = reading(CrampedModel(Text(), reads=True))
    requests = [make_request(LONG, 30, drafter="draft", k_draft=2) for _ in "ab"]
    served = serve(scheduler, *requests)
    drafts = [served.stats(request).drafts for request in requests]
    assert drafts[0] == 0 < drafts[1]
    for request in requests:
        assert served.tokens(request) == expected(Text(), request)


@pytest.mark.parametrize(("output", "adaptive"), [(2, False), (20, True)])
def test_no_prompt_is_computed_for_drafts_that_have_no_room_or_do_not_pay(
    output: int, adaptive: bool
) -> None:
    """If a model that is far behind comes to pay, it catches up at once."""
    scheduler, model = reading(controller=FixedLengths(0, pays=False))
    fields = {"drafter": "draft", "k_draft": 2, "adaptive": adaptive}
    serve(scheduler, make_request(LONG, output, **fields))
    assert model.calls == []
    if adaptive:
        scheduler.controller = FixedLengths(2, pays=False)
        request = make_request(LONG, output, **fields)
        served = serve(scheduler, request)
        assert set(model.calls) == {"propose"}
        assert served.tokens(request) == expected(Text(), request)


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize(("drafter", "missed"), [("draft", set()), ("cascade", {"suffix"})])
def test_a_draft_model_that_still_reads_misses_nothing(
    drafter: str, missed: set[str], adaptive: bool
) -> None:
    """A lookup in the meantime can miss, and that is told."""
    scheduler, _ = reading()
    request = make_request(LONG, 20, drafter=drafter, k_draft=2, adaptive=adaptive)
    served = serve(scheduler, request)
    assert {name for step in served.results for name in step.missed_drafters} == missed
    assert not any(step.declined_drafters for step in served.results)
    stats = served.stats(request)
    assert stats.draft_misses == sum(len(step.missed_drafters) for step in served.results)
    assert stats.drafts > 0
