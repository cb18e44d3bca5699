"""What drafters in a cascade cost: next to nothing where they do not pay.

That goes for a draft head, whatever it reads and says, and for a draft model beside a lookup.
"""

import sys
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from specops.request import Grammar, GrammarKind, SamplingParams
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.speculation.drafters.base import NO_DRAFT, Draft, DraftContext, Drafter
from tests.simulated_target import (
    VOCAB,
    Clock,
    Rest,
    SimulatedTarget,
    Text,
    make_request,
    make_scheduler,
    serve,
    tinyllama,
)

PROMPT, ANSWER = 200, 60  # tokens
ASK = 1.25e-3  # seconds: a tenth of a pass
LOOKUP = 25e-6
READ = 0.09e-3  # of a prompt's token: a layer of 24
STRETCH = 25  # tokens


class Lookup(Drafter):
    """Knows each next token with a probability, and says with which; sometimes it knows none."""

    def __init__(
        self, right: float, name: str = "suffix", most: int = 3, *, silent: float = 0.0
    ) -> None:
        self.name = name  # type: ignore[misc]
        self.right, self._most, self._silent = right, most, silent
        self._rng = np.random.default_rng(3)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        if self._silent and self._rng.random() < self._silent:
            return NO_DRAFT
        found = [context.text[-1]]
        for wrong in self._rng.random(min(context.max_draft, self._most)) >= self.right:
            found.append((3 * found[-1] + 7 + int(wrong)) % VOCAB)
        return Draft(tuple(found[1:]), accept_probs=(self.right,) * (len(found) - 1))


class Head(Lookup):
    """Takes its time to read prompts and to be asked.

    Args:
        clock: its time passes there.
        right: probability that a token is right.
        repeats: it says what the lookup before it has said, is surer, and goes on wrongly.

    Attributes:
        read_texts: number of prompts.
        asks: how often it was asked.
    """

    follows = True

    def __init__(self, clock: Clock, right: float, *, repeats: bool = False) -> None:
        super().__init__(right, "head")
        self.read_texts = self.asks = 0
        self._slots = set[int]()
        self._repeats = repeats
        self._clock = clock
        self._reading = 0.0

    def begin(self, slot: int, tokens: Sequence[int], client: str) -> None:
        self.read_texts += 1
        self._clock.now += READ * len(tokens)
        self._reading += READ * len(tokens)
        self._slots.add(slot)

    def is_synced(self, slot: int, tokens: Sequence[int]) -> bool:
        return slot in self._slots

    def take_reading(self) -> float:
        seconds, self._reading = self._reading, 0.0
        return seconds

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.asks += 1
        self._clock.now += ASK
        return super().propose(contexts)

    def _draft(self, context: DraftContext) -> Draft:
        if self._repeats:
            said = context.draft.tokens[: context.max_draft - 1]
            return Draft((*said, 0), accept_probs=(0.9,) * len(said) + (0.2,))
        return super()._draft(context)

    def release(self, slot: int) -> None:
        self._slots.discard(slot)


class Service:
    """Answers one request after the other: by a lookup alone, or by a head as well."""

    def __init__(self, lookup: float, head: float, *, repeats: bool = False) -> None:
        self.target = SimulatedTarget(
            clock=Clock(), text=Text(surprise=0.0), reuse=PrefixSharing.OFF
        )
        self.head = Head(self.target.clock, head, repeats=repeats)
        before = Lookup(lookup)
        self.scheduler = make_scheduler(self.target, [before, self.head])
        self.scheduler.drafters["cascade"] = (before, self.head)  # type: ignore[index]

    def seconds(self, drafter: str, count: int) -> float:
        """The time that so many answers take."""
        begun = self.target.clock.now
        for _ in range(count):
            request = make_request(PROMPT, ANSWER, drafter=drafter, k_draft=4, adaptive=True)
            serve(self.scheduler, request)
        return self.target.clock.now - begun


@pytest.mark.parametrize("lookup", [0.01, 0.7])
def test_a_head_that_is_never_right_soon_reads_and_says_next_to_nothing(lookup: float) -> None:
    service = Service(lookup, 0.01)
    service.seconds("cascade", 12)
    read, alone = service.head.read_texts, service.seconds("suffix", 40)
    assert service.seconds("cascade", 40) < 1.015 * alone
    assert 0 < service.head.read_texts - read < 10  # now and then one: texts may have changed


def test_a_head_that_only_repeats_what_was_looked_up_is_hardly_asked() -> None:
    """Its drafts are taken; without it as many right tokens would have been verified."""
    service = Service(0.5, 0.5, repeats=True)
    service.seconds("cascade", 12)
    asks, alone = service.head.asks, service.seconds("suffix", 40)
    assert service.seconds("cascade", 40) < 1.02 * alone
    assert service.head.asks - asks < 100


