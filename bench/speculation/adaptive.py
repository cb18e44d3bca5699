"""Is adaptive drafting never slower, and close to the best choice in hindsight?

Passes are real, including those of a draft model or a head. But a script decides which guesses are
right (`scripts`), because there are no trained weights of such sizes: every table says so. Adaptive
drafts, every fixed length and plain decoding take turns, and the total time of the same requests is
compared. Plain decoding takes two turns: its times differ from each other only by chance. Prompts
come from the prefix cache. The headline is the worst row.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from bench.models import (
    HEAD_KINDS,
    LLAMA_160M,
    BenchModel,
    chosen,
    configured,
    layer_kind,
    shape,
    tinyllama,
    tinyllama_with_head,
)
from bench.prompts import Prompt, code
from bench.speculation import ways
from bench.speculation.scripts import Script, ScriptedLookup, continuations, follow
from bench.speculation.ways import PLAIN, Config, Measured, Runner, Sizes
from bench.tools.report import Outcome, Summary, Table, Target, progress, ratios
from specops.engine.engine import NO_DRAFTER
from specops.runtime.kernels import kernel
from specops.speculation.drafters.base import Drafter
from specops.speculation.drafters.guessing import GuessingDrafter

_OF_PLAIN, _OF_BEST = 0.99, 0.97
_AGAIN = Config(NO_DRAFTER, 1)  # plain decoding's second turn
_BESIDE = 0.5  # acceptance of a lookup in front of a head or a draft model
_SIMULATED = (
    "simulated acceptance: each draft token is the target's own next token with this probability "
    "if those before it were; the passes are real"
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure.

    Many clients at once finish quickly: they get as many more rounds as `steps` steps need. There
    are as many prompts as clients, but at least `prompts`. A lookup is measured alone, or only in
    front of a head or a draft model. In the first `learning` rounds, which do not count, adaptive
    drafts learn what pays, as a service does once.
    """

    new_tokens: int
    rounds: int
    steps: int = 0
    learning: int = 2
    prompts: int = 8
    clients: Sequence[int] = (1, 4, 8, 16)
    levels: Sequence[float] = (0.9, 0.7, 0.5, 0.3)  # of simulated acceptance
    lengths: Sequence[int] = (1, 2, 4)
    most: int = 8  # draft tokens of adaptive drafts
    lookup_alone: bool = True


FULL = Plan(64, rounds=8, steps=1024)
SLOW = Plan(24, rounds=3, prompts=4, most=4, lookup_alone=False)
QUICK = Plan(16, rounds=1, prompts=2, clients=(1, 2), levels=(0.9, 0.3), lengths=(1, 3), most=3)
Cell = tuple[str, int, float]
"""A drafter, the number of clients, and the acceptance."""


def _drafted(quant: str) -> BenchModel:
    """TinyLlama's shape, with Llama 160M's as its draft model."""
    model, title = tinyllama(), quant.partition("-")[0]
    settings = replace(model.settings, draft=str(shape(LLAMA_160M, quant)))
    return replace(model, title=f"{model.title}, with Llama 160M in {title}", settings=settings)


MODELS: Mapping[str, Callable[[], BenchModel]] = {
    "configured": configured,
    "tinyllama-int8-draft": partial(_drafted, "int8-128"),
    "tinyllama-int4-draft": partial(_drafted, "int4-128-rtn"),
    "tinyllama-head": tinyllama_with_head,
    **{name: partial(layer_kind, name) for name in HEAD_KINDS},
}


def run(options: argparse.Namespace, plan: Plan) -> Outcome:
    """Measure the models whose names contain `--only`, by default the configured one."""
    found, only = {}, options.only or "configured"
    for name in chosen(MODELS, only):
        model, own = MODELS[name](), plan
        if name.startswith("tinyllama") and not options.quick:  # a pass takes 50 times as long
            own = SLOW
        texts = options.prompts or code(max(own.prompts, *own.clients))
        found[model.title] = own, measure(model, texts, own)
    return outcome(found, "" if only == "configured" else "adaptive-models")


