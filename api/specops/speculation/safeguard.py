"""Calls drafters so that an error in one costs speed and nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from specops.speculation.drafters.base import Drafter

log = logging.getLogger(__name__)
T = TypeVar("T")


class Safeguard:
    """Switches a drafter off that raises an error. Used by the engine's thread.

    Attributes:
        switched_off: names of such drafters that nobody was told of yet.
    """

    def __init__(self) -> None:
        self.switched_off: list[str] = []
        self._off: set[Drafter] = set()

    def call(self, drafter: Drafter, otherwise: T, work: Callable[..., T], *arguments: object) -> T:
        """What a drafter's work returns; `otherwise` if it fails, or has failed before."""
        if drafter in self._off:
            return otherwise
        try:
            return work(*arguments)
        except Exception:
            log.exception(
                "a drafter failed, and is switched off until the service starts again",
                extra={"fields": {"drafter": drafter.name}},
            )
            self._off.add(drafter)
            self.switched_off.append(drafter.name)
            drafter.stop()
            return otherwise
