"""Published shapes at full size: conversion, service under 4 GB, and the time of one token.

Weights are random, because none of the three depends on their values. The converter runs under a
memory cap, because its resident memory alone would say little: it contains pages of the mapped
checkpoint until the kernel needs them for something else. A pass over one token waits for its
weights, so its time per byte is compared with that of TinyLlama's shape. Both models are loaded at
once and alternate.
"""

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.memory.capped import GB, PUBLISHED, WEIGHTS, Case, Load, Record, measure, peaks
from bench.memory.cgroup import cgroup
from bench.models import TINYLLAMA, chosen, shape, shape_folder
from bench.tools.quiet import Case as Timed
from bench.tools.quiet import Turns
from bench.tools.report import Outcome, Summary, Table, Target, progress, ratios
from bench.tools.worker import Worker
from specops.engine.engine import NO_DRAFTER

CAP_GB = 4.0
_CONVERTER_BYTES = 2 * GB  # without swap
_PEAK = "converter-peak"  # a file in the folder of an export
_MAX_TIME = 1.15  # time per byte, relative to TinyLlama's shape
_PER_BYTE = "time per byte ÷ TinyLlama's"
_QUANT = "int4"
_CONTEXT = 1024
_COMMAND = (sys.executable, "-m", "bench.runtime.before_worker")


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured: `rounds` of `steps` steps per side, and a load under the cap."""

    rounds: int
    steps: int
    seconds: float  # of load


FULL = Plan(rounds=15, steps=12, seconds=25.0)
QUICK = Plan(rounds=1, steps=2, seconds=2.0)


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one shape: sizes in bytes, and milliseconds per token, round by round."""

    converter: int  # peak of anonymous memory
    served: Record
    weights: int  # bytes that a token reads
    ms: list[float]
    reference_weights: int  # the same of TinyLlama's shape
    reference_ms: list[float]

    @property
    def time(self) -> Summary:
        """Time per byte, relative to TinyLlama's shape."""
        shares = ratios(self.ms, self.reference_ms)
        return Summary.of([share * self.reference_weights / self.weights for share in shares])


def run(options: argparse.Namespace, plan: Plan) -> Outcome:
    """Measure the shapes whose names contain `--only`, one after the other."""
    found = {}
    for name in chosen(PUBLISHED, options.only):
        converter = _converted(PUBLISHED[name], options.cache)
        case = Case(name, _QUANT, CAP_GB, swap=False)
        record = measure(case, Load(plan.seconds), options.cache)
        progress(f"{name}: {record.ending}, {record.tokens_per_second:.1f} tokens/s")
        ours, reference = _timed(name, options.cache, plan)
        found[name] = Found(converter, record, *ours, *reference)
    return outcome(found, plan)


def _converted(name: str, cache: Path) -> int:
    """Convert a shape under the converter's cap; return its peak of anonymous memory in bytes.

    Both are kept. An export that was made without the cap is made again.

    Raises:
        BuildError: the kernel killed the converter.
        CgroupError: this machine does not allow caps.
    """
    file = shape_folder(name, WEIGHTS[_QUANT], cache) / _PEAK
    if not file.is_file():
        shutil.rmtree(file.parent, ignore_errors=True)
        record = Record()
        with (
            cgroup(f"specops-convert-{os.getpid()}", memory=_CONVERTER_BYTES) as group,
            peaks(group, record),
        ):
            shape(name, WEIGHTS[_QUANT], cache, cap=group)
        file.write_text(str(record.peak_anonymous), encoding="ascii")
    return int(file.read_text(encoding="ascii"))


def _timed(name: str, cache: Path, plan: Plan) -> list[tuple[int, list[float]]]:
    """Bytes of weights and milliseconds of a token: the shape's, then TinyLlama's."""
    turns, step = Turns(), {"streams": 1, "draft_tokens": 0, "steps": plan.steps}
    with contextlib.ExitStack() as stack:
        workers = {}
        for side, published in {name: PUBLISHED[name], TINYLLAMA: TINYLLAMA}.items():
            workers[side] = stack.enter_context(Worker(side, _COMMAND))
            settings = {
                "target": str(shape(published, WEIGHTS[_QUANT], cache)), "draft": NO_DRAFTER,
                "cache_dir": str(cache / "caps"), "slots": 1, "context": _CONTEXT,
            }  # fmt: skip
            workers[side].ask("load", settings=settings)
        weights = [worker.ask("weight_bytes") for worker in workers.values()]
        case = Timed("1 token", lambda worker: worker.ask("steps", **step))
        turns.measure(workers, [case], plan.rounds)
    return list(zip(weights, turns.ms[case.title].values(), strict=True))


def outcome(found: Mapping[str, Found], plan: Plan) -> Outcome:
    """A row and three targets for each shape."""
    rows, targets = [], []
    for name, one in found.items():
        served = one.served
        rows.append(
            {
                "shape": name,
                "converter's anonymous MB": f"{one.converter / 1e6:,.0f}",
                f"under {CAP_GB:g} GB": served.ending[:60],
                "peak anonymous MB": f"{served.peak_anonymous / 1e6:,.0f}",
                "KV tokens": f"{served.kv_tokens:,}",
                "tokens/s": f"{served.tokens_per_second:.1f}",
                "MB a token reads": f"{one.weights / 1e6:,.0f}",
                "ms a token": Summary.of(one.ms).spread(1),
                _PER_BYTE: one.time.spread(),
            }
        )
        served_share = float(served.ending == "served")
        targets += [
            Target(
                f"{name}: converter's peak, GB", _CONVERTER_BYTES / GB, one.converter / GB, True
            ),
            Target(f"{name}: served under {CAP_GB:g} GB", 1.0, served_share),
            Target(f"{name}: {_PER_BYTE}", _MAX_TIME, one.time.median, True),
        ]
    notes = (
        f"random weights in {_QUANT}; two clients for {plan.seconds:g} s under the cap; one token "
        f"after 200: {plan.rounds} rounds of {plan.steps} steps, in turns with TinyLlama's shape, "
        "medians with quartiles, ratios round by round",
        f"the converter ran in a cgroup of {_CONVERTER_BYTES / GB:g} GB without swap; the kernel "
        "cannot drop its anonymous memory, unlike pages of checkpoint and export",
    )
    result: dict[str, Any] = {name: asdict(one) for name, one in found.items()}
    table = Table.of("Whole shapes with random weights", rows, notes)
    return Outcome({"shapes": result}, [table], targets=targets)
