"""What speculation would gain at set levels of acceptance, at a size that people use.

Trained weights of 1.1 billion parameters are not at hand, so their acceptance is simulated
(`simulated_drafter`); the costs of passes are real. Every table says so.

Adaptive draft lengths are compared with fixed ones, with one request and with several at once.
Prompts come from the prefix cache, so that only decoding is timed. What passes cost bounds what any
lengths can bring; a table says how much that is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace

from bench.models import BenchModel
from bench.prompts import Prompt
from bench.speculation import ways
from bench.speculation.simulated_drafter import SimulatedDrafter, continuations
from bench.speculation.ways import Config, Measured, Runner, Sizes
from bench.tools.report import Outcome, Table, progress
from specops.runtime.cost_model import CostModel
from specops.speculation.drafters.base import Chain

_SIMULATED = (
    "simulated acceptance: each draft token is the target's own next one with this probability "
    "if those before it were; what passes cost is real"
)
_OF_BEST, _NO_LOSS = 0.95, 0.97
# Of plain decoding, by requests at once and simulated acceptance; elsewhere `_NO_LOSS`.
_OF_PLAIN = {(4, 0.9): 1.35, (8, 0.9): 1.2, (4, 0.7): 1.15}


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


def run(model: BenchModel, prompts: Sequence[Prompt], plan: Plan) -> Outcome:
    """Measure all levels of acceptance under every load."""
    changed = {"slots": max(plan.rounds), "prefix_cache": "all", "max_k_draft": plan.longest}
    runner = Runner.load(replace(model, settings=replace(model.settings, **changed)))
    engine, name = runner.engine, SimulatedDrafter.name
    chosen = prompts[: plan.each]
    before = statistics.mean(len(engine.encode(prompt.text)) for prompt in chosen)
    position = before + plan.new_tokens / 2
    known = continuations(runner, chosen, plan.new_tokens)
    found = {}
    for load, rounds in plan.rounds.items():
        configs = [Config(name, k) for k in (plan.lengths if load == 1 else plan.shared_lengths)]
        configs.append(Config(name, plan.longest, adaptive=True))
        sizes = Sizes(plan.new_tokens, rounds, load)
        for level in plan.levels:
            progress(f"{load} at once, simulated acceptance {level:g}")
            script = SimulatedDrafter(level, known, vocab_size=engine.info.vocab_size)
            engine.scheduler.drafters[name] = Chain((script,))
            anew = Runner(engine, plan.longest)  # its controllers have learned at no other level
            measured = ways.measure(anew, configs, chosen, sizes)
            costs = engine.scheduler.cost_model
            found[load, level] = measured, Ceiling.of(costs, load, level, plan.longest, position)
    return outcome(model, found, plan)


def outcome(
    model: BenchModel,
    found: Mapping[tuple[int, float], tuple[Measured, Ceiling]],
    plan: Plan,
) -> Outcome:
    """The tables and the targets, from what was found by load and acceptance."""
    parts, ceilings, targets = {}, {}, []
    own = Config(SimulatedDrafter.name, plan.longest, adaptive=True)
    for (load, level), (measured, ceiling) in found.items():
        where = f"{load} at once, acceptance {level:g}"
        parts[where], ceilings[where] = measured, ceiling
        of_plain = _OF_PLAIN.get((load, level), _NO_LOSS)
        targets += ways.judged(where, measured, own, of_plain=of_plain, of_best=_OF_BEST)
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
    return Outcome(result, [table, bounds], targets=targets)
