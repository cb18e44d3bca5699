"""The quality gate: adaptive speculation may not lose. `python scripts/ci_benchmark.py`

Runs the model that the service would serve (the demo pair) with plain decoding and with adaptive
speculation in turns, prompt by prompt, and fails where a pass brings less than
`--min-tokens-per-jump`, or where on some kind of text adaptive speculation is slower than plain
decoding by more than `--max-loss`. Then four requests for code at once, in turns as well: adaptive
speculation must have at least `--min-gain-at-once` of plain decoding's speed. Takes under two
minutes.

Other processes disturb single measurements, so what is judged is the median of the ratios of
neighbouring runs. While a kind of text is below the line, more rounds are measured, up to
`--most-rounds`; all rounds count, none is thrown away. So a loss just beyond the line may get
through, since the first round in which the median is above it ends the measurement; a loss twice as
large will not; and a machine that disturbs one side throughout fails honest code: run it again on a
quiet one.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from bench.models import BenchModel, configured
from bench.prompts import CODE, Prompt, by_category
from bench.speculation import ways
from bench.speculation.batches import run_batch
from bench.speculation.ways import COLUMNS, PLAIN, Config, Measured, Row, Runner, Sizes
from bench.tools.machine import describe
from bench.tools.report import Table, spread, yes
from bench.tools.stats import Summary, rotated

ROUNDS = 4  # before the first look
_PROMPTS, _NEW_TOKENS = 6, 96  # of each kind of text
AT_ONCE = 4  # requests of the second part
_BATCHES = 2  # of so many requests, a round
_FAILED = 1


@dataclass(frozen=True, slots=True)
class Limits:
    """Below which the gate is closed."""

    tokens_per_jump: float
    loss: float  # share of plain decoding's speed
    gain_at_once: float = 1.0  # of plain decoding's speed, with several requests for code


@dataclass(frozen=True, slots=True)
class Verdict:
    """One kind of text: its figures, and what is wrong with them."""

    category: str
    row: Row
    complaints: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and judge; 0 where all is well, 1 where it is not."""
    options = _parser().parse_args(arguments)
    limits = Limits(options.min_tokens_per_jump, options.max_loss, options.min_gain_at_once)
    machine, model = describe(), configured()
    runner = Runner.load(_with_slots(model))
    info = runner.engine.info
    adaptive = Config(info.default_drafter, model.settings.max_k_draft, adaptive=True)
    prompts = by_category(_PROMPTS)

    def more() -> Measured:
        plan = Sizes(_NEW_TOKENS, ROUNDS)
        return ways.measure(runner, [adaptive], prompts, plan, _progress)

    verdicts, rounds = decide(more, limits, options.most_rounds)
    at_once = by_category(_BATCHES * AT_ONCE, (CODE,))

    def more_at_once() -> list[float]:
        return gains_at_once(runner, adaptive, at_once)

    gain, gain_rounds = decide_at_once(more_at_once, limits, options.most_rounds)
    print(machine.line)
    print(table(verdicts, rounds, limits).text())
    print(
        f"{AT_ONCE} requests for code at once: adaptive has {spread(gain, 3)} of plain decoding's "
        f"speed, wanted are {limits.gain_at_once:.2f} ({gain_rounds} rounds)"
    )
    if options.json:
        found = result(verdicts, rounds, limits) | {"at_once": asdict(gain)}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    complaints = [complaint for verdict in verdicts for complaint in verdict.complaints]
    complaints += judge_at_once(gain, limits)
    for complaint in complaints:
        print(f"FAILED: {complaint}", file=sys.stderr)
    return _FAILED if complaints else 0


def _with_slots(model: BenchModel) -> BenchModel:
    slots = max(model.settings.slots, AT_ONCE)
    return replace(model, settings=replace(model.settings, slots=slots))


def gains_at_once(runner: Runner, adaptive: Config, prompts: Sequence[Prompt]) -> list[float]:
    """Adaptive speculation's speed over plain decoding's, batch by batch, `ROUNDS` times."""
    gains = []
    batches = [prompts[start : start + AT_ONCE] for start in range(0, len(prompts), AT_ONCE)]
    for turn in range(ROUNDS):
        for number, batch in enumerate(batches):
            rates = {
                way: run_batch(runner, way, batch, _NEW_TOKENS).rate
                for way in rotated([PLAIN, adaptive], turn + number)
            }
            gains.append(rates[adaptive] / rates[PLAIN])
    return gains


