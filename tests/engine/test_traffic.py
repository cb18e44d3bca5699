"""Real traffic through the scheduler, without a clock: the order of prompts beside first come.

Steps cost what a cost model says; lengths and arrivals are those of public traces, or of somebody
who means no good. `python -m tests.engine.test_traffic` prints the whole table; with a number it
takes that for `PATIENCE`; with a record of `bench order --other` it sends the same requests again
and compares.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specops.engine import order
from specops.engine.order import LEAD, PATIENCE, Order
from specops.engine.request_state import RequestState
from specops.engine.scheduler import Scheduler
from specops.request import GenerationRequest, Output
from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.sampling import Floats
from specops.serving.admission import AdmissionController
from specops.speculation.controller import Controller
from tests.simulated_target import SimulatedTarget, make_request, tokenizer

SLOTS, CONTEXT, WIDEST = 8, 8192, 96
# Milliseconds of a pass by its tokens, and of a pair of tokens in attention: SmolLM2 135M on two
# cores of an Intel Xeon, AVX512-VNNI; the bundled pair's target, two cores of an AMD EPYC, Zen 5.
SMOLLM2 = {"costs": {1: 3.0, 2: 3.7, 4: 5.5, 8: 8.0, 16: 13, 32: 22, 64: 41, 96: 60}, "pair": 6e-4}
DEMO_COSTS = {1: 0.109, 2: 0.119, 4: 0.141, 8: 0.196, 16: 0.335, 32: 0.579, 64: 1.086, 96: 1.189}


def passes(told: Mapping[str, Any], unit: float) -> CostModel:
    """What passes cost, from times in a unit of so many seconds."""
    costs = {int(size): time * unit for size, time in told["costs"].items()}
    return CostModel(list(costs), list(costs.values()), told["pair"] * unit)


smollm2 = partial(passes, SMOLLM2, 1e-3)
demo = partial(passes, {"costs": DEMO_COSTS, "pair": 5e-6}, 1e-3)


@dataclass(frozen=True)
class Trace:
    """Lengths in tokens, as quantiles at equal distances."""

    prompts: Sequence[int]
    answers: Sequence[int]

    def draw(self, count: int, rng: np.random.Generator) -> list[tuple[int, int]]:
        """Lengths of prompts and answers, which hardly depend on each other: each as often."""
        grid = (np.arange(count) + 0.5) / count
        columns = (
            rng.permutation(np.interp(grid, np.linspace(0, 1, len(each)), each).astype(int))
            for each in (self.prompts, self.answers)
        )
        return list(zip(*(column.tolist() for column in columns), strict=True))


# From the first 100 conversations of "Azure LLM inference trace 2023", data of Microsoft Azure,
# CC BY 4.0, https://github.com/Azure/AzurePublicDataset (Patel et al., Splitwise, ISCA 2024).
AZURE = Trace(
    (2, 89, 117, 172, 193, 203, 205, 210, 373, 385, 391, 398, 421, 866, 1037, 1089, 1119, 1313,
     1439, 4073, 4094),
    (12, 16, 43, 57, 63, 82, 87, 93, 105, 123, 144, 157, 170, 177, 183, 217, 224, 383, 399, 414,
     426),
)  # fmt: skip
# From requests of Mooncake's conversation trace, Apache 2.0,
# https://github.com/kvcache-ai/Mooncake (Qin et al., FAST 2025). Each prompt is new here.
MOONCAKE = Trace((898, 934, 1477, 2038, 2350, 6760), (3, 173, 316, 347, 366, 615))


class FirstCome(Order):
    """What the order is compared with."""

    def rank(self, state: RequestState) -> float:
        """When it came."""
        return state.request.turn

    def ahead(self, given: Mapping[str, float]) -> set[str]:
        """No client."""
        return set()


class Timed(SimulatedTarget):
    """Takes its time and says nothing: all logits are 0."""

    def forward(self, batch: Batch) -> Floats:
        """Move the clock."""
        self.clock.now += self._costs.cost(batch.num_tokens, batch.attention_work)
        rows = sum(span.num_logits for span in batch.spans)
        self._states = [0] * rows  # for embeddings
        return self._logits[:rows]


@dataclass
class Outcome:
    """What requests waited, in their order, in seconds: to the first token, to the end, a slot."""

    requests: Sequence[GenerationRequest]
    first: npt.NDArray[np.float64]
    whole: npt.NDArray[np.float64]
    queue: npt.NDArray[np.float64]
    alone: npt.NDArray[np.float64]  # what the prompts take alone
    busy: float = 0.0  # seconds of all passes

    @property
    def row(self) -> dict[str, float]:
        """First token: mean, p50, p95; whole: p99; slowdown: p95; share within 1 s."""
        mean, half, late = self.first.mean(), *np.quantile(self.first, [0.5, 0.95])
        slowdown = np.quantile(self.first / self.alone, 0.95)
        whole, soon = np.quantile(self.whole, 0.99), (self.first <= 1).mean()
        names = ("mean", "p50", "p95", "whole p99", "slowdown p95", "within 1 s")
        return dict(zip(names, map(float, (mean, half, late, whole, slowdown, soon)), strict=True))


def run(
    requests: Iterable[GenerationRequest],
    rule: type[Order] = Order,
    costs: Callable[[], CostModel] = smollm2,
    until: float = float("inf"),
    *,
    comes: Callable[[GenerationRequest], object] = lambda request: None,
    ends: Callable[[Output], object] = lambda output: None,
) -> Outcome:
    """Answer requests that come at their arrivals; those without an answer `until` then wait on."""
    coming = sorted(requests, key=lambda request: request.arrival)
    model = costs()
    target = Timed(num_slots=SLOTS, context=CONTEXT, max_tokens=WIDEST, costs=costs())
    target._logits[:] = 0
    scheduler = Scheduler(
        target,  # type: ignore[arg-type]
        {},
        Controller(model, 8),
        model,
        tokenizer(),
        end_tokens=frozenset(),
        max_batched_tokens=WIDEST,
        max_inter_token_latency=0.25,
        order=rule(target.cache, model.reading),
        clock=target.clock,
    )
    first: dict[str, float] = {}
    whole: dict[str, float] = {}
    queue: dict[str, float] = {}
    number, busy = 0, 0.0
    while (number < len(coming) or scheduler.busy) and target.clock.now < until:
        if not scheduler.busy:
            target.clock.now = max(target.clock.now, coming[number].arrival)
        while number < len(coming) and coming[number].arrival <= target.clock.now:
            comes(coming[number])
            scheduler.add(coming[number])
            number += 1
        step = scheduler.step()
        busy += step.seconds
        for output in step.outputs:
            first.setdefault(output.request_id, target.clock.now)
            if output.stats is not None:
                whole[output.request_id] = target.clock.now
                queue[output.request_id] = output.stats.queue_seconds
                ends(output)
    arrivals = np.array([request.arrival for request in coming])

    def since(times: Mapping[str, float]) -> npt.NDArray[np.float64]:
        ends = [times.get(request.request_id, np.inf) for request in coming]
        return np.array(ends) - arrivals

    waits = np.array([queue.get(request.request_id, np.inf) for request in coming])
    alone = np.array([model.reading.seconds(len(request.prompt_tokens)) for request in coming])
    return Outcome(coming, since(first), since(whole), waits, alone, busy)


def poisson(
    lengths: Sequence[tuple[int, int]], rate: float, seed: int = 0, keys: int = 1
) -> list[GenerationRequest]:
    """Requests of these lengths that come at random moments, each from one of so many clients."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, len(lengths))).tolist()
    clients = rng.integers(0, keys, len(lengths)).tolist()
    return [
        make_request(prompt, answer, arrival=arrival, client=str(client))
        for (prompt, answer), arrival, client in zip(lengths, arrivals, clients, strict=True)
    ]


