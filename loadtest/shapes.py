"""Load shapes as data: how many users, for how long. Every shape ends by itself.

Closed-loop users wait for an answer before they ask again, so they slow down together with an
overloaded server and hide how bad it is. The shape `arrivals` is open-loop: requests come at
random times whether or not earlier ones have been answered, as they do from people.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stage:
    """`users` for `seconds`; where `open_loop`, each user stands for a stream of arrivals."""

    seconds: float
    users: int
    open_loop: bool = False


SHAPES: dict[str, tuple[Stage, ...]] = {
    # Does it work at all? What CI runs.
    "smoke": (Stage(30, 2),),
    # Where does latency leave the ground?
    "ramp": tuple(Stage(30, users) for users in (1, 2, 4, 8, 16, 32)),
    # Does it shed load instead of falling over, and recover?
    "spike": (Stage(30, 2), Stage(30, 60), Stage(60, 2)),
    # Does anything grow that should not?
    "steady": (Stage(600, 4),),
    # What do people see who do not wait for each other?
    "arrivals": (Stage(60, 1, open_loop=True), Stage(60, 4, open_loop=True)),
}


def stage_at(stages: tuple[Stage, ...], seconds: float) -> Stage | None:
    """The stage that runs `seconds` after the start; None after the last one."""
    for stage in stages:
        if seconds < stage.seconds:
            return stage
        seconds -= stage.seconds
    return None
