"""Long contexts over HTTP: this checkout with an int8 cache against another with float16.

It measures the time to the first token of long prompts; the time per token after a long text that
repeats its start, by plain decoding and with the default drafter; and the whole time of clients
with long prompts. Sides take turns, round by round. Without another checkout both are this one.
"""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from bench.models import BenchModel
from bench.runtime.before import OTHER, OURS, interpreter_of
from bench.serving.load import Answer, burst, greedy, span
from bench.serving.server import Server, changed, serving
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, Summary, Table, progress, ratios
from specops.config import PREFIX
from specops.runtime.kernels import NAMES
from specops.text.tokenizer import Tokenizer

_ROOT = Path(__file__).resolve().parents[2]
_TEXTS = {"a document": "docs/architecture.md", "a program": "bench/serving/order.py"}
_TOKENS = 100, 300  # range of ids in random prompts: every vocabulary has them
_FORCED = """import runpy, sys
from specops.runtime.kernels import force
force(sys.argv.pop(1))
runpy.run_module("specops", run_name="__main__", alter_sys=True)"""
_DRAFTERS = {"plain": {"drafter": "none"}, "default drafter": {}}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        rounds: number of rounds.
        prompts: tokens of the prompts whose first token is timed.
        past, answer: tokens before and in a timed answer.
        clients: numbers of concurrent clients.
        each, output: tokens of their prompts and answers.
    """

    rounds: int = 3
    prompts: tuple[int, ...] = (4000, 8000)
    past: int = 4000
    answer: int = 128
    clients: tuple[int, ...] = (4, 8)
    each: int = 1000
    output: int = 64


FULL, QUICK = Plan(), Plan(1, (500,), 500, 16, (2,), 100, 8)


@dataclass(slots=True)
class _Side:
    """A server, and a generator of prompts with the same seed on both sides."""

    server: Server
    model: str
    random: np.random.Generator

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self.server.pid

    def prompts(self, count: int, tokens: int) -> list[list[int]]:
        """Random prompts, which share no prefix."""
        found: list[list[int]] = self.random.integers(*_TOKENS, (count, tokens)).tolist()
        return found

    def ask(self, prompts: Sequence[Sequence[int]], output: int, **asked: str) -> list[Answer]:
        """Complete answers to concurrent prompts."""
        asks = [greedy(self.model, prompt, output, **asked) for prompt in prompts]
        answers = asyncio.run(burst(self.server.port, asks))
        return [answer.checked() for answer in answers]


def _by(python: str, kernels: str | None, command: list[str]) -> list[str]:
    """A server's command with another interpreter and, if given, other kernels."""
    forced = ["-c", _FORCED, kernels, *command[3:]] if kernels else command[1:]
    return [python, *forced]


def run(
    model: BenchModel, plan: Plan, *, other: Path | None = None, kernels: str | None = None
) -> Outcome:
    """Measure both sides."""
    tokenizer = Tokenizer.load(model.folder().path)
    rows, most = max(plan.clients), max(*plan.prompts, plan.past + plan.answer) + 64
    room = max(most, rows * (plan.each + plan.output + 64))
    sized = replace(model.settings, context=most, slots=rows, kv_tokens=room)
    pythons = {OTHER: interpreter_of(other) if other else sys.executable, OURS: sys.executable}
    sides, turns = {}, Turns()
    with contextlib.ExitStack() as stack:
        for (side, python), dtype in zip(pythons.items(), ("fp16", "int8"), strict=True):
            progress(f"starting {side} with {dtype}")
            variables = changed(sized) | {f"{PREFIX}KV_DTYPE": dtype}  # overrides the preset's
            server = serving(variables, enclosed=partial(_by, python, kernels))
            random = np.random.default_rng(1)
            sides[f"{side}, {dtype}"] = _Side(stack.enter_context(server), model.key, random)
        turns.measure(sides, _cases(plan, tokenizer), plan.rounds)
    before, now = sides
    table = []
    for title, ms in turns.ms.items():
        speedup = Summary.of(ratios(ms[before], ms[now]))
        times = [f"{Summary.of(ms[side]).median:,.1f}" for side in sides]
        table.append((title, *times, f"{1 / speedup.median:.2f}", speedup.spread()))
    columns = ("what", *(f"{side}, ms" for side in sides), "share of its time", "times as fast")
    notes = (
        f"{plan.rounds} rounds, greedy; medians; ratios round by round",
        f"kernels: {kernels or NAMES[0]}",
        turns.note,
    )
    tables = [Table(f"Long contexts: {model.title}", columns, table, notes)]
    return Outcome({"plan": asdict(plan), "milliseconds": turns.ms}, tables)


def _cases(plan: Plan, tokenizer: Tokenizer) -> list[Case]:
    """First tokens, tokens after a long text, and all answers of several clients."""

    def first(tokens: int) -> Case:
        def ask(side: _Side) -> list[float]:
            return [side.ask(side.prompts(1, tokens), 1)[0].seconds]

        return Case(f"first token of a prompt of {tokens:,}", ask)

    def behind(name: str, drafter: str) -> Case:
        text = tokenizer.encode((_ROOT / _TEXTS[name]).read_text(encoding="utf-8"))
        half = text[: plan.past * 3 // 7]
        prompt = (half * 3)[: plan.past]  # it continues by repeating itself

        def ask(side: _Side) -> list[float]:
            (answer,) = side.ask([prompt], plan.answer, **_DRAFTERS[drafter])
            return [(answer.seconds - answer.event) / (plan.answer - 1)]

        return Case(f"a token behind {plan.past:,} of {name}, {drafter}", ask)

    def together(clients: int) -> Case:
        def ask(side: _Side) -> list[float]:
            answers = side.ask(side.prompts(clients, plan.each), plan.output, drafter="none")
            return [span(answers)]

        return Case(f"{clients} clients, {plan.each:,} + {plan.output} tokens each", ask)

    behinds = [behind(name, drafter) for name in _TEXTS for drafter in _DRAFTERS]
    return [*map(first, plan.prompts), *behinds, *map(together, plan.clients)]
