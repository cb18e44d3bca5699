"""Which drafters are asked: the cheapest first, each where it pays and has read the text."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from specops.engine.request_state import Drafters, RequestState
from specops.engine.scheduled import Scheduled
from specops.engine.scheduler import Scheduler
from specops.request import Grammar, GrammarKind, SamplingParams, Step
from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.manager import KvCache
from specops.speculation.controller import Controller, Proposal
from specops.speculation.credit import Credit, SpeculationState
from specops.speculation.drafters.base import (
    NO_DRAFT,
    Draft,
    DraftContext,
    Drafter,
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
    """Chooses as it is told: `most` of what there is."""

    def __init__(self, most: int, pays: bool = True) -> None:
        super().__init__(tinyllama(), 8)
        self.most = most
        self.paying = pays

    def choose(self, proposals: Sequence[Proposal], prompt_tokens: int = 0) -> list[int]:
        return [min(len(item.draft.tokens), self.most) for item in proposals]

    def reads(self, drafter: str, speculation: SpeculationState) -> bool:
        return self.paying


class Promising(Drafter):
    """Finds one token of its own, as likely as it is told; none with probability 0."""

    def __init__(self, name: str, probability: float = 0.0) -> None:
        self.name = name  # type: ignore[misc]
        self.probability = probability
        self.asked = 0

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.asked += len(contexts)
        if not self.probability:
            return [NO_DRAFT] * len(contexts)
        draft = Draft((9 + len(self.name),), accept_probs=(self.probability,))
        return [draft] * len(contexts)


class Drawing(LookupDrafter):
    """Draws what the target draws; notes the noise by which it does."""

    name = "drawing"
    draws = True

    def __init__(self, text: Text) -> None:
        self.noises: set[int | None] = set()
        self._text = text

    def look_up(self, context: DraftContext) -> Sequence[int]:
        self.noises.add(context.noise)
        sampling = replace(context.sampling, seed=context.noise)
        return self._text.continuation(context.text, context.max_draft, sampling)


class CrampedModel(ScriptedModel):
    """Its cache has no room for the first slot."""

    def read(self, slot: int, tokens: Sequence[int], most: int) -> int:
        return super().read(slot, tokens, most if slot else 0)


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
    asked: Mapping[str, Drafters],
    controller: Controller,
    *states: RequestState,
    clock: Clock | None = None,
    prompt_tokens: int = 0,
) -> list[Scheduled]:
    drafting = make_drafting(cache_of(*states), asked, controller, clock)
    for state in states:
        state.drafters = state.chain = asked.get(state.request.drafter, ())
    for drafter in {one for chain in asked.values() for one in chain}:
        for state in states:
            drafter.begin(state.slot, state.tokens, "")
    return drafting.propose(Step(), list(states), prompt_tokens)


def draft_of(item: Scheduled) -> Draft:
    assert item.proposal is not None
    return item.proposal.draft


def told(item: Scheduled) -> tuple[str | None, str | None]:
    """Who missed, and who was declined."""
    proposal = item.proposal
    return (None, None) if proposal is None else (proposal.missed, proposal.declined)


def test_what_was_looked_up_is_cut_to_what_pays() -> None:
    lookup = Scripted(Text(), 1.0, name="lookup")
    (item,) = propose(chains(lookup), FixedLengths(2), decoding("lookup"))
    assert list(draft_of(item).tokens) == Text().continuation(item.state.tokens, 2)
    assert item.tokens == [5, *draft_of(item).tokens]
    assert (item.num_logits, *told(item)) == (3, None, None)


def test_a_draft_model_is_asked_for_all_at_once() -> None:
    model = ScriptedModel(Text(), name="model")
    states = [decoding("model"), decoding("model", k_draft=1), decoding("model", output=3)]
    found = propose(chains(model), FixedLengths(2), *states)
    assert [len(draft_of(item).tokens) for item in found] == [2, 1, 1]
    assert model.asked == [3]


@pytest.mark.parametrize(("drafter", "missed"), [("silent", "silent"), ("none", None)])
def test_a_drafter_that_has_nothing_has_missed(drafter: str, missed: str | None) -> None:
    (item,) = propose(chains(Promising("silent")), FixedLengths(8), decoding(drafter))
    assert told(item) == (missed, None)


@pytest.mark.parametrize("fields", [{"k_draft": 0}, {"output": 2}])
def test_where_there_is_no_room_for_a_draft_token_no_drafter_is_asked(
    fields: dict[str, int],
) -> None:
    """The target adds a token of its own to accepted ones: the last one is never drafted."""
    lookup = Promising("lookup", 0.9)
    (item,) = propose(chains(lookup), FixedLengths(8), decoding("lookup", **fields))
    assert (lookup.asked, *told(item)) == (0, None, None)


# Probabilities of a lookup and of a head; draft tokens that pay; source, missed, declined; who was
# asked: the lookup, the head, the model.
Case = tuple[float, float, int, str, str | None, str | None, tuple[int, int, int]]
CHAIN: list[Case] = [
    (0.6, 0.9, 4, "suffix", None, None, (1, 0, 0)),  # as much as the others mostly promise
    (0.45, 0.4, 4, "draft", None, None, (1, 1, 1)),
    (0.45, 0.55, 4, "head", None, None, (1, 1, 0)),
    (0.0, 0.0, 4, "draft", None, None, (1, 1, 1)),
    (0.6, 0.9, 0, "", None, "suffix", (1, 0, 0)),
]


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("case", CHAIN)
def test_a_chain_asks_the_cheapest_first_and_the_next_where_that_promises_too_little(
    case: Case, adaptive: bool
) -> None:
    lookup, head, most, source, missed, declined, asked = case
    parts, model = (Promising("suffix", lookup), Promising("head", head)), ScriptedModel(Text())
    chain, controller = {"cascade": (*parts, model)}, FixedLengths(most)
    for name in ("head", "draft"):
        for _ in range(400):
            controller.asked(name, Draft((9,), accept_probs=(0.5,)))
    (item,) = propose(chain, controller, decoding("cascade", adaptive=adaptive))
    assert (draft_of(item).drafter, *told(item)) == (source, missed, declined)
    assert (*(part.asked for part in parts), len(model.asked)) == asked


def test_the_time_of_each_drafter_is_told_apart_and_fixed_lengths_have_no_part_in_it() -> None:
    clock = Clock()

    class Slow(Promising):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            clock.now += 1 if self.name == "suffix" else 10
            return super().propose(contexts)

    chain = {"slow": (Slow("suffix", 0.1), Slow("head", 0.5))}
    states = [decoding("slow"), decoding("slow", adaptive=True)]
    fixed, adaptive = (
        item.proposal for item in propose(chain, FixedLengths(2), *states, clock=clock)
    )
    assert fixed is not None
    assert adaptive is not None
    assert fixed.attempts == ()
    found = {one.drafter: (one.seconds, one.before.drafter) for one in adaptive.attempts}
    assert found == {"suffix": (0.5, ""), "head": (5.0, "suffix")}
    assert adaptive.asking_seconds == 0.0


def test_a_drafter_hears_of_all_that_ask_it_together_and_of_nobody_else() -> None:
    heard: list[list[tuple[int, float, Draft]]] = []

    class Head(Promising):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            heard.append([(item.slot, item.token_seconds, item.draft) for item in contexts])
            return super().propose(contexts)

    lookup, head = Scripted(Text(), 1.0, name="lookup"), Head("head", 0.9)
    both = {"lookup": (lookup,), "head": (head,), "both": (lookup, head)}
    states = [decoding(name, k_draft=1) for name in ("lookup", "head", "both", "head")]
    found = propose(both, FixedLengths(2), *states)
    seconds = pytest.approx(tinyllama().cost(4) / 4)
    (contexts,) = heard
    assert [(slot, token) for slot, token, _ in contexts] == [(slot, seconds) for slot in (1, 2, 3)]
    assert [draft.drafter for *_, draft in contexts] == ["", "lookup", ""]
    assert [draft_of(item).drafter for item in found] == ["lookup", "head", "head", "head"]


def test_a_drafter_is_asked_only_for_texts_that_it_has_read() -> None:
    """Of others it knows nothing, which says nothing of what it brings where it is asked."""

    class Behind(Promising):
        def is_synced(self, slot: int, tokens: Sequence[int]) -> bool:
            return slot == 1

    head = Behind("head", 0.9)
    behind, followed = propose(
        chains(head), FixedLengths(2), decoding("head", adaptive=True), decoding("head")
    )
    assert behind.proposal is not None
    assert (draft_of(behind).tokens, behind.proposal.attempts) == ((), ())
    assert told(behind) == (None, None)
    assert (len(draft_of(followed).tokens), head.asked) == (1, 1)


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
    for state in (full, roomy):
        state.drafters = state.chain = (lookup,)
    found = drafting.propose(Step(), [full, roomy], 0)
    assert [len(draft_of(item).tokens) for item in found] == [1, 4]  # one place in its block
    full.tokens.append(5)
    full.num_computed = 63
    assert cache.reserve(full.slot, 64)
    item, _ = drafting.propose(Step(), [full, roomy], 0)
    assert (draft_of(item).tokens, *told(item)) == ((), None, None)


def test_a_drafter_may_keep_its_draft_and_propose_more_than_it_was_asked_for() -> None:
    kept = Draft((9,) * 8, accept_probs=(0.9,) * 8)

    class Keeping(Promising):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            return [kept]

    (item,) = propose(chains(Keeping("keeping")), FixedLengths(8), decoding("keeping"))
    assert (len(draft_of(item).tokens), draft_of(item).drafter) == (4, "keeping")
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
    controller.load(2)
    controller.asked("model", NO_DRAFT)
    dull.speculation.credits["model"] = credit = Credit()
    credit.book(-1.0, 1.0, 0.0, covered=0.9)
    asked, declined = propose(chains(model), controller, fresh, dull)
    assert (len(draft_of(asked).tokens), told(asked)) == (2, (None, None))
    assert (declined.tokens, declined.state.may_draft(controller.now)) == ([5], False)
    assert model.asked == [1]


def test_a_request_that_is_not_adaptive_keeps_its_length() -> None:
    lookup, controller = Scripted(Text(), 0.0, name="lookup"), Controller(tinyllama(), 8)
    state = decoding("lookup", k_draft=5, output=400)
    for _ in range(100):
        (item,) = propose(chains(lookup), controller, state)
        assert len(draft_of(item).tokens) == 5
        state.tokens += Text().continuation(state.tokens, 1)
        state.num_computed += 1
    (item,) = propose(chains(lookup), controller, decoding("lookup", k_draft=5, adaptive=True))
    assert (draft_of(item).tokens, *told(item)) == ((), None, "lookup")


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
    scheduler.drafters["cascade"] = (Promising("suffix"), model)  # type: ignore[index]
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
    assert model.calls == ["read"]
    (first,) = model.computed.values()
    assert 0 < first < LONG - 32
    assert step.emitted_tokens == 1
    assert step.missed_drafters == step.declined_drafters == step.drafts == []  # not asked
    while "propose" not in model.calls:
        served.step(scheduler)
    before = len(model.calls)
    while scheduler.busy:
        served.step(scheduler)
    assert "read" not in model.calls[before:]  # the rest comes with the first draft token
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
    scheduler, model = reading(controller=FixedLengths(0, pays=False))
    fields = {"drafter": "draft", "k_draft": 2, "adaptive": adaptive}
    serve(scheduler, make_request(LONG, output, **fields))
    assert model.calls == []


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


def test_measuring_plain_decoding_is_told_as_declined_drafts() -> None:
    target = SimulatedTarget()
    scheduler = make_scheduler(target, [Scripted(target.text, 1.0)])
    request = make_request(8, 960, drafter="scripted", k_draft=3, adaptive=True)
    served = serve(scheduler, request)
    plain = [step for step in served.results if step.decoding and not step.draft_tokens]
    assert 3 <= len(plain) <= 5
    assert all(step.declined_drafters == ["scripted"] for step in plain[:-1])
