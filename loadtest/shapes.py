"""Load shapes as data: how many users or arrivals, for how long.

Closed-loop users wait for an answer before they ask again, so they slow down with an overloaded
server and hide the overload. In an open loop, requests arrive at random times, whether or not
earlier ones have been answered, as from independent people.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

USERS, ARRIVALS, TRACE = "users", "arrivals", "trace"  # shapes defined by options
ARRIVALS_SECONDS, ARRIVALS_RATE = 120.0, 4.0  # defaults


@dataclass(frozen=True, slots=True)
class Stage:
    """A number of closed-loop `users` for `seconds`, or arrivals at `rate` per second."""

    seconds: float
    users: int = 0
    rate: float = 0.0

    @property
    def open_loop(self) -> bool:
        """Whether requests arrive at a rate."""
        return self.rate > 0

    @property
    def locust_users(self) -> int:
        """Number of Locust users; in an open loop, each stands for at most one arrival/s."""
        return math.ceil(self.rate) if self.open_loop else self.users

    def scaled(self, seconds: float, rate: float) -> Stage:
        """A stage that lasts `seconds` times as long, with `rate` times as many arrivals."""
        return replace(self, seconds=self.seconds * seconds, rate=self.rate * rate)


FIXED: dict[str, tuple[Stage, ...]] = {
    # Does it work at all? CI runs this.
    "smoke": (Stage(30, users=2),),
    # Where is the knee? Arrivals increase; see `--rate-scale` for slower models.
    "ramp": tuple(Stage(20, rate=rate) for rate in (2, 4, 8, 12, 16, 24, 32, 48)),
    # Does it refuse load instead of falling over, and recover?
    "spike": (Stage(30, users=2), Stage(30, users=60), Stage(60, users=2)),
    # Does anything grow that should not?
    "soak": (Stage(900, users=4),),
}
SHAPES = (USERS, ARRIVALS, TRACE, *FIXED)


def arrivals(
    stages: Sequence[Stage], burstiness: float, seed: str, index: int, processes: int
) -> Iterator[float]:
    """Yield the arrival times of process number `index`, in seconds from the start, endlessly.

    The gaps of all processes together have a gamma distribution. With a burstiness of 1 this is a
    Poisson process, as from independent people; with less, requests come in bursts. A process that
    joined later has no arrivals.

    Args:
        stages: the run's stages, with their rates.
        burstiness: shape of the gamma distribution.
        seed: determines the times.
        index, processes: which of how many processes this is.
    """
    rng, at = random.Random(f"{seed}:arrivals"), 0.0
    for number in count() if index < processes else ():
        stage = stages[-1 if (found := stage_at(stages, at)) is None else found]
        at += rng.gammavariate(burstiness, 1 / (burstiness * stage.rate))
        if number % processes == index:
            yield at


def stage_at(stages: Sequence[Stage], seconds: float) -> int | None:
    """The index of the stage that runs `seconds` after the start; None after the last one."""
    for index, stage in enumerate(stages):
        if seconds < stage.seconds:
            return index
        seconds -= stage.seconds
    return None
