"""What speculation would gain at set levels of acceptance, at a size that people use.

Trained weights of 1.1 billion parameters are not at hand, so their acceptance is simulated
(`simulated_drafter`); the costs of passes are real. Every table says so.

`simulated` compares adaptive with fixed draft lengths, with one request and with several at once.
Prompts come from the prefix cache, so that only decoding is timed. What passes cost bounds what any
lengths can bring; a table says how much that is.

`drafted` shows from which acceptance on a draft model pays: TinyLlama's shape is drafted by Llama
160M's, in 8 and in 4 bits. The draft model computes its passes, but proposes what the simulation
says. What fewer bits cost a draft model in acceptance is measured on the demo pair.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation import ways
from bench.speculation.simulated_drafter import ScriptedRunner, SimulatedDrafter, continuations
from bench.speculation.ways import Config, Measured, Runner, Sizes
from bench.tools.report import Outcome, Table, progress
from specops.runtime.cost_model import CostModel

_SIMULATED = (
    "simulated acceptance: each draft token is the target's own next one with this probability "
    "if those before it were; what passes cost is real"
)
_OF_BEST, _NO_LOSS = 0.95, 0.97
# Of plain decoding, by requests at once and simulated acceptance; elsewhere `_NO_LOSS`.
_OF_PLAIN = {(4, 0.9): 1.35, (8, 0.9): 1.2, (4, 0.7): 1.15}
_DRAFT = "draft"
_PAYS = 1.02  # times plain decoding's speed: a smaller gain may be chance

Levels = dict[float, Measured]  # by acceptance


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The most that draft lengths can bring at what passes cost at the end of a measurement.

    It tries every width by itself: the controller, whose choices it judges, has no part in it.

    Attributes:
        plain: seconds of a pass with a token of each request.
        twice: seconds of a pass with two tokens of each.
        tokens: number of tokens in the best pass.
        speedup: of the best pass over plain decoding.
    """

    plain: float
    twice: float
    tokens: int
    speedup: float

    @classmethod
    def of(
        cls, costs: CostModel, requests: int, acceptance: float, longest: int, position: float
    ) -> Ceiling:
        """The ceiling if all draft tokens are accepted alike, and nothing but passes takes time.

        Args:
            costs: of the target's passes.
            requests: number of requests at once.
            acceptance: probability of each draft token, if those before it are right.
            longest: most draft tokens of a request and step.
            position: mean number of tokens that a token looks back at.
        """

        def cost(tokens: int) -> float:
            return costs.cost(tokens, tokens * position)

        plain, expected = requests / cost(requests), float(requests)
        best, speedup = requests, 1.0
        for place in range(requests * longest):  # all first draft tokens, then all second ones, …
            expected += acceptance ** (1 + place // requests)
            tokens = requests + place + 1
            if (found := expected / cost(tokens) / plain) > speedup:
                best, speedup = tokens, found
        return cls(cost(requests), cost(2 * requests), best, speedup)


@dataclass(frozen=True, slots=True)
class Plan:
    """How much `simulated` measures."""

    each: int  # prompts, at least as many as requests at once
    new_tokens: int
    rounds: Mapping[int, int]  # on all prompts, by requests at once
    levels: Sequence[float] = (0.9, 0.7, 0.5, 0.3, 0.0)  # of simulated acceptance
    lengths: Sequence[int] = (1, 2, 4, 8)  # of drafts, for one request
    shared_lengths: Sequence[int] = (1, 3)  # of drafts, for several requests at once

    @property
    def longest(self) -> int:
        """Most draft tokens of a request and step."""
        return max(*self.lengths, *self.shared_lengths)


FULL = Plan(8, 64, rounds={1: 2, 4: 8, 8: 12})
QUICK = Plan(2, 16, rounds={1: 1, 2: 1}, levels=(0.9, 0.0), lengths=(1, 3))


@dataclass(frozen=True, slots=True)
class DraftedPlan:
    """How much `drafted` measures."""

    each: int  # prompts
    sizes: Sizes
    levels: Sequence[float] = (0.9, 0.7, 0.6, 0.5, 0.4, 0.3, 0.0)  # of simulated acceptance
    lengths: Sequence[int] = (1, 3)  # of drafts, beside adaptive ones
    own: int = 32  # prompts for the demo pair


DRAFTED = DraftedPlan(4, Sizes(48, rounds=2))
DRAFTED_QUICK = DraftedPlan(2, Sizes(12), levels=(0.9, 0.0), lengths=(2,), own=2)


def _at_levels(
    runner: Runner,
    configs: Sequence[Config],
    prompts: Sequence[Prompt],
    sizes: Sizes,
    *,
    levels: Sequence[float],
    use: Callable[[SimulatedDrafter], None],
) -> Iterator[tuple[float, Measured]]:
    """Measure at each acceptance; `use` makes the engine draft as the simulation says."""
    engine = runner.engine
    known = continuations(runner, prompts, sizes.new_tokens)
    for level in levels:
        progress(f"{sizes.at_once} at once, simulated acceptance {level:g}")
        use(SimulatedDrafter(level, known, vocab_size=engine.info.vocab_size))
        anew = Runner(engine, configs[-1].k)  # its controllers have learned at no other level
        yield level, ways.measure(anew, configs, prompts, sizes)


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan) -> Outcome:
    """Measure all levels of acceptance under every load."""
    changed = {"slots": max(plan.rounds), "prefix_cache": "all", "max_k_draft": plan.longest}
    runner = Runner.load(replace(model, settings=replace(model.settings, **changed)))
    name = SimulatedDrafter.name

    def use(drafter: SimulatedDrafter) -> None:
        runner.engine.scheduler.drafters[name] = drafter

    chosen = prompts[: plan.each]
    before = statistics.mean(len(runner.engine.encode(prompt.text)) for prompt in chosen)
    position = before + plan.new_tokens / 2
    found = {}
    for load, rounds in plan.rounds.items():
        configs = [Config(name, k) for k in (plan.lengths if load == 1 else plan.shared_lengths)]
        configs.append(Config(name, plan.longest, adaptive=True))
        sizes = Sizes(plan.new_tokens, rounds, load)
        for level, measured in _at_levels(
            runner, configs, chosen, sizes, levels=plan.levels, use=use
        ):
            costs = runner.engine.scheduler.cost_model
            found[load, level] = measured, Ceiling.of(costs, load, level, plan.longest, position)
    return outcome(model, found, plan)


