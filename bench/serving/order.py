"""Measures how long requests of real lengths wait over HTTP, here and in another checkout.

Requests arrive at random (open loop), at shares of the rate that saturates this checkout, or at
given rates. Then come two people: a short question half a second after a long document, and a
document during a stream of questions, each compared with the same request alone. Sides take turns
run by run, on servers with empty caches.
"""

import asyncio
import contextlib
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.runtime.before import OTHER, OURS, interpreter_of
from bench.serving.load import Ask, burst, figure, greedy, once, span
from bench.serving.server import Server, changed, serving
from bench.tools.report import Outcome, Table, Target, progress
from specops.config import ConfigError

_QUEUE, _TIMEOUT = 10_000, 3600.0  # so that no request is refused
_OUTPUT = 64  # tokens of an answer if the file does not say
_TOKENS = range(100, 300)  # ids in random prompts: every vocabulary has them
_SOON = 1.0  # seconds
_COST = re.compile(r'^specops_pass_cost_seconds\{kind="tokens",size="(\d+)"\} (.+)', re.MULTILINE)
_TARGETS = {"first token, mean": 0.6, "first token, p50": 0.45, "whole answer, p99": 1.05}
_SLOWED = {"question behind a document": 6.0, "document under questions": 3.0}  # at most


Wait = tuple[float, float, int, int, float]
"""Seconds to the first token and to the end, tokens of prompt and answer, time of sending."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        requests: number of requests at each rate.
        shares: rates, as shares of the saturating rate.
        at_once: number of concurrent requests that measure the saturating rate.
        rounds: rounds of the two people.
        document, question: tokens of their prompts.
    """

    requests: int = 200
    shares: tuple[float, ...] = (0.5, 0.9)
    at_once: int = 60
    rounds: int = 5
    document: int = 3500
    question: int = 60


FULL = Plan()
QUICK = Plan(requests=4, shares=(0.9,), at_once=4, rounds=1, document=200, question=20)


def run(
    model: BenchModel,
    prompts: Sequence[Prompt],
    plan: Plan,
    *,
    other: Path | None = None,
    rates: Sequence[float] = (),
) -> Outcome:
    """Measure this checkout and, if there is one, the other.

    Args:
        model: the model.
        prompts: the requests' prompts, in order, with answer lengths if the file has them.
        plan: how much to measure.
        other: the other checkout, if any.
        rates: requests per second, instead of the plan's shares.
    """
    sides = {OURS: sys.executable}
    if other is not None:
        sides = {OTHER: interpreter_of(other), **sides}
    asks = [greedy(model.key, prompt.text, prompt.output or _OUTPUT) for prompt in prompts]
    if not rates:
        progress("measuring the saturating rate")
        with _server(model, sides[OURS]) as server:
            each = asyncio.run(burst(server.port, _turn(asks, plan.at_once)))
        full = plan.at_once / span([answer.checked() for answer in each])
        rates = [share * full for share in plan.shares]
    waits: dict[str, dict[str, list[Wait]]] = {}
    passes: dict[str, dict[str, dict[str, Any]]] = {}
    people: dict[str, dict[str, list[float]]] = {}
    for rate in rates:
        title = f"{rate:.2f} a second"
        waits[title], passes[title] = {}, {}
        for side, python in sides.items():
            progress(f"{title}: {side}")
            with _server(model, python) as server:
                found = asyncio.run(_arrivals(server.port, _turn(asks, plan.requests), rate))
                passes[title][side] = asyncio.run(_passes(server.port))
            waits[title][side] = found
    for side, python in sides.items():
        progress(f"two people: {side}")
        with _server(model, python) as server:
            people[side] = asyncio.run(_people(server.port, model.key, plan))
    measured = outcome(model.title, waits, people, plan)
    return replace(measured, result={**measured.result, "passes": passes})


def _turn(asks: Sequence[Ask], count: int) -> list[Ask]:
    if len(asks) < count:
        raise ConfigError(f"order needs {count} different prompts; the file has {len(asks)}")
    return list(asks[:count])


@contextlib.contextmanager
def _server(model: BenchModel, python: str) -> Iterator[Server]:
    """A checkout's server with an empty prefix cache."""
    settings = replace(model.settings, queue_size=_QUEUE, request_timeout=_TIMEOUT)
    with serving(changed(settings), program=(python, "-m", "specops")) as server:
        asyncio.run(_alone(server.port, model.key, 8))  # the first pass maps the weights
        yield server


async def _passes(port: int) -> dict[str, Any]:
    """Input for a simulator: seconds of passes by number of tokens, and tokens per pass."""
    page = (await once(port, Ask("/metrics"))).body.decode()
    steps = figure(page, "specops_sequence_steps_total")
    return {
        "costs": {int(size): float(seconds) for size, seconds in _COST.findall(page)},
        "pair": figure(page, "specops_pass_cost_seconds", 'kind="attention"') / 1e6,
        "seconds": figure(page, "specops_target_step_seconds_sum"),
        "jump": figure(page, "specops_decode_tokens_total") / steps if steps else 1.0,
    }


