"""Costs are measured at the first start and checked at each later one; the least times are kept."""

import json
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specops.runtime import calibration
from specops.runtime.batch import Batch
from specops.runtime.calibration import calibrate
from specops.runtime.cost_model import CostModel
from specops.runtime.kernels import BLOCK_TOKENS
from tests.simulated_target import PAIR_SECONDS, SimulatedTarget, tinyllama


def made(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Any:
    """A simulated target, whose clock the calibration reads."""
    target = SimulatedTarget(**fields)
    monkeypatch.setattr(calibration.time, "perf_counter", target.clock)
    monkeypatch.setattr(calibration, "_ENOUGH_SECONDS", 0.5)  # of that clock
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
    # Two rounds of a pass that takes up to a fifth longer may both be that slow.
    least, most = 0.95 * (1 - scatter), 1 + max(0.05, scatter)
    for tokens in found.sizes:
        expected = 1.5 * tinyllama().cost(tokens)
        assert least * expected <= found.cost(tokens) <= most * expected
    assert found.sizes[-1] == 96
    if not scatter:
        assert found.pair_seconds == pytest.approx(1.5 * PAIR_SECONDS, rel=0.05)


def test_what_states_cost_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By a pass over a token of each slot; what is left of the time of one slot's tokens."""
    plain = tinyllama()
    model = CostModel(plain.sizes, plain.seconds, PAIR_SECONDS, 0.002)
    target = made(monkeypatch, costs=model, num_slots=5)
    target.cache.shape = replace(target.cache.shape, state_floats=16)
    for _ in range(2):  # the second one reads what the first one wrote
        found = calibrate(target, tmp_path / "costs.json")
        assert found.span_seconds == pytest.approx(0.002, rel=0.1)
        assert target.cache.used_blocks == 0
    assert max(len(batch.spans) for batch in target.passes) == 5


@pytest.mark.parametrize("max_tokens", [16, 96, 256])
def test_what_logits_cost_is_found(
    monkeypatch: pytest.MonkeyPatch, max_tokens: int, tmp_path: Path
) -> None:
    """So a draft token beside a prompt costs what it adds, however long the prompt is."""
    machine = tinyllama(logit_seconds=0.0005)
    target = made(monkeypatch, costs=machine, max_tokens=max_tokens)
    for _ in range(2):  # the second one reads what the first one wrote
        found = calibrate(target, tmp_path / "costs.json")
        assert found.logit_seconds == pytest.approx(0.0005, rel=0.05)
        for tokens in (8, 48, 64, 65, 80, 96, 256):
            if tokens <= max_tokens:
                for others in (0, tokens - 1):
                    expected = machine.cost(tokens, logits=tokens - others)
                    assert found.cost(tokens, logits=tokens - others) == pytest.approx(
                        expected, rel=0.02
                    )


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
    assert (
        cache.cached_blocks == cache.tokens == cache.allocate(0, [1, 2, 3]) == 0
    )  # slot 0 is free


def test_a_later_start_keeps_the_times_and_measures_for_a_tenth_of_a_second(
    target: Any, tmp_path: Path
) -> None:
    saved = tmp_path / "costs" / "x.json"
    first = calibrate(target, saved)
    for _ in range(3):
        passes, begun = len(target.passes), target.clock.now
        again = calibrate(target, saved)
        assert len(target.passes) > passes
        assert 0.1 <= target.clock.now - begun <= 0.1 + 1.5 * first.cost(96)
        assert (again.sizes, again.seconds) == (first.sizes, pytest.approx(first.seconds))
        assert again.pair_seconds == pytest.approx(first.pair_seconds)
    assert [item.name for item in saved.parent.iterdir()] == ["x.json"]


def test_later_starts_take_turns_in_what_they_measure(target: Any, tmp_path: Path) -> None:
    calibrate(target, tmp_path / "x.json")
    measured = set()
    for _ in range(12):
        passes = len(target.passes)
        calibrate(target, tmp_path / "x.json")
        measured |= {batch.num_tokens for batch in target.passes[passes:]}
    assert measured == {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 24, 32, 48, 64, 96}


def disturb(target: Any, times: float, disturbed: Callable[[Batch], bool]) -> Callable[[], None]:
    """Make passes take so many times as long, until the returned function is called."""
    forward = target.forward

    def slow(batch: Batch) -> Any:
        start = target.clock.now
        logits = forward(batch)
        if disturbed(batch):
            target.clock.now += (times - 1) * (target.clock.now - start)
        return logits

    def end() -> None:
        target.forward = forward

    target.forward = slow
    return end


def check(found: CostModel, *, off: float = 0.12) -> None:
    for tokens in found.sizes:
        assert found.cost(tokens) == pytest.approx(tinyllama().cost(tokens), rel=off)
    assert found.pair_seconds == pytest.approx(PAIR_SECONDS, rel=off)


def test_a_disturbed_first_round_has_no_effect(target: Any) -> None:
    passes = target.passes
    disturb(target, 8.0, lambda batch: len(passes) <= 21)
    check(calibrate(target, None), off=0.05)


def test_a_pass_that_was_disturbed_in_each_round_is_measured_again(target: Any) -> None:
    """Two passes come before two rounds of 19. Wide ones outlast a slice of the processor."""
    passes = target.passes
    disturb(target, 5.0, lambda batch: len(passes) <= 40 and batch.num_tokens > 32)
    check(calibrate(target, None), off=0.05)


@pytest.mark.parametrize(
    ("times", "widest"), [(8.0, 0), (5.0, 32), (2.0, 4)], ids=["all", "wide ones", "most"]
)
def test_later_starts_mend_times_of_a_disturbed_one(
    target: Any, tmp_path: Path, times: float, widest: int
) -> None:
    saved = tmp_path / "x.json"
    end = disturb(target, times, lambda batch: batch.num_tokens > widest)
    disturbed = calibrate(target, saved)
    assert disturbed.cost(64) > 1.5 * tinyllama().cost(64)
    end()
    for _ in range(3):
        found = calibrate(target, saved)
    check(found)


def test_a_disturbed_later_start_spoils_nothing(target: Any, tmp_path: Path) -> None:
    saved = tmp_path / "x.json"
    calibrate(target, saved)
    disturb(target, 6.0, lambda batch: True)
    for _ in range(3):
        check(calibrate(target, saved), off=0.05)


def test_logits_that_take_most_of_the_time_cast_no_doubt(target: Any, tmp_path: Path) -> None:
    """Passes over more than 64 tokens are prompts, with one row of logits: they take less."""
    forward = target.forward

    def with_logits(batch: Batch) -> Any:
        target.clock.now += 0.005 * batch.num_logits
        return forward(batch)

    target.forward = with_logits
    calibrate(target, tmp_path / "x.json")
    for _ in range(8):
        begun = target.clock.now
        calibrate(target, tmp_path / "x.json")
        assert target.clock.now - begun < 0.1 + 0.5  # one pass takes at most half a second


def test_times_of_other_passes_are_not_taken_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a longer context the pass that measures attention looks at more tokens."""
    saved = tmp_path / "x.json"
    calibrate(made(monkeypatch, context=256), saved)
    check(calibrate(made(monkeypatch, context=2048), saved), off=0.05)


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
        b'{"sizes": [1], "past": 0, "far": 0, "rows": 64, "spans": 1}',
        b'{PASSES, "seconds": [], "turn": 0}',
        b'{PASSES, "seconds": [1, 2], "turn": 0}',
        b'{PASSES, "seconds": "fast", "turn": 0}',
        b'{PASSES, "seconds": [SECONDS, NaN], "turn": 0}',
        b'{PASSES, "seconds": [-1, SECONDS], "turn": 0}',
        b'{PASSES, "seconds": [1, SECONDS], "turn": null}',
    ],
)
def test_a_damaged_file_is_measured_again_and_written_anew(
    target: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes
) -> None:
    saved = tmp_path / "x.json"
    first = calibrate(target, saved)
    kept = json.loads(saved.read_text())
    passes = json.dumps({name: kept[name] for name in ("sizes", "past", "far")})[1:-1]
    seconds = json.dumps(kept["seconds"][1:])[1:-1]
    content = content.replace(b"PASSES", passes.encode()).replace(b"SECONDS", seconds.encode())
    saved.write_bytes(content)
    before = len(target.passes)
    with caplog.at_level(logging.WARNING):
        again = calibrate(target, saved)
    assert len(target.passes) - before >= 2 * len(kept["seconds"])
    assert again.seconds == pytest.approx(first.seconds)
    assert json.loads(saved.read_text())["seconds"] == pytest.approx(kept["seconds"])
    assert ("cannot be read" in caplog.text) == (not content.startswith(b'{"sizes": [1], "past"'))


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