def outcome(
    model: BenchModel,
    found: Mapping[tuple[int, float], tuple[Measured, Ceiling]],
    plan: Plan,
) -> Outcome:
    """The tables and the targets, from what was found by load and acceptance."""
    parts, ceilings, wanted = {}, {}, []
    own = Config(SimulatedDrafter.name, plan.longest, adaptive=True)
    for (load, level), (measured, ceiling) in found.items():
        where = f"{load} at once, acceptance {level:g}"
        parts[where], ceilings[where] = measured, ceiling
        of_plain = _OF_PLAIN.get((load, level), _NO_LOSS)
        wanted += ways.judged(where, measured, own, of_plain=of_plain, of_best=_OF_BEST)
    table = ways.rows_table(
        f"Draft lengths at simulated acceptance: {model.title}",
        "requests",
        parts,
        f"{plan.each} prompts, {plan.new_tokens} new tokens each, greedy; draft tokens cost "
        "nothing to make, prompts come from the prefix cache",
        _SIMULATED,
    )
    bounds = Table(
        "The most that any lengths could bring at what passes cost",
        ("requests", "pass, ms", "of twice the tokens, ms", "best pass, tokens", "at most",
         "adaptive"),
        [(where, f"{1e3 * most.plain:.2f}", f"{1e3 * most.twice:.2f}", str(most.tokens),
          f"{most.speedup:.2f}", f"{parts[where].over(own).median:.2f}")
         for where, most in ceilings.items()],
        ("by the engine's own cost model after each measurement; the likeliest draft tokens first, "
         "no time for anything but passes",),
    )  # fmt: skip
    result = {"model": model.key, "simulated_acceptance": True, "plan": asdict(plan)}
    result["levels"] = ways.record(parts)
    result["ceilings"] = {where: asdict(most) for where, most in ceilings.items()}
    return Outcome(result, [table, bounds], wanted=wanted)


