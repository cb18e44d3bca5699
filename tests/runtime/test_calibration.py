"""Costs are measured once and kept; they are measured again if the kept figures do not fit."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest

from specops.runtime import calibration
from specops.runtime.batch import Batch
from specops.runtime.calibration import calibrate
from specops.runtime.kernels import BLOCK_TOKENS
from tests.simulated_target import PAIR_SECONDS, SimulatedTarget, tinyllama


def made(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """A simulated target, whose clock the calibration reads."""
    target = SimulatedTarget(**fields)
    monkeypatch.setattr(calibration.time, "perf_counter", target.clock)
    return target


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    return made(monkeypatch)


@pytest.mark.parametrize("scatter", [0.0, 0.2])
@pytest.mark.parametrize("context", [1024, 4096])
def test_the_costs_of_passes_are_found(
    monkeypatch: pytest.MonkeyPatch, context: int, scatter: float
) -> None:
    target = made(monkeypatch, context=context, scatter=scatter, slowness=1.5)
    found = calibrate(target, None)
    least = 1 - scatter
    for tokens in found.sizes:
        expected = 1.5 * tinyllama().cost(tokens)
        assert 0.95 * least * expected <= found.cost(tokens) <= 1.15 * expected
    assert found.sizes[-1] == 96
    if not scatter:
        assert found.pair_seconds == pytest.approx(1.5 * PAIR_SECONDS, rel=0.05)


def test_narrow_passes_are_timed_as_decoding_finds_the_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass takes twice as long behind one with several times its attention work."""
    target = made(monkeypatch)
    forward = target.forward

    def slowed(batch: Batch) -> Any:
        before = target.passes[-1].attention_work if target.passes else 0
        start = target.clock.now
        logits = forward(batch)
        if before > 3 * batch.attention_work:
            target.clock.now += target.clock.now - start
        return logits

    target.forward = slowed
    found = calibrate(target, None)
    for tokens in found.sizes:
        assert found.cost(tokens) == pytest.approx(tinyllama().cost(tokens), rel=0.05)


@pytest.mark.parametrize("max_tokens", [1, 16, 96, 512])
@pytest.mark.parametrize(
    ("context", "blocks"), [(BLOCK_TOKENS, 1), (2 * BLOCK_TOKENS, 2), (200, 4), (4096, 4)]
)
def test_a_small_cache_is_enough(
    monkeypatch: pytest.MonkeyPatch, context: int, blocks: int, max_tokens: int
) -> None:
    """Also one that has fewer blocks than a context."""
    max_tokens = min(max_tokens, blocks * BLOCK_TOKENS)
    target = made(
        monkeypatch, num_slots=1, context=context, num_blocks=blocks, max_tokens=max_tokens
    )
    found = calibrate(target, None)
    assert found.sizes[-1] == min(context, max_tokens)
    assert found.cost(1) > 0
    cache = target.cache
    assert cache.available_blocks == blocks
    assert cache.kept_blocks == cache.tokens == cache.begin(0, [1, 2, 3]) == 0  # slot 0 is free


def test_they_are_measured_once(target: Any, tmp_path: Path) -> None:
    saved = tmp_path / "costs" / "x.json"
    first = calibrate(target, saved)
    passes = len(target.passes)
    again = calibrate(target, saved)
    assert len(target.passes) == passes
    assert (again.sizes, again.seconds) == (first.sizes, first.seconds)
    assert again.pair_seconds == first.pair_seconds
    assert [item.name for item in saved.parent.iterdir()] == ["x.json"]


def test_figures_of_builds_that_nobody_runs_any_more_go(target: Any, tmp_path: Path) -> None:
    """Each build of the kernels has a file of its own, for each model."""
    names = ("last", "second", "third", "fourth", "recent")
    for days, name in zip((9, 10, 20, 30, 1), names, strict=True):
        (tmp_path / f"{name}.json").write_text("{}")
        then = time.time() - days * 24 * 3600
        os.utime(tmp_path / f"{name}.json", (then, then))
    calibrate(target, tmp_path / "own.json")
    calibrate(target, tmp_path / "own.json")
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["own", "recent"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"\xff\xfe",
        b'{"sizes": [1]}',
        b'{"sizes": SIZES, "seconds": [], "pair": 0}',
        b'{"sizes": SIZES, "seconds": [1, 2], "pair": 0}',
        b'{"sizes": SIZES, "seconds": "fast", "pair": 0}',
        b'{"sizes": SIZES, "seconds": SECONDS, "pair": -1}',
        b'{"sizes": SIZES, "seconds": SECONDS, "pair": null}',
    ],
)
def test_a_damaged_file_is_measured_again_and_written_anew(
    target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    saved = tmp_path / "x.json"
    first = calibrate(target, saved)
    sizes, seconds = json.dumps(first.sizes), json.dumps(first.seconds)
    content = content.replace(b"SIZES", sizes.encode()).replace(b"SECONDS", seconds.encode())
    saved.write_bytes(content)
    passes = len(target.passes)
    with caplog.at_level(logging.WARNING):
        again = calibrate(target, saved)
    assert len(target.passes) > passes
    assert again.sizes == first.sizes
    assert json.loads(saved.read_text())["seconds"] == again.seconds
    assert ("measured again" in caplog.text) == (content != b'{"sizes": [1]}')


def test_other_sizes_are_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = tmp_path / "x.json"
    calibrate(made(monkeypatch, max_tokens=16), saved)
    found = calibrate(made(monkeypatch, max_tokens=32), saved)
    assert found.sizes[-1] == 32


def test_a_folder_that_cannot_be_written_is_no_reason_to_fail(
    target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        found = calibrate(target, tmp_path / "file" / "x.json")
    assert found.cost(1) > 0
    assert "cannot be written" in caplog.text
