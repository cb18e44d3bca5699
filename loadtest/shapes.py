"""Load shapes as data: how many users, for how long. Every shape ends by itself.

Closed-loop users wait for an answer before they ask again, so they slow down together with an
overloaded server and hide how bad it is. Open-loop users stand for one arrival a second each, at
random times, whether or not earlier requests have been answered, like people.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """`users` for `seconds`; if `open_loop`, each user stands for one arrival a second."""

    seconds: float
    users: int
    open_loop: bool = False


SHAPES: dict[str, tuple[Stage, ...]] = {
    # Does it work at all? What CI runs.
    "smoke": (Stage(30, 2),),
    # Where is the knee? More and more arrivals; see `--rate-scale` for slower models.
    "ramp": tuple(Stage(20, rate, open_loop=True) for rate in (2, 4, 8, 12, 16, 24, 32, 48)),
    # Does it shed load instead of falling over, and recover?
    "spike": (Stage(30, 2), Stage(30, 60), Stage(60, 2)),
    # Does anything grow that should not?
    "soak": (Stage(900, 4),),
    # What do people see if they do not wait for each other? The same rate all the time.
    "arrivals": (Stage(120, 4, open_loop=True),),
}


def stage_at(stages: tuple[Stage, ...], seconds: float) -> int | None:
    """The place of the stage that runs `seconds` after the start; None after the last one."""
    for place, stage in enumerate(stages):
        if seconds < stage.seconds:
            return place
        seconds -= stage.seconds
    return None
