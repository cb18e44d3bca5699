"""What a forward pass costs on this machine, by its size: measured at start, then kept up to date.

A machine is slower one minute and a cache longer the next, so every pass that is seen moves two
figures: the drift, common to all sizes, and a little the cost of its own size. Whoever chooses
between passes compares costs with each other; these do not contain the drift, so that a slow
minute is not taken for an expensive size.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from specops.decoder import Decoder

log = logging.getLogger(__name__)

_CACHED_TOKENS = 64  # in the row while passes are measured
_FED = 16  # tokens that the draft model takes in at once while that is measured
_LEAST_ROUNDS = 3
_MOST_ROUNDS = 15
_ENOUGH_SECONDS = 0.5  # of measuring, once the least rounds are done
_ALL_SIZES_TO = 9  # larger passes are measured at every fourth size, the rest lies between
_DRIFT = 0.1  # weight of a pass in the drift
_OWN = 0.02  # weight of a pass in the cost of its size
_OUTLIER = 2.0  # a pass this many times slower or faster than expected counts as this much


class CostCurve:
    """Costs in seconds of the machine as it was when they were measured.

    Attributes:
        verify: [W + 1] a pass of one row, by its width in tokens; item 0 is 0.
        decode: [R + 1] a pass of one token for each of several rows, by rows; item 0 is 0.
        guess: one guess of the draft model; 0 without one.
        feed: one of many tokens that the draft model takes in at once; 0 without one.
        drift: how many seconds one of these takes now.
    """

    def __init__(
        self,
        verify: Sequence[float],
        decode: Sequence[float],
        guess: float = 0.0,
        feed: float = 0.0,
    ) -> None:
        self.verify = [0.0, *verify]
        self.decode = [0.0, *decode]
        self.guess = guess
        self.feed = feed
        self.drift = 1.0

    def table(self) -> Iterator[tuple[str, int, float]]:
        """Kind of pass, its size (tokens of `verify`, rows of `decode`), seconds it takes now.

        May be read by any thread: a figure that changes meanwhile is as true as the one before.
        """
        kinds = {"verify": self.verify[1:], "decode": self.decode[1:]}
        if self.guess:
            kinds |= {"guess": [self.guess], "feed": [self.feed]}
        for kind, seconds in kinds.items():
            for size, cost in enumerate(seconds, start=1):
                yield kind, size, cost * self.drift

    @property
    def prompt_token(self) -> float:
        """A token of a prompt, by the widest pass that was measured: until prompts tell."""
        widest = len(self.verify) - 1
        return self.verify[widest] / widest

    def saw_verify(self, width: int, seconds: float) -> None:
        """Take in a pass of one row over `width` tokens."""
        ratio = self._saw(self.verify[width], seconds)
        self.verify[width] *= ratio
        if width == 1:
            self.decode[1] = self.verify[1]

    def saw_decode(self, rows: int, seconds: float) -> None:
        """Take in a pass of one token for each of `rows` rows."""
        ratio = self._saw(self.decode[rows], seconds)
        self.decode[rows] *= ratio
        if rows == 1:
            self.verify[1] = self.decode[1]

    def saw_guess(self, guesses: int, seconds: float) -> None:
        """Take in what the draft model took for so many guesses."""
        # Without the drift's share: the draft model is another graph, the target's passes tell.
        ratio = bounded(seconds / (guesses * self.guess * self.drift)) if self.guess else 1.0
        self.guess *= 1 + _DRIFT * (ratio - 1)

    def _saw(self, expected: float, seconds: float) -> float:
        ratio = bounded(seconds / (expected * self.drift))
        self.drift *= 1 + _DRIFT * (ratio - 1)
        return 1 + _OWN * (ratio - 1)


def bounded(ratio: float) -> float:
    """A pass's time over the expected one, as far as it is believed."""
    return min(max(ratio, 1 / _OUTLIER), _OUTLIER)


