"""Measures the cost of a model's passes, and keeps the minimum of each over all starts.

Other work on the machine only adds time, and may last longer than a start spends on measuring: it
slows down all passes several times, or only those that outlast the system's time slices. So one
start is not enough. Each later start times a few more passes, continuing where the previous start
stopped. A time that contradicts the others is measured again at once.
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

FORMAT = 7  # increase it when the measurement changes
_PAST = 64  # cached tokens before a measured pass
_LONG_PAST = 1024  # cached tokens before the pass that measures attention
_ATTENTION_TOKENS = 8  # tokens of that pass
_SPANS = 8  # maximum number of spans in the pass that measures recurrent states
_MIN_ROUNDS = 2  # at the first start; the first round also binds tensors and touches pages
_MAX_ROUNDS = 60
_ENOUGH_SECONDS = 0.5  # then measuring ends, after at least `_MIN_ROUNDS`
_CHECK_SHARE = 0.2  # of these seconds, at a later start
# A pass that took this multiple of the time that the other passes imply is timed again, until the
# time repeats: some costs really rise in steps.
_DOUBTFUL = 1.1
_TRIES = 2  # maximum number of times that a start repeats a doubtful pass
# The kernels compute up to 10 rows at once, so costs rise in steps up to there, then evenly.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32, 48, 64, 96)
_MAX_ROWS = 64  # rows of logits: wider passes are measured with one


@dataclass
class _Times:
    """The minimum times so far, as stored in the file.

    Attributes:
        sizes: numbers of tokens in the measured passes, ascending from 1.
        past: number of cached tokens before these passes.
        far: number of cached tokens before the pass that measures attention.
        rows: maximum number of logit rows in a pass; wider passes compute one.
        spans: number of spans, one token each, in the pass that measures recurrent states; 1 if the
            model has none.
        seconds: of the attention pass; of the widest pass that has all its rows, but with one; of
            the passes over `sizes`, widest first; of the attention pass again without cached
            tokens; and of the pass for states, if there is one.
        turn: index of the pass to time next.
    """

    sizes: list[int]
    past: int
    far: int
    rows: int
    spans: int = 1
    seconds: list[float] = field(default_factory=list)
    turn: int = 0

    @property
    def scored(self) -> int:
        """Number of tokens in the widest pass with all its rows of logits."""
        return max(size for size in self.sizes if size <= self.rows)


def calibrate(runner: ModelRunner, saved: Path | None, *, most_rows: int = _MAX_ROWS) -> CostModel:
    """Measure the costs of a model's passes, on top of the times of earlier starts.

    The first start takes half a second, or as long as two passes of each width; a later one takes
    a tenth of a second. The passes use slot 0, in a model with recurrent states the first `_SPANS`
    slots. These must be free, and are free again afterwards.

    Args:
        runner: runs the model.
        saved: file for the times; None: do not keep them.
        most_rows: maximum number of logit rows in a pass: more would take memory that no later pass
            needs.
    """
    times = _reserve(runner, min(_MAX_ROWS, most_rows))
    if saved is not None:
        _read(saved, times)
    # Pages that were never written all map to one page of zeros, which reads faster than a cache.
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
    """Choose the passes, and reserve the positions that they need in slot 0 and in the others."""
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
    # Widest first, so that the processor's caches are as in decoding: right after a far wider pass,
    # a pass over one token takes as long as one over two (demo pair: 0.53 ms instead of 0.36).
    count = min(_ATTENTION_TOKENS, times.sizes[-1])
    sized = [
        partial(_run, runner, times.past, size, size if size <= times.rows else 1)
        for size in reversed(times.sizes)
    ]
    return [
        partial(_run, runner, times.far, count, count),
        partial(_run, runner, times.past, times.scored, 1),
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
    """Time the passes in turn, then repeat those whose times contradict others."""
    count = len(passes)

    def measure(index: int) -> float:
        """Time a pass; return its time relative to the minimum so far."""
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
    # No other pass can contradict the times of attention and of states.
    for index in (0, *range(2 + len(times.sizes), count)):
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
    """Indices of passes that took longer than a wider pass, or than several narrower passes with
    as many tokens in all."""
    found = list(zip(reversed(times.sizes), times.seconds[2:], strict=False))

    def most(size: int) -> float:
        # A pass too wide for all its rows of logits may be cheaper than a narrower one with all.
        others = [one for one in found if one[0] <= max(size, times.rows)]
        return min(-(-size // other) * seconds for other, seconds in others)

    return [
        index for index, (size, seconds) in enumerate(found, 2) if seconds > _DOUBTFUL * most(size)
    ]


def _cost_model(times: _Times) -> CostModel:
    long, alone, *measured, near = times.seconds[: 3 + len(times.sizes)]
    measured.reverse()
    scored = times.scored
    logits = max(0.0, measured[times.sizes.index(scored)] - alone) / max(1, scored - 1)
    count = min(_ATTENTION_TOKENS, times.sizes[-1])
    pair = max(0.0, long - near) / (count * times.far) if times.far else 0.0
    costs = [
        max(seconds - pair * size * (times.past + size / 2), seconds / 2)
        + logits * (size - 1) * (size > times.rows)
        for size, seconds in zip(times.sizes, measured, strict=True)
    ]
    costs_of = CostModel(times.sizes, costs, pair, 0.0, logits)
    if times.spans < 2:
        return costs_of
    added = times.seconds[-1] - costs_of.cost(times.spans)
    return CostModel(times.sizes, costs, pair, max(0.0, added) / (times.spans - 1), logits)


def _read(path: Path, times: _Times) -> None:
    """Load the times of earlier starts, if they belong to the same passes."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        same = "sizes", "past", "far", "rows", "spans"
        if [kept[key] for key in same] != [getattr(times, key) for key in same]:
            return
        seconds, turn = [float(item) for item in kept["seconds"]], int(kept["turn"])
        count = len(times.sizes) + 3 + (times.spans > 1)
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
        for leftover in path.parent.glob(f".{escape(path.name)}.*"):  # from a killed process
            leftover.unlink(missing_ok=True)
        with atomic_file(path) as draft:
            draft.write_text(json.dumps(asdict(times)), encoding="utf-8")
    except OSError as error:  # the next start measures again
        log.warning("%s cannot be written: %s", path, error)
