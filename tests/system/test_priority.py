"""Threads that compute get a lower priority; other threads keep theirs."""

import os
import sys
import threading

import pytest

from specops.system import priority
from specops.system.priority import lower_priority

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no priorities of threads")


def own() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_a_thread_gives_way_and_so_do_those_that_it_starts() -> None:
    found: list[int] = []
    before = own()

    def computing() -> None:
        lower_priority()
        found.append(own())
        other = threading.Thread(target=lambda: found.append(own()))
        other.start()
        other.join()

    thread = threading.Thread(target=computing)
    thread.start()
    thread.join()
    assert found == [min(19, before + priority._STEP)] * 2  # 19: nothing is lower
    assert own() == before


def test_a_priority_that_cannot_be_set_is_logged_and_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*arguments: int) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(os, "setpriority", refuse)
    lower_priority()
    assert "not here" in caplog.text