def calibrate(
    target: Decoder, draft: Decoder | None, *, widest: int, saved: Path | None
) -> CostCurve:
    """Read the curve of an earlier start, or measure it.

    Takes half a second to some seconds, by the size of the model. Rows must be empty, and are left
    empty.

    Args:
        target: decodes all its rows, and verifies `widest` tokens.
        draft: guesses one token after the other.
        widest: tokens of the widest pass that verifies.
        saved: where the curve is kept; None to measure without keeping it.
    """
    if saved is not None and (curve := _read(saved, widest, target.cache.rows)) is not None:
        return curve
    sizes = _sizes(widest)
    passes: dict[tuple[str, int], Callable[[], object]] = {}
    for width in sizes:
        passes["verify", width] = lambda width=width: target.extend(0, [1] * width)  # type: ignore[misc]
    for rows in range(2, target.cache.rows + 1):
        passes["decode", rows] = lambda rows=rows: target.decode(0, [1] * rows)  # type: ignore[misc]
    if draft is not None:
        passes["guess", 1] = lambda: draft.extend(0, [1])
        passes["feed", _FED] = lambda: draft.extend(0, [1] * _FED, logits=1)
    held = {target: min(_CACHED_TOKENS, target.cache.capacity - widest)}
    if draft is not None:
        held[draft] = min(_CACHED_TOKENS, draft.cache.capacity - _FED)
    seconds = _measure(passes, held)
    verify = _between(sizes, [seconds["verify", width] for width in sizes])
    decode = [seconds["verify", 1]]
    decode += [seconds["decode", rows] for rows in range(2, target.cache.rows + 1)]
    guess, feed = seconds.get(("guess", 1), 0.0), seconds.get(("feed", _FED), 0.0) / _FED
    curve = CostCurve(verify, decode, guess, feed)
    if saved is not None:
        _write(saved, curve)
    return curve


def _sizes(widest: int) -> list[int]:
    return sorted({*range(1, min(widest, _ALL_SIZES_TO) + 1), *range(widest, 0, -4)})


def _between(sizes: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Costs of all sizes from 1 on, on straight lines between those that were measured."""
    return [float(cost) for cost in np.interp(range(1, sizes[-1] + 1), sizes, seconds)]


def _measure(
    passes: dict[tuple[str, int], Callable[[], object]], held: dict[Decoder, int]
) -> dict[tuple[str, int], float]:
    """Median seconds of each, taken in turns so that a slow moment hits all alike.

    `held`: tokens that row 0 of each decoder holds meanwhile.
    """
    for decoder, kept in held.items():
        for fed in range(0, kept, decoder.max_width):
            decoder.extend(0, [1] * min(decoder.max_width, kept - fed))
    seen: dict[tuple[str, int], list[float]] = {key: [] for key in passes}
    began = time.perf_counter()
    for number in range(_MOST_ROUNDS + 1):
        if number > _LEAST_ROUNDS and time.perf_counter() - began > _ENOUGH_SECONDS:
            break
        for key, run in passes.items():
            start = time.perf_counter()
            run()
            if number:  # the first round binds and faults in
                seen[key].append(time.perf_counter() - start)
            for decoder, kept in held.items():
                _reset(decoder, kept)
    for decoder in held:
        _reset(decoder, 0)
    return {key: median(times) for key, times in seen.items()}


def _reset(decoder: Decoder, tokens: int) -> None:
    for row in range(decoder.cache.rows):
        decoder.cache.truncate(row, tokens if row == 0 else 0)


def _read(path: Path, widest: int, rows: int) -> CostCurve | None:
    """The curve kept there; None where there is none of these sizes."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        verify = [float(item) for item in kept["verify"]]
        decode = [float(item) for item in kept["decode"]]
        curve = CostCurve(verify, decode, float(kept["guess"]), float(kept["feed"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%s): costs are measured again", path, error)
        return None
    if min(*verify, *decode) <= 0 or (len(verify), len(decode)) != (widest, rows):
        return None
    return curve


def _write(path: Path, curve: CostCurve) -> None:
    kept = {
        "verify": curve.verify[1:],
        "decode": curve.decode[1:],
        "guess": curve.guess,
        "feed": curve.feed,
    }
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(kept), encoding="utf-8")
        draft.replace(path)
    except OSError as error:  # measured again at the next start
        log.warning("%s cannot be written: %s", path, error)
