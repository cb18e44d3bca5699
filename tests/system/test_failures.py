"""Failures of callbacks are counted each time, and logged once a minute for each kind."""

import logging

import pytest

from specops.system.failures import _MAX_KINDS, Failures, OncePerMinute, SparseWarnings


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_kind_passes_once_a_minute_and_says_what_was_left_out() -> None:
    clock = Clock()
    lines = OncePerMinute(clock)
    assert [lines.skipped("a"), lines.skipped("b"), lines.skipped("a")] == [0, 0, None]
    clock.now += 59
    assert lines.skipped("a") is None
    clock.now += 1
    assert [lines.skipped("a"), lines.skipped("b"), lines.skipped("a")] == [2, 0, None]


def test_made_up_kinds_take_no_memory_and_no_lines() -> None:
    clock = Clock()
    lines = OncePerMinute(clock)
    passed = [lines.skipped(number) for number in range(10_000)]
    assert passed.count(0) == _MAX_KINDS == len(lines._kinds)
    clock.now += 60
    assert lines.skipped("later") == 0
    assert len(lines._kinds) == 1


def test_every_failure_is_counted_and_a_kind_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counted: list[str] = []
    clock = Clock()
    failures = Failures(counted.append, clock)

    def fail(error: Exception) -> None:
        with failures.report_errors("tick"):
            raise error

    for _ in range(1000):
        fail(OSError(107, "not connected"))
        fail(ValueError("a state"))
    assert counted == ["tick"] * 2000
    assert len(caplog.records) == 2
    clock.now += 60
    fail(ValueError("a state"))
    assert caplog.records[-1].fields == {"where": "tick", "left_out": 999}  # type: ignore[attr-defined]
    assert caplog.records[-1].exc_info


def test_the_end_of_the_process_is_no_failure() -> None:
    failures = Failures(lambda _: None)
    with pytest.raises(KeyboardInterrupt), failures.report_errors("tick"):
        raise KeyboardInterrupt


def test_a_librarys_warnings_pass_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("a library")
    logger.addFilter(SparseWarnings())
    caplog.set_level(logging.INFO)
    for number in range(100):
        logger.warning("Invalid HTTP request received.")
        logger.error("socket %d broke", number)
        logger.info("started %d", number)
    levels = [record.levelno for record in caplog.records]
    assert levels.count(logging.WARNING) == levels.count(logging.ERROR) == 1
    assert levels.count(logging.INFO) == 100
