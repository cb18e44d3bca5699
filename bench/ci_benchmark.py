"""The speed gate: adaptive speculation may not lose. `python -m bench.ci_benchmark`

Runs the model that the service would serve (the demo pair) with plain decoding and with adaptive
speculation in turns, prompt by prompt. The gate fails if passes yield fewer tokens than
`--min-tokens-per-jump`, or if adaptive speculation is slower than plain decoding by more than
`--max-loss` on some kind of text. Then come four concurrent requests for code, in turns as well:
adaptive speculation must reach `--min-gain-at-once` of plain decoding's speed. The whole run takes
under two minutes.

Other processes disturb single measurements. So the gate judges the median of the ratios of
neighbouring runs, or the ratio of the total times if that is larger: on creative text most prompts
lose a little and a few gain much (0.96 and 1.00 on a Zen 3). While a kind of text is below the
limit, more rounds of it are measured, up to 48, and all rounds count. The first round
with either ratio above the limit ends the measurement. So a loss just beyond the limit may pass; a
loss twice as large will not. A machine that disturbs one side throughout fails correct code: run
the gate again on a quiet one.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from bench.models import configured
from bench.prompts import CATEGORIES, CODE, by_category
from bench.speculation import ways
from bench.speculation.ways import PLAIN, Measured, Row, Runner, Sizes
from bench.tools.machine import describe
from bench.tools.report import Table, yes

ROUNDS = 4  # per measurement
# In a noisy hour, single ratios of one prompt are between 0.8 and 1.2. The median of 16 rounds, 96
# ratios, then has a standard error of 0.025, almost the whole allowed loss; 48 rounds have 0.015.
_MAX_ROUNDS = 12 * ROUNDS
_PROMPTS, _NEW_TOKENS = 6, 96  # per kind of text
AT_ONCE = 4  # clients in the last part
_SHARED_PROMPTS = 8  # prompts of the last part
_FAILED = 1


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the gate: a kind of text, the number of concurrent requests, and the limits."""

    name: str
    category: str
    prompts: int
    at_once: int
    tokens_per_jump: float
    speed: float  # relative to plain decoding

    def complaints(self, row: Row) -> list[str]:
        """The limits that a result misses, in words."""
        found = []
        if row.tokens_per_jump < self.tokens_per_jump:
            found.append(
                f"{self.name}: {row.tokens_per_jump:.2f} tokens per pass, less than "
                f"{self.tokens_per_jump:.2f}"
            )
        if max(row.speedup.median, row.total_speedup) < self.speed:
            found.append(
                f"{self.name}: adaptive speculation has {row.speedup.median:.3f} of plain "
                f"decoding's speed, and {row.total_speedup:.3f} in total, less than "
                f"{self.speed:.2f}"
            )
        return found


@dataclass(frozen=True, slots=True)
class Verdict:
    """A part's figures, the number of rounds behind them, and its complaints."""

    part: Part
    row: Row
    rounds: int
    complaints: list[str]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; return 0 if all is well, else 1."""
    options = _parser().parse_args(arguments)
    per_pass, speed = options.min_tokens_per_jump, 1 - options.max_loss
    parts = [Part(text, text, _PROMPTS, 1, per_pass, speed) for text in CATEGORIES]
    name, gain = f"{CODE}, {AT_ONCE} at once", options.min_gain_at_once
    parts.append(Part(name, CODE, _SHARED_PROMPTS, AT_ONCE, 0.0, gain))
    machine, model = describe(), configured()
    slots = max(model.settings.slots, AT_ONCE)
    runner = Runner.load(replace(model, settings=replace(model.settings, slots=slots)))
    verdicts = [decide(part, lambda p=part: rounds_of(p, runner)) for part in parts]
    print(machine.line)
    print(table(verdicts).text())
    complaints = [complaint for verdict in verdicts for complaint in verdict.complaints]
    for complaint in complaints:
        print(f"FAILED: {complaint}", file=sys.stderr)
    return _FAILED if complaints else 0


def rounds_of(part: Part, runner: Runner) -> Measured:
    """Measure `ROUNDS` rounds, plain and adaptive in turns."""
    prompts = by_category(part.prompts, (part.category,))
    sizes = Sizes(_NEW_TOKENS, ROUNDS, part.at_once)
    return ways.measure(runner, [runner.own], prompts, sizes)


def decide(part: Part, measure: Callable[[], Measured], most_rounds: int = _MAX_ROUNDS) -> Verdict:
    """Measure until there is no complaint or `most_rounds` are done; judge all rounds together.

    `measure` runs `ROUNDS` more rounds; it is called at least once.
    """
    found, rounds = measure(), ROUNDS
    (adaptive,) = [way for way in found.runs if way != PLAIN]
    while True:
        row = found.row(adaptive)
        complaints = part.complaints(row)
        if not complaints or rounds + ROUNDS > most_rounds:
            return Verdict(part, row, rounds, complaints)
        found.add(measure())
        rounds += ROUNDS


def table(verdicts: Sequence[Verdict]) -> Table:
    """A row per part."""
    rows = [
        {
            "text": item.part.name,
            **item.row.cells,
            "rounds": str(item.rounds),
            "fine": yes(not item.complaints),
        }
        for item in verdicts
    ]
    exactly = ", ".join(f"{item.part.name} {item.row.speedup.spread(3)}" for item in verdicts)
    lines = [
        f"{item.part.name} {item.part.tokens_per_jump:.2f} and {item.part.speed:.2f}"
        for item in verdicts
    ]
    notes = (
        f"{_PROMPTS} prompts of each kind, {_NEW_TOKENS} new tokens, plain and adaptive in turns; "
        f"speedup: {exactly}",
        "targets, tokens per pass and of plain decoding's speed (median or total): "
        f"{', '.join(lines)}",
    )
    return Table.of(f"Quality gate: {verdicts[0].row.label}", rows, notes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--min-tokens-per-jump", type=float, default=1.0)
    parser.add_argument(
        "--max-loss", type=float, default=0.03, help="share of plain decoding's speed"
    )
    parser.add_argument(
        "--min-gain-at-once",
        type=float,
        default=0.97,
        help=f"share of plain decoding's speed with {AT_ONCE} clients that ask for code",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
