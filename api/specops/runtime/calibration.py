"""Measures the cost of a model's passes, and keeps the least time of each over all starts.

Other work on the machine only adds time, and it may last longer than a start measures: it makes all
passes several times as slow, or only those that outlast the system's time slices. So the first
start's times are not the last word. Each later start times a few passes again, and begins where the
one before ended. A time that contradicts the others is measured again at once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from glob import escape
from math import inf
from pathlib import Path

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner
from specops.system.folders import atomic_file
from specops.system.generations import outdated, remove, use

log = logging.getLogger(__name__)

FORMAT = 6  # raise it when the figures are measured differently
_PAST = 64  # tokens before a measured pass's own
_LONG_PAST = 1024  # tokens before the pass that measures attention
_ATTENTION_TOKENS = 8  # tokens of that pass
_SPANS = 8  # at most, of the pass that measures states
_MIN_ROUNDS = 2  # of the first start; the first round also binds tensors and touches pages
_MAX_ROUNDS = 60
_ENOUGH_SECONDS = 0.5  # measuring ends then, but not before `_MIN_ROUNDS`
_CHECK_SHARE = 0.2  # of these seconds, at a later start
# A pass is timed again if it took this multiple of what others suggest, until it takes as long
# again: costs of widths step.
_DOUBTFUL = 1.1
_TRIES = 2  # of each pass in a start
# The kernels compute up to 10 rows at once, so costs step there; above they rise evenly.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32, 48, 64, 96)
_MAX_ROWS = 64  # of logits: wider passes are prompts, which need one


@dataclass
class _Times:
    """The least times so far, as the file keeps them.

    Attributes:
        sizes: numbers of tokens in the measured passes, ascending from 1.
        past: number of tokens before them.
        far: number of tokens before the pass that measures attention.
        spans: of one token each, of the pass that measures states; 1: the model has none.
        seconds: of the pass for attention, then of those over `sizes` from the widest to the
            narrowest, then of the first one again without tokens before its own, then of the pass
            for states, if any.
        turn: index of the pass that is timed next.
        rows: of logits in a pass, at most; wider passes compute one.
    """

    sizes: list[int]
    past: int
    far: int
    rows: int
    spans: int = 1
    seconds: list[float] = field(default_factory=list)
    turn: int = 0


def calibrate(runner: ModelRunner, saved: Path | None, *, most_rows: int = _MAX_ROWS) -> CostModel:
    """Measure the costs of a model's passes, beginning with the times of earlier starts.

    The first start takes half a second, or two passes of each width where they take longer; a later
    one a tenth of a second. It uses slot 0, or for a model with states the first `_SPANS` slots,
    which must be free, and frees them again.

    Args:
        runner: of the model.
        saved: file for the times; None: they are not kept.
        most_rows: of logits in a pass: more would take memory that no later pass does.
    """
    times = _reserve(runner, min(_MAX_ROWS, most_rows))
    if saved is not None:
        _read(saved, times)
    # Memory that was never written is one page of zeros, which reads faster than a cache.
    for slot in range(times.spans):
        runner.cache.zero(slot)
    _measure(_passes(runner, times), times)
    for slot in range(times.spans):
        runner.cache.release(slot)
    if saved is not None:
        _write(saved, times)
        use(saved)
        remove(outdated(list(saved.parent.glob("*.json"))))  # of all models and builds
    return _cost_model(times)


def _reserve(runner: ModelRunner, rows: int) -> _Times:
    """Choose the passes, and give slot 0 the room that they need, and others as they share one."""
    cache, widest = runner.cache, min(runner.max_tokens, runner.cache.context)
    past = max(0, min(_PAST, cache.context - widest))
    count = min(_ATTENTION_TOKENS, widest)
    far = min(_LONG_PAST, cache.context - count)
    cache.allocate(0, [0] * 2)
    while not cache.reserve(0, max(far + count, past + widest)):
        far //= 2  # the cache is small
        if far + count <= past + widest:
            far, past = 0, 0
    spans = 1
    if cache.shape.state_floats:
        while spans < min(_SPANS, cache.num_slots, widest):
            cache.allocate(spans, [0] * 2)
            if not cache.reserve(spans, 2):
                cache.release(spans)
                break
            spans += 1
    return _Times(
        sorted({*(size for size in _SIZES if size < widest), widest}), past, far, rows, spans
    )


def _passes(runner: ModelRunner, times: _Times) -> list[Callable[[], None]]:
    # From the widest to the narrowest, as caches are in decoding: right after a far wider pass, a
    # pass over one token takes as long as one over two (demo pair: 0.53 ms in place of 0.36).
    count = min(_ATTENTION_TOKENS, times.sizes[-1])
    sized = [
        partial(_run, runner, times.past, size, size if size <= times.rows else 1)
        for size in reversed(times.sizes)
    ]
    return [
        partial(_run, runner, times.far, count, count),
        *sized,
        partial(_run, runner, 0, count, count),
        *([partial(_run_spans, runner, times.spans)] if times.spans > 1 else []),
    ]


def _run(runner: ModelRunner, start: int, tokens: int, num_logits: int) -> None:
    batch = Batch()
    batch.add(0, start, [1] * tokens, num_logits)
    runner.forward(batch)


def _run_spans(runner: ModelRunner, spans: int) -> None:
    batch = Batch()
    for slot in range(spans):
        batch.add(slot, 1, [1], 1)
    runner.forward(batch)


def _measure(passes: Sequence[Callable[[], None]], times: _Times) -> None:
    """Time the passes in turn, then those again whose times cannot be right."""
    count = len(passes)

    def measure(index: int) -> float:
        """Time a pass; return its time as a multiple of the known one."""
        start = time.perf_counter()
        passes[index]()
        taken, least = time.perf_counter() - start, times.seconds[index]
        times.seconds[index] = min(least, taken)
        return taken / least

    least, enough = 0, _CHECK_SHARE * _ENOUGH_SECONDS
    if not times.seconds:
        least, enough = _MIN_ROUNDS * count, _ENOUGH_SECONDS
        times.seconds = [inf] * count
    began = time.perf_counter()
    # No other time shows whether the times of attention and of states can be right.
    for index in (0, *range(1 + len(times.sizes), count)):
        measure(index)
    for number in range(_MAX_ROUNDS * count):
        if number >= least and time.perf_counter() - began >= enough:
            break
        measure(times.turn)
        times.turn = (times.turn + 1) % count
    tries = [_TRIES] * count
    while again := [index for index in _doubtful(times) if tries[index]]:
        for index in again:
            as_before = 1 / _DOUBTFUL <= measure(index) <= _DOUBTFUL
            tries[index] = 0 if as_before else tries[index] - 1


def _doubtful(times: _Times) -> list[int]:
    """Indices of passes that took longer than a wider one, or than several narrower ones that
    compute as many tokens."""
    found = list(zip(reversed(times.sizes), times.seconds[1:], strict=False))

    def most(size: int) -> float:
        # A pass that is wider than any with all rows of logits may take less than these.
        others = [one for one in found if one[0] <= max(size, times.rows)]
        return min(-(-size // other) * seconds for other, seconds in others)

    return [
        index for index, (size, seconds) in enumerate(found, 1) if seconds > _DOUBTFUL * most(size)
    ]


def _cost_model(times: _Times) -> CostModel:
    long, *measured, near = times.seconds[: 2 + len(times.sizes)]
    measured.reverse()
    count = min(_ATTENTION_TOKENS, times.sizes[-1])
    pair = max(0.0, long - near) / (count * times.far) if times.far else 0.0
    costs = [
        max(seconds - pair * size * (times.past + size / 2), seconds / 2)
        for size, seconds in zip(times.sizes, measured, strict=True)
    ]
    costs_of = CostModel(times.sizes, costs, pair)
    if times.spans < 2:
        return costs_of
    added = times.seconds[-1] - costs_of.cost(times.spans)
    return CostModel(times.sizes, costs, pair, max(0.0, added) / (times.spans - 1))


def _read(path: Path, times: _Times) -> None:
    """Take over the times of earlier starts, if they are of the same passes."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        same = "sizes", "past", "far", "rows", "spans"
        if [kept[key] for key in same] != [getattr(times, key) for key in same]:
            return
        seconds, turn = [float(item) for item in kept["seconds"]], int(kept["turn"])
        count = len(times.sizes) + 2 + (times.spans > 1)
        if len(seconds) != count or not all(0 < one < inf for one in seconds):
            raise ValueError(f"times {seconds}")
        times.seconds, times.turn = seconds, turn % len(seconds)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): costs are measured again", path, error)


def _write(path: Path, times: _Times) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f".{escape(path.name)}.*"):  # of a killed process
            leftover.unlink(missing_ok=True)
        with atomic_file(path) as draft:
            draft.write_text(json.dumps(asdict(times)), encoding="utf-8")
    except OSError as error:  # the next start measures again
        log.warning("%s cannot be written: %s", path, error)
