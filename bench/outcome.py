"""What an experiment brings, whatever it measured: one shape for whoever keeps and shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.report import Chart, Table


@dataclass(frozen=True, slots=True)
class Outcome:
    """A measurement's figures, fit for JSON, and how to show them.

    `sound` is False where output differed that must be equal.
    """

    result: Mapping[str, Any]
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    sound: bool = True
