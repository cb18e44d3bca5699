"""A conversion keeps as many threads busy as the quota allows, not one for each CPU of the host."""

from pathlib import Path

import pytest

from specops.models.convert import weights
from specops.models.convert.weights import WeightStore


def test_workers_follow_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "available_threads", lambda: 3)
    with WeightStore(tmp_path / "weights", lambda read: None) as store:
        assert store._pool._max_workers == 3