@cache
def saturating(trace: str, costs: Callable[[], CostModel] = smollm2) -> float:
    """Requests a second that are answered where all come at once."""
    lengths = TRACES[trace].draw(200, np.random.default_rng(9))
    return len(lengths) / float(run(poisson(lengths, 1e9), FirstCome, costs).whole.max())


TRACES = {"azure": AZURE, "mooncake": MOONCAKE}
# Trace, share of the rate that saturates, keys, costs.
CASES = {
    "azure, half": ("azure", 0.5, 1, smollm2),
    "azure, 0.75": ("azure", 0.75, 1, smollm2),
    "azure, nine tenths": ("azure", 0.9, 1, smollm2),
    "azure, too much": ("azure", 1.15, 1, smollm2),
    "azure, nine tenths, eight keys": ("azure", 0.9, 8, smollm2),
    "mooncake, nine tenths": ("mooncake", 0.9, 1, smollm2),
    "azure, nine tenths, demo pair": ("azure", 0.9, 1, demo),
}


def both(case: str, seeds: Iterable[int], count: int) -> tuple[Outcome, Outcome]:
    """First come and the order, the same requests, all seeds together."""
    trace, share, keys, costs = CASES[case]
    rate = share * saturating(trace, costs)

    def joined(rule: type[Order]) -> Outcome:
        each = []
        for seed in seeds:
            lengths = TRACES[trace].draw(count, np.random.default_rng(100 + seed))
            each.append(run(poisson(lengths, rate, seed, keys), rule, costs))
        names = ("first", "whole", "queue", "alone")
        return Outcome(
            [], *(np.concatenate([getattr(one, name) for one in each]) for name in names)
        )

    return joined(FirstCome), joined(Order)