def test_a_head_that_pays_reads_every_text_and_comes_back_when_it_pays_again() -> None:
    service = Service(0.01, 0.01)
    service.seconds("cascade", 12)
    service.head.right = 0.8
    service.seconds("cascade", 30)
    read, alone = service.head.read_texts, service.seconds("suffix", 10)
    assert service.seconds("cascade", 10) < 0.8 * alone
    assert service.head.read_texts - read == 10


class Alternating(Lookup):
    """Knows the next tokens well in every other stretch of a text."""

    def _draft(self, context: DraftContext) -> Draft:
        self.right = 0.9 if len(context.text) // STRETCH % 2 else 0.2
        return super()._draft(context)


class Model(Lookup):
    """A draft model whose passes take a twentieth of the target's."""

    def __init__(self, target: SimulatedTarget, right: float) -> None:
        super().__init__(right, "draft", 8)
        self.costs, self._clock = tinyllama(0.05), target.clock

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        drafts = super().propose(contexts)
        for place in range(8):
            going = sum(len(draft.tokens) > place for draft in drafts)
            self._clock.now += self.costs.cost(going)
        return drafts


@pytest.mark.parametrize(("lookup", "model", "times_as_fast"), [
    (Lookup(0.3), 0.8, 0.97), (Lookup(0.8), 0.3, 0.97), (Alternating(0.0), 0.75, 1.1),
])  # fmt: skip
def test_a_lookup_and_a_draft_model_together_are_no_slower_than_the_better_one(
    lookup: Lookup, model: float, times_as_fast: float
) -> None:
    target = SimulatedTarget(clock=Clock(), text=Text(surprise=0.0), reuse=PrefixSharing.OFF)
    smaller = Model(target, model)
    seconds = {}
    for name in ("suffix", "draft", "cascade"):
        scheduler = make_scheduler(target, [lookup, smaller], draft_costs=smaller.costs)
        scheduler.drafters["cascade"] = (lookup, smaller)  # type: ignore[index]
        for answers in (4, 12):  # those of the first ones are for learning
            begun = target.clock.now
            for _ in range(answers):
                serve(scheduler, make_request(4, 100, drafter=name, k_draft=8, adaptive=True))
            seconds[name] = target.clock.now - begun
    assert min(seconds["suffix"], seconds["draft"]) / seconds["cascade"] > times_as_fast


class Timed(Lookup):
    """Takes as long as a lookup does, a five hundredth of a pass."""

    def __init__(self, clock: Clock, right: float) -> None:
        super().__init__(right, most=8)
        self._clock = clock

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._clock.now += LOOKUP
        return super().propose(contexts)


def test_a_request_that_rests_takes_the_steps_of_one_without_a_drafter() -> None:
    """Counted in calls of functions, which no other process disturbs."""

    def calls(drafter: str) -> int:
        """The usual number in a step of eight requests, once the drafter is found to be wrong."""
        target = SimulatedTarget(costs=tinyllama(0.02))
        scheduler = make_scheduler(target, [Timed(target.clock, 0.0)], costs=tinyllama(0.02))
        for _ in range(8):
            scheduler.add(make_request(4, 400, drafter=drafter, k_draft=4, adaptive=True))
        found, made = list[int](), 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event == "call"

        for _ in range(380):
            made = 0
            sys.setprofile(count)
            scheduler.step()
            sys.setprofile(None)
            found.append(made)
        return sorted(found[100:])[140]

    own, plain = calls("suffix"), calls("none")
    assert plain > 100
    assert own <= plain


@pytest.mark.parametrize("right", [0.9, 0.7, 0.5, 0.3])
def test_short_answers_are_drafted_as_fast_as_by_the_best_length(right: float) -> None:
    """A rejected draft takes longer than a hundred lookups, and does not end the drafting."""
    target = SimulatedTarget(clock=Clock(), text=Text(surprise=0.0), reuse=PrefixSharing.OFF)
    seconds = {}
    for most, adaptive in ((1, False), (2, False), (4, False), (8, True)):
        scheduler = make_scheduler(target, [Timed(target.clock, right)])
        fields = {"drafter": "suffix", "k_draft": most, "adaptive": adaptive}
        begun = target.clock.now
        for _ in range(24):
            serve(scheduler, make_request(4, 64, **fields))
        seconds[most] = target.clock.now - begun
    assert min(seconds.values()) / seconds[8] > 0.96


class Shared(Lookup):
    """Takes time whenever it is asked, and little more for each request."""

    def __init__(self, clock: Clock, fixed: float, each: float) -> None:
        super().__init__(0.9, most=8)
        self._clock, self._fixed, self._each = clock, fixed, each

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self._clock.now += self._fixed + self._each * len(contexts)
        return super().propose(contexts)


