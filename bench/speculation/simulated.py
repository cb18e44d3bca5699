"""Adaptive against fixed draft lengths at set levels of acceptance, at a size that people use.

Weights of 1.1 B parameters that say something are not at hand, so their acceptance is simulated
(`simulated_drafter`); what passes cost is real. Every table says so. With one request and with
several at once; prompts come from the prefix cache, so that what is timed is decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from bench.models import BenchModel, Progress
from bench.prompts import Prompt
from bench.speculation import ways
from bench.speculation.simulated_drafter import SimulatedDrafter, continuations
from bench.speculation.ways import Config, Measured, Runner, Sizes
from bench.tools.report import Outcome

SIMULATED = (
    "simulated acceptance: each draft token is the target's own next one with this probability "
    "where those before it were; what passes cost is real"
)
_OF_BEST, _NO_LOSS = 0.95, 0.97
# Of plain decoding, by requests at once and simulated acceptance; elsewhere nothing may be lost.
_OF_PLAIN = {(4, 0.9): 1.35, (8, 0.9): 1.2, (4, 0.7): 1.15}


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    each: int  # prompts, at least as many as requests at once
    new_tokens: int
    rounds: Mapping[int, int]  # on all prompts, by requests at once
    levels: tuple[float, ...] = (0.9, 0.7, 0.5, 0.3, 0.0)  # of simulated acceptance
    lengths: tuple[int, ...] = (1, 2, 4, 8)  # of drafts, for one request
    shared_lengths: tuple[int, ...] = (1, 3)  # for several at once

    @property
    def longest(self) -> int:
        """Most draft tokens of a request and step."""
        return max(*self.lengths, *self.shared_lengths)


FULL = Plan(8, 64, rounds={1: 2, 4: 8, 8: 12})
QUICK = Plan(2, 16, rounds={1: 1, 2: 1}, levels=(0.9, 0.0), lengths=(1, 3))

Loads = dict[int, dict[float, Measured]]  # by requests at once, then by acceptance


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan, progress: Progress) -> Outcome:
    """Measure all levels of acceptance under every load."""
    changed = {"slots": max(plan.rounds), "prefix_cache": "all", "max_k_draft": plan.longest}
    runner = Runner.load(replace(model, settings=replace(model.settings, **changed)))
    engine, name = runner.engine, SimulatedDrafter.name
    chosen = prompts[: plan.each]
    known = continuations(runner, chosen, plan.new_tokens)
    found: Loads = {load: {} for load in plan.rounds}
    for load, rounds in plan.rounds.items():
        configs = [Config(name, k) for k in (plan.lengths if load == 1 else plan.shared_lengths)]
        configs.append(Config(name, plan.longest, adaptive=True))
        for level in plan.levels:
            progress(f"{load} at once, simulated acceptance {level:g}")
            vocab = engine.info.vocab_size
            engine.scheduler.drafters[name] = SimulatedDrafter(level, known, vocab_size=vocab)
            anew = Runner(engine, plan.longest)  # its controllers know nothing of other levels
            sizes = Sizes(plan.new_tokens, rounds, load)
            found[load][level] = ways.measure(anew, configs, chosen, sizes, progress)
    return outcome(model, found, plan)


def outcome(model: BenchModel, found: Loads, plan: Plan) -> Outcome:
    """The table, and a chart for each load."""
    parts, wanted, charts = {}, [], []
    own = Config(SimulatedDrafter.name, plan.longest, adaptive=True)
    for load, levels in found.items():
        for level, measured in levels.items():
            parts[where := f"{load} at once, acceptance {level:g}"] = measured
            of_plain = _OF_PLAIN.get((load, level), _NO_LOSS)
            wanted += ways.judged(where, measured, own, of_plain=of_plain, of_best=_OF_BEST)
        places = {f"{level:g}": measured for level, measured in levels.items()}
        title = f"{load} at once"
        charts.append(ways.speedups(title, "lines", "simulated acceptance", places))
    table = ways.rows_table(
        f"Draft lengths at simulated acceptance: {model.title}",
        "requests",
        parts,
        f"{plan.each} prompts, {plan.new_tokens} new tokens each, greedy; draft tokens cost "
        "nothing to make, prompts come from the prefix cache",
        SIMULATED,
    )
    result = {"model": model.key, "simulated_acceptance": True, "plan": asdict(plan)}
    return Outcome(result | {"levels": ways.record(parts)}, [table], charts, wanted)