def parts(case: str, seeds: int = 4, count: int = 200) -> dict[str, float]:
    """The order's figures as parts of those of first come."""
    old, new = (outcome.row for outcome in both(case, range(seeds), count))
    return {name: new[name] / old[name] for name in old}


@pytest.mark.parametrize(
    ("case", "mean", "half"), [("azure, half", 0.65, 0.45), ("azure, nine tenths", 0.6, 0.4)]
)
def test_conversations_begin_sooner_and_the_last_hardly_end_later(
    case: str, mean: float, half: float
) -> None:
    """At half of the rate that saturates, the shortest prompt first would not reach 0.6 either."""
    part = parts(case, count=100)
    assert part["mean"] <= mean
    assert part["p50"] <= half
    assert part["whole p99"] <= 1.05
    assert part["slowdown p95"] <= 0.3
    assert part["within 1 s"] >= 1.2


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.startswith(("moon", "azure, nine tenths,"))]
)
def test_other_lengths_keys_and_costs_gain_as_well(case: str) -> None:
    part = parts(case, seeds=1, count=150)
    assert part["mean"] <= 0.7
    assert part["p50"] <= 0.5


def test_a_question_does_not_wait_for_a_document_nor_a_document_for_many_questions() -> None:
    document, question = make_request(3500, 171), make_request(60, 60, arrival=0.5)
    both = run([document, question])
    assert both.first[1] <= 6 * both.alone[1]
    assert run([document, question], FirstCome).first[1] > 60 * both.alone[1]
    asked = [make_request(60, 100, arrival=0.7 * number) for number in range(60)]
    assert run([document, *asked]).first[0] <= 3 * both.alone[0]


@pytest.mark.parametrize("share", [0.9, 1.3])
def test_the_waits_that_clients_are_told_are_true_on_the_mean(share: float) -> None:
    """Those who found no free slot: short prompts wait less, long ones more."""
    admission = AdmissionController(
        SLOTS, 1000, 1 << 40, print, room=lambda: 1 << 40, pressure=lambda: None, limit=1 << 32
    )
    lengths = AZURE.draw(300, np.random.default_rng(100))
    requests = {one.request_id: one for one in poisson(lengths, share * saturating("azure"))}
    told: dict[str, float] = {}

    def comes(request: GenerationRequest) -> None:
        told[request.request_id] = admission.enter([request]).wait_seconds

    def ends(output: Output) -> None:
        assert output.finish is not None
        admission.leave(requests[output.request_id], output.finish, output.stats)

    done = run(requests.values(), comes=comes, ends=ends)
    waits = np.array([told[request.request_id] for request in done.requests])
    full = waits > 0
    assert full.sum() > 50
    assert 0.4 <= done.queue[full].mean() / waits[full].mean() <= 1.1
    assert np.median(done.queue[~full]) < 0.5  # until its prompt's turn


# -- adversaries -----------------------------------------------------------------------------------


def seconds(request: GenerationRequest) -> float:
    """Of all its prompts, alone."""
    return sum(smollm2().reading.seconds(len(prompt)) for prompt in request.prompts)