@pytest.mark.parametrize(("fixed", "each"), [(100e-6, 8e-6), (30e-6, 20e-6)])
def test_requests_go_on_drafting_together_where_it_does_not_pay_for_one_alone(
    fixed: float, each: float
) -> None:
    """Each stopped after one rejected draft, so that it no longer paid for the others.

    A mean of ten samples: a few rejected drafts in a row decide a single one.
    """

    def seconds(most: int, adaptive: bool, learning: int) -> float:
        """The time that 96 answers take, after some for learning."""
        target = SimulatedTarget(
            text=Text(surprise=0.0), reuse=PrefixSharing.OFF, costs=tinyllama(0.02),
            rest=Rest(30e-6, 4e-6, 1e-6, 4e-6),
        )  # fmt: skip
        drafter, begun = Shared(target.clock, fixed, each), 0.0
        scheduler = make_scheduler(target, [drafter], costs=tinyllama(0.02))
        asked = {"drafter": "suffix" if most else "none", "k_draft": most, "adaptive": adaptive}
        for answers in (learning, 96):
            begun = target.clock.now
            serve(scheduler, *(make_request(4, 32 + 7 * n % 32, **asked) for n in range(answers)))
        return target.clock.now - begun

    samples = range(40, 60, 2)
    plain, two, four, own = (
        np.array([seconds(*way, learning) for learning in samples])
        for way in ((0, False), (2, False), (4, False), (8, True))
    )
    assert np.mean(plain / own) > 1.03
    assert np.mean(min(plain, two, four, key=np.sum) / own) > 0.99


def test_what_a_request_takes_to_come_and_to_end_is_not_counted_as_its_tokens_time() -> None:
    target = SimulatedTarget(reuse=PrefixSharing.OFF)
    scheduler = make_scheduler(target, [Lookup(0.7)])
    asked = {"drafter": "suffix", "k_draft": 4, "adaptive": True}
    waiting = [make_request(4, 12 + each % 16, **asked) for each in range(120)]
    for request in waiting[:4]:
        scheduler.add(request)
    del waiting[:4]
    while scheduler.busy:
        step = scheduler.step()
        target.clock.now += 1e-3  # the rest of every step
        for output in step.outputs:
            if output.finish is not None:
                target.clock.now += 5e-3
                if waiting:
                    scheduler.add(waiting.pop())
    assert scheduler.controller.overhead.seconds(4) == pytest.approx(1e-3, rel=0.02)
    assert scheduler.controller.overhead.seconds(4, 8, 10) == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("requests", [1, 8])
@pytest.mark.parametrize("rest", [Rest(), Rest(60e-6, draft_token=60e-6), Rest(token=500e-6)])
def test_by_whole_steps_it_is_never_slower_than_plain_decoding(rest: Rest, requests: int) -> None:
    """A pass takes 0.25 ms, so the rest of a step counts; 7 draft tokens of 10 are right."""
    small = [tinyllama(0.02) for _ in range(2)]
    target = SimulatedTarget(
        text=Text(surprise=0.0), reuse=PrefixSharing.OFF, rest=rest, costs=small[0]
    )
    scheduler = make_scheduler(target, [Lookup(0.7, silent=0.2)], costs=small[1])

    def serving(drafter: str) -> tuple[float, float, float]:
        """Seconds that some answers take, the gain that they are told of, and tokens a pass."""
        fields = {"drafter": drafter, "k_draft": 8, "adaptive": True}
        asked, begun = [make_request(4, 400, **fields) for _ in range(requests)], target.clock.now
        served = serve(scheduler, *asked)
        stats = [served.stats(item) for item in asked]
        told, jump = (
            float(np.mean([getattr(item, name) for item in stats]))
            for name in ("estimated_speedup", "tokens_per_pass")
        )
        return target.clock.now - begun, told, jump

    serving("suffix")  # learns
    seconds, told, jump = serving("suffix")
    plain, *_ = serving("none")
    assert plain / seconds > 0.99
    assert told == pytest.approx(plain / seconds, rel=0.1)  # some end before others
    assert told <= jump


@pytest.mark.parametrize("other", [
    {"k_draft": 1, "adaptive": False},
    {"sampling": SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[a-z ]*"))},
])  # fmt: skip
def test_a_request_drafts_on_beside_one_that_takes_no_part_in_plain_steps(
    other: Mapping[str, object],
) -> None:
    """Plain decoding is measured in steps of requests that can all do without draft tokens."""
    target = SimulatedTarget(text=Text(surprise=0.0))
    scheduler = make_scheduler(target, [Lookup(0.9)])
    fields = {"drafter": "suffix", "k_draft": 3, "adaptive": True}
    adaptive = make_request(8, 960, **fields)
    served = serve(scheduler, adaptive, make_request(8, 960, **(fields | other)))
    stats = served.stats(adaptive)
    assert stats.drafts > 0.95 * stats.sequence_steps