def measure(model: BenchModel, prompts: Sequence[Prompt], plan: Plan) -> dict[Cell, Measured]:
    """Measure each level of acceptance under each load: a lookup, a model as drafter, and both."""
    changed = {"slots": max(plan.clients), "prefix_cache": "all", "max_k_draft": plan.most}
    runner = Runner.load(replace(model, settings=replace(model.settings, **changed)))
    engine, texts = runner.engine, prompts[: max(plan.prompts, *plan.clients)]
    drafters, found = engine.scheduler.drafters, dict[Cell, Measured]()
    known = continuations(runner, texts, plan.new_tokens)
    models = {
        one for chain in drafters.values() for one in chain if isinstance(one, GuessingDrafter)
    }
    lookup = ScriptedLookup(Script(_BESIDE, known, vocab_size=engine.info.vocab_size, seed=1))
    for level in plan.levels:
        script = Script(level, known, vocab_size=engine.info.vocab_size)
        chains = dict[str, tuple[Drafter, ...]]()
        if plan.lookup_alone or not models:
            chains[ScriptedLookup.name] = (ScriptedLookup(script),)
        for drafter in models:
            follow(drafter, script)
            chains |= {drafter.name: (drafter,), f"lookup and {drafter.name}": (lookup, drafter)}
        for name, chain in chains.items():
            drafters[name] = chain  # type: ignore[index]
            configs = [_AGAIN, *(Config(name, k) for k in plan.lengths)]
            configs.append(Config(name, plan.most, adaptive=True))
            for clients in plan.clients:
                progress(f"{name}, {clients} clients, simulated acceptance {level:g}")
                fresh = Runner(engine, plan.most)  # has new controllers
                some = texts[: max(plan.prompts, clients)]
                rounds = plan.steps * clients // (len(some) * plan.new_tokens)
                sizes = Sizes(plan.new_tokens, max(plan.rounds, rounds), clients)
                for batch in plan.learning * ways.batches(some, clients):
                    fresh.run(batch, configs[-1], plan.new_tokens, clients)
                found[name, clients, level] = ways.measure(fresh, configs, some, sizes)
    return found


@dataclass(frozen=True, slots=True)
class Row:
    """How adaptive drafts did: other ways' total time over theirs, round by round."""

    model: str
    drafter: str
    clients: int
    acceptance: float
    tokens_per_pass: float
    over_plain: Summary
    again: Summary
    best: str
    over_best: Summary

    @property
    def cells(self) -> dict[str, str]:
        """Its cells by column of the table."""
        return {
            "model": self.model,
            "drafter": self.drafter,
            "clients": str(self.clients),
            "acceptance": f"{self.acceptance:g}",
            "tok/pass": f"{self.tokens_per_pass:.2f}",
            "over plain": self.over_plain.spread(),
            "plain again": self.again.spread(),
            "best": self.best,
            "over best": self.over_best.spread(),
        }

    @classmethod
    def of(cls, model: str, cell: Cell, measured: Measured, rounds: int) -> Row:
        """Compare with plain decoding, and with the best way in hindsight.

        Args:
            model: title of the model.
            cell: the drafter, the number of clients, and the acceptance.
            measured: results of all ways.
            rounds: number of rounds in them.
        """
        seconds = {way: _by_round(measured, way, rounds) for way in measured.runs}
        (own,) = (way for way in seconds if way.adaptive)
        others = (way for way in seconds if way not in (own, _AGAIN))
        best = min(others, key=lambda way: sum(seconds[way]))
        pairs = (PLAIN, own), (PLAIN, _AGAIN), (best, own)
        plain, again, over = (
            Summary.of(ratios(seconds[way], seconds[base])) for way, base in pairs
        )
        return cls(model, *cell, measured.row(own).tokens_per_jump, plain, again, best.label, over)


def outcome(found: Mapping[str, tuple[Plan, Mapping[Cell, Measured]]], name: str = "") -> Outcome:
    """A row for each drafter, load and acceptance; the worst rows are compared with the targets.

    Args:
        found: by model, its plan and its results.
        name: name of the results; empty: the benchmark's.
    """
    rows = [
        Row.of(model, cell, measured, plan.rounds)
        for model, (plan, cells) in found.items()
        for cell, measured in cells.items()
    ]
    worst = min(row.over_plain.median for row in rows), min(row.over_best.median for row in rows)
    again = [row.again.median for row in rows]
    sizes = [
        f"{model}: {plan.new_tokens} new tokens, at least {plan.rounds} rounds after "
        f"{plan.learning} in which adaptive drafts learn, lengths "
        f"{', '.join(map(str, plan.lengths))}"
        for model, (plan, _) in found.items()
    ]
    how = (
        f"greedy; {kernel()} kernels; prompts come from the prefix cache; total times of rounds, "
        "ways in turns: median and quartiles; best: over all rounds, of plain decoding and every "
        "length"
    )
    differ = (
        "plain again: the same for plain decoding's second turn, which differs only by chance: "
        f"{min(again):.3f} to {max(again):.3f}"
    )
    title = "Adaptive drafts, plain decoding and the best fixed length"
    table = Table.of(title, [row.cells for row in rows], (how, differ, *sizes, _SIMULATED))
    targets = [
        Target("the worst row over plain decoding", _OF_PLAIN, worst[0]),
        Target("the worst row over the best fixed length", _OF_BEST, worst[1]),
    ]
    plans = {model: asdict(plan) for model, (plan, _) in found.items()}
    result = {"plans": plans, "rows": [*map(asdict, rows)]}
    return Outcome(result, [table], targets=targets, name=name)


def _by_round(measured: Measured, way: Config, rounds: int) -> list[float]:
    """The total seconds of each round."""
    seconds = [batch.seconds for batch in measured.runs[way]]
    each = len(seconds) // rounds
    return [sum(seconds[place : place + each]) for place in range(0, len(seconds), each)]