async def _arrivals(port: int, asks: Sequence[Ask], rate: float) -> list[Wait]:
    """Send requests at random times, the same for both sides."""
    rng, at = random.Random(1), 0.0

    async def later(ask: Ask, seconds: float) -> Wait:
        await asyncio.sleep(seconds)
        answer = (await once(port, ask)).checked()
        usage = answer.events[-1]["usage"]
        tokens = usage["prompt_tokens"], usage["completion_tokens"]
        return (answer.event, answer.seconds, *tokens, seconds)

    coming = []
    for ask in asks:
        at += rng.expovariate(rate)
        coming.append(later(ask, at))
    return await asyncio.gather(*coming)


def _made(model: str, tokens: int, output: int = 1) -> Ask:
    """A request with a random prompt."""
    return greedy(model, random.choices(_TOKENS, k=tokens), output)


async def _alone(port: int, model: str, tokens: int) -> float:
    return (await once(port, _made(model, tokens))).checked().event


async def _people(port: int, model: str, plan: Plan) -> dict[str, list[float]]:
    """Seconds to the first token by case, round by round."""
    found: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        found.setdefault(name, []).append(seconds)

    for _ in range(plan.rounds):
        for tokens in (plan.question, plan.document // 4, plan.document):
            note(str(tokens), await _alone(port, model, tokens))
        document = asyncio.create_task(once(port, _made(model, plan.document)))
        await asyncio.sleep(0.5)
        note("question", await _alone(port, model, plan.question))
        (await document).checked()
        document = asyncio.create_task(once(port, _made(model, plan.document)))
        while not document.done():
            (await once(port, _made(model, plan.question, plan.question))).checked()
        note("document", document.result().event)
    return found


def outcome(
    title: str,
    waits: Mapping[str, Mapping[str, Sequence[Wait]]],
    people: Mapping[str, Mapping[str, Sequence[float]]],
    plan: Plan,
) -> Outcome:
    """A table for each rate, and one for the two people.

    Args:
        title: title of the model.
        waits: waits by rate and side.
        people: seconds to the first token by side and case; a number of tokens is a request alone.
        plan: how much was measured.
    """
    lengths = (plan.question, plan.document // 4, plan.document)
    alone = {
        side: [float(np.median(each[str(tokens)])) for tokens in lengths]
        for side, each in people.items()
    }
    tables, targets = [], []
    for rate, sides in waits.items():
        figures = {side: _figures(each, lengths, alone[side]) for side, each in sides.items()}
        rows = []
        for name, ours in figures[OURS].items():
            row = {"seconds": name} | {side: f"{each[name]:.2f}" for side, each in figures.items()}
            if OTHER in figures:
                share = ours / (figures[OTHER][name] or float("nan"))
                row["share"] = f"{share:.2f}"
                if name in _TARGETS:
                    what = f"{rate}, {name}: share of the other's"
                    targets.append(Target(what, _TARGETS[name], share, at_most=True))
            rows.append(row)
        note = f"{plan.requests} requests at random times; slowdown: over the same length alone"
        tables.append(Table.of(f"Order of prompts, {rate}: {title}", rows, (note,)))
    rows = []
    for side, each in people.items():
        slowed = {
            "question behind a document": np.array(each["question"]) / alone[side][0],
            "document under questions": np.array(each["document"]) / alone[side][-1],
        }
        row = {"first token": side, "question alone, s": f"{alone[side][0]:.2f}"}
        row["document alone, s"] = f"{alone[side][-1]:.2f}"
        for what, times in slowed.items():
            row[f"{what}, times alone"] = f"{np.median(times):.1f} to {times.max():.1f}"
            if side == OURS:
                most = float(times.max())
                targets.append(Target(f"{what}: times alone", _SLOWED[what], most, at_most=True))
        rows.append(row)
    note = f"{plan.document} and {plan.question} tokens, {plan.rounds} rounds: median to the worst"
    tables.append(Table.of(f"Two people: {title}", rows, (note,)))
    result = {"plan": asdict(plan), "waits": waits, "people": people}
    return Outcome(result, tables, targets=targets)


def _figures(
    waits: Sequence[Wait], lengths: Sequence[int], alone: Sequence[float]
) -> dict[str, float]:
    first, whole, tokens, *_ = (np.array(column) for column in zip(*waits, strict=True))
    least = np.interp(tokens, lengths, alone)
    found = {"the same lengths alone, p50": float(np.median(least))}
    for name, seconds in (("first token", first), ("whole answer", whole)):
        found[f"{name}, mean"] = float(seconds.mean())
        found |= {f"{name}, p{q}": float(np.percentile(seconds, q)) for q in (50, 95, 99)}
    found["slowdown, p95"] = float(np.quantile(first / least, 0.95))
    found["share within 1 s"] = float((first <= _SOON).mean())
    return found