def decide_at_once(
    measure: Callable[[], list[float]], limits: Limits, most_rounds: int
) -> tuple[Summary, int]:
    """As `decide`, for the requests at once; `measure` brings the gains of `ROUNDS` rounds."""
    gains: list[float] = []
    rounds = 0
    while True:
        gains += measure()
        rounds += ROUNDS
        found = Summary.of(gains)
        if not judge_at_once(found, limits) or rounds + ROUNDS > most_rounds:
            return found, rounds


def judge_at_once(gain: Summary, limits: Limits) -> list[str]:
    """What is wrong with the gain of several requests at once."""
    if gain.median >= limits.gain_at_once:
        return []
    return [
        f"{AT_ONCE} requests for code at once: adaptive speculation has {gain.median:.3f} of plain "
        f"decoding's speed, wanted are {limits.gain_at_once:.2f}"
    ]


def decide(
    measure: Callable[[], Measured], limits: Limits, most_rounds: int
) -> tuple[list[Verdict], int]:
    """Measure until nothing is wrong or `most_rounds` are done; judged is all that was measured.

    Args:
        measure: brings `ROUNDS` more rounds.
        limits: of what is right.
        most_rounds: at least one measurement is made in any case.

    Returns:
        The verdicts, and how many rounds they rest upon.
    """
    prompts: list[Prompt] = []
    runs: dict[Config, list[ways.Run]] = {}
    rounds = 0
    while True:
        found = measure()
        prompts += found.prompts
        for config, more in found.runs.items():
            runs.setdefault(config, []).extend(more)
        rounds += ROUNDS
        verdicts = judge(Measured(prompts, runs), limits)
        fine = not any(verdict.complaints for verdict in verdicts)
        if fine or rounds + ROUNDS > most_rounds:
            return verdicts, rounds


def judge(measured: Measured, limits: Limits) -> list[Verdict]:
    """One verdict per kind of text."""
    verdicts = []
    for category in dict.fromkeys(prompt.category for prompt in measured.prompts):
        (row,) = [row for row in measured.of(category).rows() if row.label != PLAIN.label]
        complaints = []
        if row.tokens_per_jump < limits.tokens_per_jump:
            complaints.append(
                f"{category}: {row.tokens_per_jump:.2f} tokens per jump, wanted are "
                f"{limits.tokens_per_jump:.2f}"
            )
        if row.speedup.median < 1 - limits.loss:
            complaints.append(
                f"{category}: adaptive speculation has {row.speedup.median:.3f} of plain "
                f"decoding's speed, wanted are {1 - limits.loss:.2f}"
            )
        verdicts.append(Verdict(category, row, tuple(complaints)))
    return verdicts


def table(verdicts: Sequence[Verdict], rounds: int, limits: Limits) -> Table:
    """A row per kind of text."""
    rows = [(item.category, *item.row.cells, yes(not item.complaints)) for item in verdicts]
    exactly = ", ".join(f"{item.category} {spread(item.row.speedup, 3)}" for item in verdicts)
    notes = (
        f"{_PROMPTS} prompts of each kind, {_NEW_TOKENS} new tokens, {rounds} rounds, plain and "
        f"adaptive in turns; speedup: {exactly}",
        f"wanted: {limits.tokens_per_jump:.2f} tokens per jump, {1 - limits.loss:.2f} of plain "
        "decoding's speed (median)",
    )
    label = verdicts[0].row.label if verdicts else ""
    return Table(f"Quality gate: {label}", ("text", *COLUMNS, "fine"), rows, notes)


def result(verdicts: Sequence[Verdict], rounds: int, limits: Limits) -> dict[str, Any]:
    """All of it, fit for JSON."""
    return {
        "rounds": rounds,
        "limits": asdict(limits),
        "fine": not any(item.complaints for item in verdicts),
        "categories": {item.category: asdict(item.row) for item in verdicts},
    }


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
        help=f"of plain decoding's speed, {AT_ONCE} requests for code at once",
    )
    parser.add_argument(
        "--most-rounds", type=int, default=4 * ROUNDS, help="before a loss is believed"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser


def _progress(text: str) -> None:
    print(f"gate: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