def run_drafted(
    models: Mapping[str, BenchModel],
    pairs: Mapping[str, BenchModel],
    prompts: Sequence[Prompt],
    plan: DraftedPlan,
) -> Outcome:
    """Measure every level of acceptance, and what draft models of fewer bits really propose.

    Args:
        models: by the kind of the draft model's weights, models for simulated acceptance.
        pairs: by the kind of the draft model's weights, trained models.
        prompts: for both.
        plan: how much is measured.
    """
    found, real = {}, {}
    for name, model in models.items():
        longest = max(model.settings.max_k_draft, *plan.lengths)
        settings = replace(model.settings, slots=1, max_k_draft=longest, prefix_cache="off")
        runner = Runner.load(replace(model, settings=settings))
        drafter: Any = runner.engine.scheduler.drafters[_DRAFT]
        computes = drafter.runner

        def use(script: SimulatedDrafter, drafter: Any = drafter, computes: Any = computes) -> None:
            drafter.runner = ScriptedRunner(computes, script)

        progress(f"draft in {name}")
        configs = [Config(_DRAFT, k) for k in plan.lengths]
        configs.append(Config(_DRAFT, longest, adaptive=True))
        chosen = prompts[: plan.each]
        found[name] = dict(
            _at_levels(runner, configs, chosen, plan.sizes, levels=plan.levels, use=use)
        )
    for name, model in pairs.items():
        progress(f"{model.title}, draft in {name}")
        runner = Runner.load(replace(model, settings=replace(model.settings, slots=1)))
        chosen = prompts[: plan.own]
        real[name] = ways.measure(runner, [Config(_DRAFT, 1)], chosen, plan.sizes)
    return _drafted_outcome(next(iter(models.values())), found, real, plan)


def _drafted_outcome(
    model: BenchModel, found: Mapping[str, Levels], real: Mapping[str, Measured], plan: DraftedPlan
) -> Outcome:
    parts, pays = {}, []
    for name, levels in found.items():
        *_, adaptive = next(iter(levels.values())).runs
        speeds = {level: measured.over(adaptive) for level, measured in levels.items()}
        paying = [level for level, speed in speeds.items() if speed.median >= _PAYS]
        pays.append((name, f"{min(paying):g}" if paying else "at none of them"))
        parts |= {f"{name}, {level:g}": measured for level, measured in levels.items()}
    each = f"{plan.sizes.new_tokens} tokens each, one at a time"
    tables = [
        Table(
            f"From which acceptance on a draft model pays: {model.title}",
            ("draft", "acceptance"),
            pays,
            (f"the least of {', '.join(f'{level:g}' for level in sorted(plan.levels))} at which "
             f"adaptive drafts have {_PAYS:g} of plain decoding's speed",),
        ),
        ways.rows_table(
            f"Draft models at simulated acceptance: {model.title}",
            "draft, acceptance",
            parts,
            f"{plan.each} prompts, {each}, {plan.sizes.rounds} rounds; the draft model's passes "
            "are real",
            _SIMULATED,
        ),
        ways.rows_table(
            "What its bits cost a trained draft model",
            "draft",
            real,
            f"{plan.own} prompts, {each}, greedy",
        ),
    ]  # fmt: skip
    result = {"model": model.key, "simulated_acceptance": True, "plan": asdict(plan)}
    rows = {"levels": ways.record(parts), "pairs": ways.record(real)}
    return Outcome(result | rows, tables)
