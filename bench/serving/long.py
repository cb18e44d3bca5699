"""Long contexts over HTTP: this checkout with an int8 cache against another with float16.

It measures the time to the first token of long prompts; the time per token after a long text that
repeats its start, by plain decoding and with the default drafter; and the whole time of clients
with long prompts. Sides take turns, round by round. Without another checkout both are this one.
llama.cpp can be another side of the shorter prompt: it reads the same file and is called directly.
"""

import argparse
import contextlib
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from bench.editor.models import qwen
from bench.models import BenchModel, chosen, configured, plain
from bench.peers.compare import SideProcess, loaded
from bench.peers.environment import install
from bench.peers.models import LLAMA_CPP
from bench.runtime.before import OTHER, OURS, interpreter_of, module_command
from bench.serving.at_once import HttpSide, PeerSide
from bench.serving.server import changed, serving
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, Summary, Table, progress, ratios
from specops.config import PREFIX
from specops.models.prepare import choose
from specops.presets import CHAT
from specops.runtime.kernels import NAMES
from specops.system.cpus import compute_threads
from specops.text.tokenizer import Tokenizer

SHAPE = "Qwen3-0.6B"
_ROOT = Path(__file__).resolve().parents[2]
_TEXTS = {"a document": "docs/architecture.md", "a program": "bench/serving/order.py"}
_TOKENS = 100, 300  # range of ids in random prompts: every vocabulary has them
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


def run(options: argparse.Namespace, plan: Plan) -> Outcome:
    """Measure the configured model, or those that `--only` names; of SHAPE only first tokens."""
    model, found, tables = configured(CHAT), {}, []
    for name in chosen((model.key, SHAPE), options.only or model.key):
        if name == SHAPE:
            file = qwen(f"Qwen/{SHAPE}", options.cache)
            model = BenchModel(file.stem, f"{file.stem}, random weights", plain(file, file.parent))
            plan = replace(plan, rounds=1)  # a prompt takes half a minute
        turns, notes = _measured(model, options, plan, whole=name != SHAPE)
        found[name], rows, ours = turns.ms, [], f"{OURS}, int8"
        for title, ms in turns.ms.items():
            for side in (side for side in ms if side != ours):
                speedup = Summary.of(ratios(ms[side], ms[ours]))
                times = [f"{Summary.of(ms[one]).median:,.1f}" for one in (side, ours)]
                rows.append((title, side, *times, f"{1 / speedup.median:.2f}", speedup.spread()))
        columns = ("what", "against", "its ms", f"{ours}, ms", "share of its time", "times as fast")
        tables.append(Table(f"Long contexts: {model.title}", columns, rows, notes))
    return Outcome({"plan": asdict(plan), "milliseconds": found}, tables)


def _measured(
    model: BenchModel, options: argparse.Namespace, plan: Plan, *, whole: bool
) -> tuple[Turns, list[str]]:
    """Let all sides take turns; the times, and notes on them."""
    other, kernels, turns = options.other, options.kernels, Turns()
    rows, most = max(plan.clients), max(*plan.prompts, plan.past + plan.answer) + 64
    room = max(most, rows * (plan.each + plan.output + 64))
    sized = replace(model.settings, context=most, slots=rows, kv_tokens=room)
    pythons = {OTHER: interpreter_of(other) if other else sys.executable, OURS: sys.executable}
    notes = [f"{plan.rounds} rounds, greedy; medians; ratios round by round"]
    notes.append(f"kernels: {kernels or NAMES[0]}")
    with contextlib.ExitStack() as stack:
        servers, peers = {}, {}
        for (side, python), dtype in zip(pythons.items(), ("fp16", "int8"), strict=True):
            progress(f"starting {side} with {dtype}")
            variables = changed(sized) | {f"{PREFIX}KV_DTYPE": dtype}  # overrides the preset's
            program = module_command(python, "specops", kernels)
            server = serving(variables, program=program)
            servers[f"{side}, {dtype}"] = HttpSide(stack.enter_context(server))
        if options.llama:
            file = Path(str(choose(sized).target))
            process = SideProcess.peer(install(options.cache / "environment"), "llama_worker", file)
            asked = {"threads": compute_threads(sized.threads), "q8": True}
            worker, version = stack.enter_context(loaded(LLAMA_CPP, process, 1, most, **asked))
            peers[f"{LLAMA_CPP}, q8_0"] = PeerSide(worker)
            notes.append(f"{version}, called directly: flash attention, {asked['threads']} threads")
        firsts = [_asked(f"first token of a prompt of {n:,}", 1, n) for n in plan.prompts]
        turns.measure(servers | peers, firsts[:1], plan.rounds)  # 8,000 take llama.cpp minutes
        turns.measure(servers, firsts[1:], plan.rounds)
        if whole:
            what = f"clients, {plan.each:,} + {plan.output} tokens each"
            more = [_asked(f"{n} {what}", n, plan.each, plan.output) for n in plan.clients]
            texts = _texts(plan, Tokenizer.load(model.folder().path))
            turns.measure(servers, [*texts, *more], plan.rounds)
    return turns, [*notes, turns.note]


def _asked(title: str, count: int, tokens: int, output: int = 1) -> Case:
    """All answers to concurrent random prompts, in every round the same: nothing is cached."""
    prompts = np.random.default_rng(1).integers(*_TOKENS, (count, tokens)).tolist()
    return Case(title, lambda side: [side.complete(prompts, output)[0]])


def _texts(plan: Plan, tokenizer: Tokenizer) -> list[Case]:
    """Tokens after a long text."""

    def behind(name: str, drafter: str) -> Case:
        text = tokenizer.encode((_ROOT / _TEXTS[name]).read_text(encoding="utf-8"))
        prompt = (text[: plan.past * 3 // 7] * 3)[: plan.past]  # it continues by repeating itself

        def ask(side: HttpSide) -> list[float]:
            (answer,) = side.ask([prompt], plan.answer, **_DRAFTERS[drafter])
            return [(answer.seconds - answer.event) / (plan.answer - 1)]

        return Case(f"a token behind {plan.past:,} of {name}, {drafter}", ask)

    return [behind(name, drafter) for name in _TEXTS for drafter in _DRAFTERS]
