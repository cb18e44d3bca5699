"""Slow clients in numbers do not keep honest ones from being answered."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.overload import serving
from tests.slow_clients import Crowd, run

pytestmark = pytest.mark.e2e


def test_honest_clients_are_answered_beside_slow_ones_and_nothing_stays(tmp_path: Path) -> None:
    with serving(tmp_path) as (port, process):
        crowd = Crowd(headers=100, bodies=100, readers=60)
        report = run(port, process, crowd, seconds=25, seconds_without=1)
    assert not report.without.others
    assert not report.beside.others
    assert {"slow_headers", "slow_body"} <= set(report.closed)
    assert report.seconds_after is not None
