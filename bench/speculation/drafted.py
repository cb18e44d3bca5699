"""From which acceptance on a draft model pays: its passes are real, what it says is simulated.

TinyLlama's shape is drafted by Llama 160M's, in 8 and in 4 bits. With random weights neither says
anything, so each draft token is the target's own next one with a set probability
(`simulated_drafter`). The draft model computes its passes all the same, and both models' passes
take what they take. What its bits cost a draft that says something is measured on the demo pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from bench.models import BenchModel, Progress
from bench.prompts import Prompt
from bench.speculation import ways
from bench.speculation.simulated import SIMULATED
from bench.speculation.simulated_drafter import SimulatedDrafter, continuations
from bench.speculation.ways import Config, Measured, Runner, Sizes
from bench.tools.report import Chart, Outcome, Table, series
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
    own: int = 32  # prompts for the demo pair


FULL = Plan(4, Sizes(48, rounds=2))
QUICK = Plan(2, Sizes(12), levels=(0.9, 0.0), lengths=(2,), own=2)


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


Levels = dict[float, Measured]  # by acceptance


def run(
    models: Mapping[str, BenchModel],
    pairs: Mapping[str, BenchModel],
    prompts: Sequence[Prompt],
    plan: Plan,
    progress: Progress,
) -> Outcome:
    """Measure every level of acceptance with each of the models, which differ in their drafts, and
    what the drafts of the pairs, which differ in theirs, really say.
    """
    found: dict[str, Levels] = {}
    for name, model in models.items():
        longest = max(model.settings.max_k_draft, *plan.lengths)
        settings = replace(model.settings, slots=1, max_k_draft=longest, prefix_cache="off")
        runner = Runner.load(replace(model, settings=settings))
        chosen = prompts[: plan.each]
        known = continuations(runner, chosen, plan.sizes.new_tokens)
        drafter: Any = runner.engine.scheduler.drafters[_DRAFTER]  # a draft model's
        computes = drafter.runner
        configs = [Config(_DRAFTER, k) for k in plan.lengths]
        configs.append(Config(_DRAFTER, longest, adaptive=True))
        found[name] = {}
        for level in plan.levels:
            progress(f"draft in {name}, simulated acceptance {level:g}")
            vocab = runner.engine.info.vocab_size
            drafter.runner = ScriptedRunner(
                computes, SimulatedDrafter(level, known, vocab_size=vocab)
            )
            anew = Runner(runner.engine, longest)  # its controllers know nothing of other levels
            found[name][level] = ways.measure(anew, configs, chosen, plan.sizes, progress)
    real = {}
    for name, model in pairs.items():
        progress(f"{model.title}, draft in {name}")
        runner = Runner.load(replace(model, settings=replace(model.settings, slots=1)))
        real[name] = ways.measure(
            runner, [Config(_DRAFTER, 1)], prompts[: plan.own], plan.sizes, progress
        )
    return outcome(next(iter(models.values())), found, real, plan)


def outcome(
    model: BenchModel, found: Mapping[str, Levels], real: Mapping[str, Measured], plan: Plan
) -> Outcome:
    """A line for each kind of weights and level, from where on each kind pays, and what it says."""
    parts, pays, lines = {}, [], []
    for name, levels in found.items():
        speeds = {level: item.over(_adaptive(item)) for level, item in levels.items()}
        paying = [level for level, speed in speeds.items() if speed.median >= _PAYS]
        pays.append((name, f"{min(paying):g}" if paying else "at none of them"))
        lines.append(series(name, list(speeds.values())))
        parts |= {f"{name}, {level:g}": measured for level, measured in levels.items()}
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
            f"{plan.each} prompts, {plan.sizes.new_tokens} tokens each, one at a time, "
            f"{plan.sizes.rounds} rounds; the draft model's passes are real",
            SIMULATED,
        ),
        ways.rows_table(
            "What its bits cost a draft model that says something",
            "draft",
            real,
            f"{plan.own} prompts, {plan.sizes.new_tokens} tokens each, one at a time, greedy",
        ),
    ]  # fmt: skip
    places = [f"{level:g}" for level in plan.levels]
    across, up = "simulated acceptance", "times plain decoding"
    chart = Chart("A draft model", "lines", across, up, places, lines, level=1.0)
    result = {"model": model.key, "simulated_acceptance": True, "plan": asdict(plan)}
    rows = {"levels": ways.record(parts), "pairs": ways.record(real)}
    return Outcome(result | rows, tables, [chart])


def _adaptive(measured: Measured) -> Config:
    (own,) = [way for way in measured.runs if way.adaptive]
    return own