@pytest.mark.parametrize("load", [0.5, 0.9, 1.5])
def test_a_document_under_a_stream_of_questions_begins_within_a_bound(
    load: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the questions that come before its deadline go first, and no others."""
    document = make_request(2000, 1)
    alone = seconds(document)
    bound = 1 + PATIENCE * load
    count = int(1.3 * bound * alone * load / seconds(make_request(60)))
    stream = [make_request(60, 1, arrival=bound * 1.3 * alone * n / count) for n in range(count)]
    assert run([document, *stream]).first[0] <= 1.1 * bound * alone
    if load > 1:  # it is the rule that bounds it
        monkeypatch.setattr(order, "PATIENCE", 1e9)
        assert run([document, *stream]).first[0] > 1.1 * bound * alone


@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_overtaken_by_whoever_comes_after_its_deadline(seed: int) -> None:
    """Under any mix: twice as much comes as can be served, texts to embed among it."""
    rng = np.random.default_rng(seed)
    requests, now = [], 0.0
    for kind in rng.integers(0, 5, 120).tolist():
        now += float(rng.exponential(0.25))
        if kind == 0:
            texts = [tuple(rng.integers(1, 60, 400).tolist()) for _ in range(3)]
            more = {"embed": True, "more_prompts": tuple(texts)}
            requests.append(make_request(400, 0, arrival=now, **more))
        else:
            prompt = (30, 30, 300, 1500)[kind - 1]
            requests.append(make_request(prompt, int(rng.integers(1, 40)), arrival=now))
    done = run(requests)
    assert np.isfinite(done.whole).all()
    begun = done.first + [request.arrival for request in done.requests]
    overtaken = 0
    for request, begin in zip(done.requests, begun, strict=True):
        deadline = request.arrival + PATIENCE * seconds(request)
        for other, sooner in zip(done.requests, begun, strict=True):
            # A text to embed leaves some of each pass's room to others.
            fits = request.embed and len(other.prompt_tokens) <= WIDEST - 8 * SLOTS
            if sooner < begin and not fits:
                assert other.arrival <= deadline
                overtaken += other.arrival > request.arrival
    assert overtaken > 100


def test_a_text_to_embed_does_not_starve_under_chats() -> None:
    """More chats come than can be read, with prompts of 2,000 tokens and answers of 20."""

    class Last(Order):
        def rank(self, state: RequestState) -> float:
            return super().rank(state) + 1e9 * state.request.embed

    text = make_request(3000, 0, embed=True, arrival=1.0)
    chats = [make_request(2000, 20, arrival=1.5 * number) for number in range(60)]
    for rule, waits in ((Order, False), (Last, True)):
        done = run([text, *chats], rule, until=80.0)
        (ended,) = done.whole[[request.embed for request in done.requests]]
        assert (ended > (1 + PATIENCE) * seconds(text)) == waits


@pytest.mark.parametrize("rival", ["questions", "documents"])
def test_a_client_that_sends_more_takes_no_more_than_its_share(rival: str) -> None:
    """Against another one's documents, while both have more to ask than can be answered."""
    long = [make_request(1500, 1, client="ann", arrival=0.1 * n) for n in range(40)]
    prompt, count, last = {"questions": (60, 1500, 20), "documents": (1500, 150, 4)}[rival]
    many = [make_request(prompt, 1, client="eve", arrival=last * n / count) for n in range(count)]
    for rule in (Order, FirstCome):
        done = run([*long, *many], rule, until=40.0)
        got = Counter[str]()
        for request, first in zip(done.requests, done.first, strict=True):
            if np.isfinite(first):
                got[request.client] += len(request.prompt_tokens) + 2
        near = abs(got["ann"] - got["eve"]) <= LEAD + 3000
        assert near == (rule is Order), got


def show(*pairs: tuple[Mapping[str, float], Mapping[str, float]]) -> None:
    """Print figures of the old and the new rule, their ratio, and how far the second's is off."""
    for name in pairs[0][0]:
        ratios = [new[name] / old[name] if old[name] else np.nan for old, new in pairs]
        each = zip(pairs, ratios, strict=True)
        line = [f"{old[name]:10.2f}{new[name]:9.2f}{ratio:7.2f}" for (old, new), ratio in each]
        print(f"  {name:14}", *line, *(f"{other / ratios[0] - 1:+8.0%}" for other in ratios[1:]))


def table(count: int = 200) -> None:
    """Print all cases."""
    for case, (trace, share, _, costs) in CASES.items():
        print(f"{case}: {share * saturating(trace, costs):.2f} a second")
        old, new = both(case, range(4), count)
        show((old.row, new.row))


def replay(record: Path) -> None:
    """Print a record's figures over HTTP, then those of the same requests with its passes' costs.

    All passes are slower than the service said by one factor: so that the old rule's take as long
    in all as they did there.
    """
    found = json.loads(record.read_text("utf-8"))
    for rate, sides in found["waits"].items():
        told, slowness, pairs = found["passes"][rate], 1.0, []
        for side, rule, runs in (("the other", FirstCome, 3), ("this checkout", Order, 1)):
            first, whole, prompts, answers, sent = np.array(sides[side]).T
            steps = 1 + (answers - 1) / told[side]["jump"]
            columns = (column.round().astype(int).tolist() for column in (prompts, steps))
            each = zip(*columns, sent.tolist(), strict=True)
            requests = [make_request(*lengths, arrival=at) for *lengths, at in each]
            for _ in range(runs):
                done = run(requests, rule, partial(passes, told["the other"], slowness))
                if rule is FirstCome:
                    slowness *= told[side]["seconds"] / done.busy
            pairs.append((Outcome([], first, whole, first, done.alone).row, done.row))
        print(
            f"{rate}: HTTP, simulated with passes {slowness:.2f} times as slow as told, difference"
        )
        show(*zip(*pairs, strict=True))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].endswith(".json"):
        replay(Path(sys.argv[1]))
    else:
        order.PATIENCE = float(sys.argv[1]) if sys.argv[1:] else PATIENCE
        table()
