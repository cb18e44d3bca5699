"""Measures at the first start what a model's passes cost, and keeps the figures."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from glob import escape
from pathlib import Path

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner
from specops.system.folders import file_at_once
from specops.system.generations import outdated, remove, use

log = logging.getLogger(__name__)

FORMAT = 3  # raise it when the figures are measured differently
_PAST = 64  # tokens before those of a measured pass
_LONG_PAST = 1024  # tokens before those of the pass that measures attention
_ATTENTION_TOKENS = 8  # tokens of that pass
_MIN_ROUNDS = 3  # the first one also binds tensors and touches pages
_MAX_ROUNDS = 60
_ENOUGH_SECONDS = 1.0  # measuring ends then, but not before `_MIN_ROUNDS`
# The kernels compute up to 10 rows at once, so costs step there; above they rise evenly.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32, 48, 64, 96)
_MAX_LOGITS = 64  # wider passes are prompts, which need one row of logits


def calibrate(runner: ModelRunner, saved: Path | None) -> CostModel:
    """Read the cost model of an earlier start, or measure it.

    Measuring takes a second, or three passes of each width where they take longer. It uses slot
    0, which must be free, and frees it again.

    Args:
        runner: of the model.
        saved: file for the figures; None: they are not kept.
    """
    widest = min(runner.max_tokens, runner.cache.context)
    sizes = sorted({*(size for size in _SIZES if size < widest), widest})
    model = None if saved is None else _read(saved, sizes)
    if model is None:
        model = _measure(runner, sizes)
        if saved is not None:
            _write(saved, model)
    if saved is not None:
        use(saved)
        remove(outdated(list(saved.parent.glob("*.json"))))  # of all models and builds
    return model


def _measure(runner: ModelRunner, sizes: list[int]) -> CostModel:
    cache, widest = runner.cache, sizes[-1]
    past = max(0, min(_PAST, cache.context - widest))
    count = min(_ATTENTION_TOKENS, widest)
    far = min(_LONG_PAST, cache.context - count)
    cache.begin(0, [0] * 2)
    while not cache.reserve(0, max(far + count, past + widest)):
        far //= 2  # the cache is small
        if far + count <= past + widest:
            far, past = 0, 0
    # Memory that was never written is one page of zeros, which reads faster than a cache.
    cache.zero(0)
    # From the widest to the narrowest, as caches are in decoding: right behind a far wider pass, a
    # pass over one token takes as long as one over two (demo pair: 0.53 ms in place of 0.36).
    passes = [partial(_run, runner, far, count, count)]
    passes += [
        partial(_run, runner, past, size, size if size <= _MAX_LOGITS else 1)
        for size in reversed(sizes)
    ]
    passes.append(partial(_run, runner, 0, count, count))
    long, *measured, near = _min_seconds(passes)
    measured.reverse()
    cache.release(0)
    pair = max(0.0, long - near) / (count * far) if far else 0.0
    costs = [
        max(seconds - pair * size * (past + size / 2), seconds / 2)
        for size, seconds in zip(sizes, measured, strict=True)
    ]
    return CostModel(sizes, costs, pair)


def _run(runner: ModelRunner, start: int, tokens: int, num_logits: int) -> None:
    batch = Batch()
    batch.add(0, start, [1] * tokens, num_logits)
    runner.forward(batch)


def _min_seconds(passes: Sequence[Callable[[], None]]) -> list[float]:
    """Least seconds of each pass. They take turns: other work on the machine only adds time."""
    least = [float("inf")] * len(passes)
    began = time.perf_counter()
    for number in range(_MAX_ROUNDS):
        if number >= _MIN_ROUNDS and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        for index, run in enumerate(passes):
            start = time.perf_counter()
            run()
            least[index] = min(least[index], time.perf_counter() - start)
    return least


def _read(path: Path, sizes: list[int]) -> CostModel | None:
    """The kept figures; None if there are none for these sizes."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["sizes"] != sizes:
            return None
        return CostModel(sizes, [float(item) for item in kept["seconds"]], float(kept["pair"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): costs are measured again", path, error)
        return None


def _write(path: Path, model: CostModel) -> None:
    kept = {"sizes": model.sizes, "seconds": model.seconds, "pair": model.pair_seconds}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f".{escape(path.name)}.*"):  # of a killed process
            leftover.unlink(missing_ok=True)
        with file_at_once(path) as draft:
            draft.write_text(json.dumps(kept), encoding="utf-8")
    except OSError as error:  # the next start measures again
        log.warning("%s cannot be written: %s", path, error)
