"""From which acceptance on a draft model pays: its passes are real, what it says is simulated.

TinyLlama's shape is drafted by Llama 160M's, in 8 and in 4 bits. With random weights neither says
anything, so each draft token is the target's own next one with a set probability
(`simulated_drafter`). The draft model computes its passes all the same, and both models' passes
take what they take.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.models import BenchModel, Progress
from bench.prompts import Prompt
from bench.speculation.simulated_drafter import SimulatedDrafter
from bench.speculation.ways import PLAIN, Config, Row, Runner, Sizes, measure
from bench.tools.report import Chart, Outcome, Table, series, spread
from specops.runtime.batch import Batch
from specops.runtime.model_runner import ModelRunner
from specops.runtime.sampling import Floats

_DRAFTER = "draft"
_PAYS = 1.02  # times plain decoding's speed: less is not told apart from chance


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    each: int  # prompts
    sizes: Sizes
    levels: tuple[float, ...] = (0.9, 0.7, 0.6, 0.5, 0.4, 0.3, 0.0)  # of acceptance
    lengths: tuple[int, ...] = (1, 3)  # of drafts, beside adaptive ones


FULL = Plan(4, Sizes(48, rounds=2))
QUICK = Plan(2, Sizes(12), levels=(0.9, 0.0), lengths=(2,))


class ScriptedRunner:
    """A draft model that computes its passes, and then says what it is told to.

    Args:
        runner: computes.
        script: says how sequences go on; of one that it does not know the model's own logits stay.
    """

    def __init__(self, runner: ModelRunner, script: SimulatedDrafter) -> None:
        self._runner = runner
        self._script = script
        self._tokens: dict[int, list[int]] = {}  # that each slot holds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Batch) -> Floats:
        """[num_logits, V] as of `ModelRunner.forward`: all but one row's likeliest token is 0."""
        logits = self._runner.forward(batch)
        row = 0
        for span in batch.spans:
            held = self._tokens.setdefault(span.slot, [])
            held[span.start :] = span.tokens
            if span.num_logits and (draft := self._script.look_up(span.slot, held, 1)).tokens:
                logits[row] = 0
                logits[row, draft.tokens[0]] = 1
            row += span.num_logits
        return logits


Found = dict[str, dict[float, list[Row]]]  # by weights and acceptance


def run(
    models: dict[str, BenchModel], prompts: Sequence[Prompt], plan: Plan, progress: Progress
) -> Outcome:
    """Measure every level of acceptance with each of the models, which differ in their drafts."""
    found: Found = {}
    for name, model in models.items():
        longest = max(model.settings.max_k_draft, *plan.lengths)
        settings = replace(model.settings, slots=1, max_k_draft=longest, prefix_cache="off")
        runner = Runner.load(replace(model, settings=settings))
        chosen = prompts[: plan.each]
        known = [(prompt, runner.run(prompt, PLAIN, plan.sizes.new_tokens)) for prompt in chosen]
        drafter = runner.engine.scheduler.drafters[_DRAFTER]
        computes = drafter.runner  # type: ignore[attr-defined]  # a draft model's
        found[name] = {}
        for level in plan.levels:
            script = SimulatedDrafter(level, vocab_size=runner.engine.info.vocab_size)
            for prompt, plain in known:
                script.know(runner.engine.encode(prompt.text), plain.tokens)
            drafter.runner = ScriptedRunner(computes, script)  # type: ignore[attr-defined]
            anew = Runner(runner.engine, longest)  # its controllers know nothing of other levels
            ways = [Config(_DRAFTER, k) for k in plan.lengths]
            ways.append(Config(_DRAFTER, longest, adaptive=True))
            found[name][level] = measure(anew, ways, chosen, plan.sizes, progress).rows()
            progress(f"draft in {name}, simulated acceptance {level:g}")
    return outcome(next(iter(models.values())), found, plan)


def outcome(model: BenchModel, found: Found, plan: Plan) -> Outcome:
    """A line for each kind of weights and level, and from where on each kind pays."""
    lines, pays = [], []
    for name, levels in found.items():
        for level, rows in levels.items():
            drafted = [row for row in rows if row.k]
            cells = [f"{row.total_speedup:.2f}" for row in drafted if not row.adaptive]
            (own,) = [row for row in drafted if row.adaptive]
            equal = f"{sum(row.equal for row in drafted)}/{sum(row.greedy for row in drafted)}"
            jump = f"{own.tokens_per_jump:.2f}"
            lines.append((name, f"{level:g}", *cells, spread(own.speedup), jump, equal))
        least = [level for level, rows in sorted(levels.items()) if _adaptive(rows) >= _PAYS]
        pays.append((name, f"{least[0]:g}" if least else "at none of them"))
    how = (
        f"{plan.each} prompts, {plan.sizes.new_tokens} tokens each, one at a time, ways in turns, "
        f"{plan.sizes.rounds} rounds; of plain decoding's speed: sums, but adaptive by prompt",
        "simulated acceptance: each draft token is the target's own next one with this probability "
        "where those before it were; the draft model's passes are real",
    )
    columns = ("draft", "acceptance", *(f"k={k}" for k in plan.lengths), "adaptive")
    tables = [
        Table(
            f"From which acceptance on a draft model pays: {model.title}",
            ("draft", "acceptance"),
            pays,
            (f"the least of {', '.join(f'{level:g}' for level in sorted(plan.levels))} at which "
             f"adaptive drafts have {_PAYS:g} of plain decoding's speed",),
        ),
        Table("Speed over plain decoding", (*columns, "tok/jump", "equal"), lines, how),
    ]  # fmt: skip
    chart = Chart(
        "A draft model", "lines", "simulated acceptance", "times plain decoding",
        [f"{level:g}" for level in plan.levels],
        [
            series(name, [row.speedup for rows in levels.values() for row in rows if row.adaptive])
            for name, levels in found.items()
        ],
        level=1.0,
    )  # fmt: skip
    result = {
        "model": model.key,
        "simulated_acceptance": True,
        "plan": asdict(plan),
        "levels": [
            {"draft": name, "acceptance": level, "ways": [asdict(row) for row in rows]}
            for name, levels in found.items()
            for level, rows in levels.items()
        ],
    }
    return Outcome(result, tables, [chart])


def _adaptive(rows: Sequence[Row]) -> float:
    (own,) = [row for row in rows if row.adaptive]
    return own.speedup.median
