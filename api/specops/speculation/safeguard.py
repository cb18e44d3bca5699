"""Calls drafters so that a drafter's error costs only speed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

from specops.speculation.drafters.base import Drafter

log = logging.getLogger(__name__)
T = TypeVar("T")


class Safeguard:
    """Switches off any drafter that raises an error. Used by the engine's thread.

    Attributes:
        switched_off: names of drafters switched off and not reported yet.
    """

    def __init__(self) -> None:
        self.switched_off: list[str] = []
        self._off: set[Drafter] = set()

    def call(self, drafter: Drafter, otherwise: T, work: Callable[..., T], *arguments: object) -> T:
        """Call a drafter.

        Args:
            drafter: the drafter.
            otherwise: the result if the call fails, or an earlier one has failed.
            work: one of the drafter's methods.
            arguments: its arguments.

        Returns:
            The method's result, or `otherwise`.
        """
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
