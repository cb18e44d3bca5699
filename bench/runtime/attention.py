"""Times attention in a pass by past and rows, with the caches of two checkouts, in turns."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from bench.runtime.before import KERNELS, OTHER, OURS, Side, checkouts
from bench.tools.quiet import Case, Turns
from bench.tools.report import Outcome, Summary, Table, progress, ratios
from specops.runtime.kernels import BLOCK_TOKENS, block_bytes
from specops.system.cpus import available_threads

SHAPES = {  # layers, heads, key-value heads, head size, context
    "SmolLM2-135M": (30, 9, 3, 64, 8192),
    "Qwen3-0.6B": (28, 16, 8, 128, 40960),
    "TinyLlama": (22, 32, 4, 64, 2048),
    "Phi-3": (32, 32, 32, 96, 4096),
    "Gemma 3 270M": (18, 4, 1, 256, 32768),
}
ROWS = {  # requests, tokens of each, whether they share a prefix
    "1 token": (1, 1, False),
    "4 tokens": (1, 4, False),
    "8 requests": (8, 1, False),
    "8 requests, one text": (8, 1, True),
    "16 tokens": (1, 16, False),
    "128 tokens": (1, 128, False),
}
_SIDES = ((OTHER, "fp16"), (OTHER, "int8"), (OURS, "int8"))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    pasts: tuple[int, ...]  # numbers of cached tokens
    rounds: int
    passes: int  # per side and round; their median counts


FULL, QUICK = Plan((500, 2000, 4000, 7000), 3, 3), Plan((500,), 1, 1)


def run(shapes: Sequence[str], other: Path, plan: Plan) -> Outcome:
    """Measure each shape with the kernels of both checkouts.

    Args:
        shapes: keys of `SHAPES`.
        other: the other checkout.
        plan: how much to measure.
    """
    names = ("layers", "heads", "kv_heads", "size")
    tables, result = [], {}
    for shape in shapes:
        progress(f"attention of {shape}")
        pasts = tuple(past for past in plan.pasts if past < SHAPES[shape][-1])
        own, turns = replace(plan, pasts=pasts), Turns()
        with checkouts(other, "bench.runtime.attention_worker") as workers:
            for worker in workers.values():
                asked = dict(zip(names, SHAPES[shape][:-1], strict=True))
                worker.ask("load", threads=available_threads(), **asked)
            sides = {
                _name(kernel, side, dtype): Side(
                    workers[side], "passes", {"kernel": kernel, "dtype": dtype}
                )
                for kernel, (side, dtype) in product(KERNELS, _SIDES)
            }
            bandwidth = workers[OURS].ask("bandwidth")
            turns.measure(sides, _cases(own), own.rounds)
        tables.append(_table(shape, turns, own, bandwidth))
        result[shape] = {"bytes_per_second": bandwidth, "milliseconds": turns.ms}
    return Outcome({"other": other.name, "shapes": result}, tables)


def _name(kernel: str, side: str, dtype: str) -> str:
    return f"{kernel}, {side}, {dtype}"


def _title(past: int, rows: str) -> str:
    return f"{rows} behind {past:,}"


def _cases(plan: Plan) -> list[Case]:
    def case(past: int, rows: str) -> Case:
        requests, tokens, shared = ROWS[rows]
        asked = {"past": past, "requests": requests, "tokens": tokens, "shared": shared}
        asked["count"] = plan.passes
        return Case(_title(past, rows), lambda side: side.ask(**asked))

    return [case(past, rows) for past, rows in product(plan.pasts, ROWS)]


def _table(shape: str, turns: Turns, plan: Plan, bandwidth: float) -> Table:
    layers, _, kv_heads, size, _ = SHAPES[shape]
    rows = []
    for kernel, past, name in product(KERNELS, plan.pasts, ROWS):
        title, (requests, _, shared) = _title(past, name), ROWS[name]
        halves, before, now = (turns.ms[title][_name(kernel, *side)] for side in _SIDES)
        blocks = past / BLOCK_TOKENS * (1 if shared else requests)
        reading = 1e3 * blocks * layers * block_bytes([(kv_heads, size)], "int8") / bandwidth
        shares = [Summary.of(ratios(now, base)).spread() for base in (halves, before)]
        times = [f"{Summary.of(ms).median:.2f}" for ms in (halves, before, now)]
        multiple = f"{Summary.of(now).median / reading:.2f}"
        rows.append((kernel, title, *times, *shares, multiple))
    columns = [f"{dtype}, {side}, ms" for side, dtype in _SIDES]
    columns = ["kernels", "rows", *columns, "int8 of fp16's time", "int8 of int8's time"]
    columns.append("of its bytes' time")
    notes = (
        "attention of all layers in a pass; medians; ratios round by round",
        f"bytes' time: the int8 cache's bytes at {bandwidth / 1e9:.1f} GB/s, read by all cores; "
        "a small cache partly stays in the processor's caches",
        turns.note,
    )
    return Table(f"Attention: {shape}", columns, rows, notes)
