"""Measures what a model's passes cost, at the first start, and keeps it for those to come."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from glob import escape
from pathlib import Path

from specops.runtime.batch import Batch
from specops.runtime.cost_model import CostModel
from specops.runtime.model_runner import ModelRunner

log = logging.getLogger(__name__)

FORMAT = 2  # counts up when figures are measured in another way
_PAST = 64  # tokens that the passes look back at
_LONG_PAST = 1024  # and those that tell what looking back costs
_LOOKING_BACK = 8  # tokens of such a pass
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 60
_ENOUGH_SECONDS = 1.0  # of measuring, once the least rounds are done
# The kernels compute 8 rows at once, so costs step there; behind them they rise evenly.
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32, 48, 64, 96)
_MOST_LOGITS = 64  # a wider pass is a prompt's, which needs one row of logits


def calibrate(runner: ModelRunner, saved: Path | None) -> CostModel:
    """Read the cost model of an earlier start, or measure it.

    Takes half a second to some seconds, by the size of the model. Slot 0 must be free and is left
    free.

    Args:
        runner: the model.
        saved: where the figures are kept; None to measure without keeping them.
    """
    sizes = _sizes(min(runner.max_tokens, runner.cache.context))
    if saved is not None and (kept := _read(saved, sizes)) is not None:
        return kept
    model = _measure(runner, sizes)
    if saved is not None:
        _write(saved, model)
    return model


def _sizes(widest: int) -> list[int]:
    return sorted({*(size for size in _SIZES if size < widest), widest})


def _measure(runner: ModelRunner, sizes: list[int]) -> CostModel:
    """Least seconds of each size, taken in turns: whatever else the machine does only adds."""
    cache, past = runner.cache, _past(runner, sizes[-1])
    looking = min(_LOOKING_BACK, sizes[-1])
    far = min(_LONG_PAST, cache.context - looking)
    cache.begin(0, [0] * 2)
    while not cache.reserve(0, max(far + looking, past + sizes[-1])):
        far //= 2  # a small cache
        if far + looking <= past + sizes[-1]:
            far, past = 0, 0
    # Untouched memory is a single page of zeros, which is read faster than a cache: write to it.
    for start in range(0, far, sizes[-1]):
        runner.forward(_batch(start, min(sizes[-1], far - start), 1))
    passes: dict[object, Callable[[], object]] = {
        size: lambda size=size: runner.forward(  # type: ignore[misc]
            _batch(past, size, size if size <= _MOST_LOGITS else 1)
        )
        for size in sizes
    }
    passes["near"] = lambda: runner.forward(_batch(0, looking, looking))
    passes["far"] = lambda: runner.forward(_batch(far, looking, looking))
    seconds = _in_turns(passes)
    cache.release(0)
    pair = max(0.0, seconds["far"] - seconds["near"]) / (looking * far) if far else 0.0
    costs = [
        max(seconds[size] - pair * size * (past + size / 2), seconds[size] / 2) for size in sizes
    ]
    return CostModel(sizes, costs, pair)


def _past(runner: ModelRunner, widest: int) -> int:
    return max(0, min(_PAST, runner.cache.context - widest))


def _batch(start: int, tokens: int, num_logits: int) -> Batch:
    batch = Batch()
    batch.add(0, start, [1] * tokens, num_logits)
    return batch


def _in_turns(passes: dict[object, Callable[[], object]]) -> dict[object, float]:
    seen: dict[object, list[float]] = {key: [] for key in passes}
    began = time.perf_counter()
    for number in range(_MOST_ROUNDS + 1):
        if number > _LEAST_ROUNDS and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        for key, run in passes.items():
            start = time.perf_counter()
            run()
            if number:  # the first round binds and faults in
                seen[key].append(time.perf_counter() - start)
    return {key: min(times) for key, times in seen.items()}


def _read(path: Path, sizes: list[int]) -> CostModel | None:
    """The figures kept there; None where there are none of these sizes."""
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
    kept = {
        "sizes": model.sizes,
        "seconds": model.seconds,
        "pair": model.pair_seconds,
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for leftover in path.parent.glob(f".{escape(path.name)}.*"):  # of a killed process
            leftover.unlink(missing_ok=True)
        draft.write_text(json.dumps(kept), encoding="utf-8")
        draft.replace(path)
    except OSError as error:  # measured again at the next start
        log.warning("%s cannot be written: %s", path, error)
        with suppress(OSError):
            draft.unlink()
