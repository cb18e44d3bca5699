"""What speculation gains on ordinary chat: 200 questions in eight kinds and five languages.

The questions are this project's own (`bench/chat_prompts.json`). Every third of them, from the
first on, is for choosing thresholds; the others are held out, and only they are measured unless
those are asked for. Answers end where the model ends them. No run draws on what an earlier one
said.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.models import BenchModel, Progress
from bench.prompts import Prompt
from bench.speculation.batches import HOW, Batch, in_batches, run_batch
from bench.speculation.ways import (
    COLUMNS,
    PLAIN,
    Config,
    Measured,
    Row,
    Runner,
    Sizes,
    measure,
    sources_table,
)
from bench.tools.report import Outcome, Table, Wanted, spread, wanted_table, yes
from bench.tools.stats import Summary, ratios, rotated
from specops.config import ConfigError

PROMPTS = Path(__file__).resolve().parents[1] / "chat_prompts.json"
AT_ONCE = 4
_CHOOSING = 3  # every so many questions one is for choosing thresholds
_MEDIAN, _SUM, _ANYWHERE, _SUM_AT_ONCE = 1.35, 1.4, 0.97, 1.15  # of plain decoding's speed


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `each` questions of every kind at most, of those that are held out."""

    each: int
    sizes: Sizes


FULL = Plan(25, Sizes(new_tokens=200))
QUICK = Plan(4, Sizes(new_tokens=48))


def questions(*, choosing: bool) -> list[tuple[str, str]]:
    """Kind and text of the questions that are held out, or of those for choosing thresholds."""
    table = json.loads(PROMPTS.read_text("utf-8"))
    found = [
        (kind, text)
        for kind, languages in table.items()
        for texts in languages.values()
        for text in texts
    ]
    return [item for place, item in enumerate(found) if (place % _CHOOSING == 0) is choosing]


def run(model: BenchModel, plan: Plan, progress: Progress, *, choosing: bool = False) -> Outcome:
    """Ask one by one and `AT_ONCE` at a time, plainly and adaptively in turns.

    Raises:
        ConfigError: the model is none to chat with.
    """
    runner = Runner.load(model, chat=True)
    if not runner.engine.info.chat:
        raise ConfigError(f"{model.title} has no chat template: SPECOPS_MODEL=smollm2 has one")
    asked = questions(choosing=choosing)
    prompts = [
        Prompt(kind, text)
        for kind in dict.fromkeys(kind for kind, _ in asked)
        for text in [text for other, text in asked if other == kind][: plan.each]
    ]
    own = Config(runner.engine.info.default_drafter, model.settings.max_k_draft, adaptive=True)
    measured = measure(runner, [own], prompts, plan.sizes, progress)
    batches: dict[Config, list[Batch]] = {PLAIN: [], own: []}
    for number, batch in enumerate(in_batches(prompts, AT_ONCE)):
        for config in rotated(list(batches), number):
            batches[config].append(run_batch(runner, config, batch, plan.sizes.new_tokens))
    progress(f"{AT_ONCE} at once")
    which = "for choosing" if choosing else "held out"
    return outcome(model, measured, batches, plan.sizes, which)


def outcome(
    model: BenchModel,
    measured: Measured,
    batches: dict[Config, list[Batch]],
    sizes: Sizes,
    which: str,
) -> Outcome:
    """A row per kind and one over all, and what several at once come to."""
    own = next(config for config in measured.runs if config != PLAIN)
    kinds = list(dict.fromkeys(prompt.category for prompt in measured.prompts))
    rows = {kind: _own(measured.of(kind)) for kind in kinds}
    whole = rows["all"] = _own(measured)
    sound = all(row.equal == row.greedy for row in rows.values())
    table = Table(
        f"Chat, one client: {model.title}, {own.label}",
        ("kind", *COLUMNS),
        [(kind, *row.cells) for kind, row in rows.items()],
        (
            f"{len(measured.prompts)} questions ({which}) of {PROMPTS.name} in five languages, up "
            f"to {sizes.new_tokens} tokens, greedy, plain and adaptive in turns",
            f"every output that of plain decoding: {yes(sound)}",
        ),
    )
    pairs = batches[own], batches[PLAIN]
    gains = Summary.of(ratios(*([batch.rate for batch in side] for side in pairs)))
    rates = [sum(b.tokens for b in side) / sum(b.decode_seconds for b in side) for side in pairs]
    jump = sum(b.tokens for b in pairs[0]) / sum(b.steps for b in pairs[0])
    at_once = rates[0] / rates[1]
    together = Table(
        f"Chat, {AT_ONCE} clients",
        ("batches", "tok/jump", "tok/s", "speedup", "total"),
        [(str(len(pairs[0])), f"{jump:.2f}", f"{rates[0]:.1f}", spread(gains), f"{at_once:.2f}")],
        (HOW,),
    )
    wanted = [
        Wanted("one client: median speed over plain", _MEDIAN, whole.speedup.median),
        Wanted("one client: sum over plain", _SUM, whole.total_speedup),
        *(Wanted(f"{kind}: sum over plain", _ANYWHERE, rows[kind].total_speedup) for kind in kinds),
        Wanted(f"{AT_ONCE} clients: sum over plain", _SUM_AT_ONCE, at_once),
    ]
    result = {
        "model": model.key,
        "questions": which,
        **asdict(sizes),
        "lossless": sound,
        "kinds": {kind: asdict(row) for kind, row in rows.items()},
        "at_once": {"clients": AT_ONCE, "tokens_per_jump": jump, "total_speedup": at_once}
        | {"speedup": asdict(gains)},
        "wanted": [asdict(line) for line in wanted],
    }
    judged = wanted_table(f"Wanted of {own.label}, the default", wanted)
    return Outcome(result, [table, sources_table(whole), together, judged], sound=sound)


def _own(measured: Measured) -> Row:
    (row,) = [row for row in measured.rows() if row.label != PLAIN.label]
    return row
