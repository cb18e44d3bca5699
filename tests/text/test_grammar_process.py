"""Grammars that exceed a limit cost their own request an error, and the process a restart."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from specops.request import Grammar, GrammarKind
from specops.text.confined_process import ProgramProcessError
from specops.text.grammar_process import GrammarProcess
from specops.text.grammar_source import GrammarError
from tests.http.test_hostile_grammars import nested, rules
from tests.waiting import wait

LIMIT = "too large, or nested too deeply, to be compiled: it exceeds a limit"
MARKS = {"<|end|>": 0, "<tool>": 300}
SMALL = Grammar(GrammarKind.CHOICE, '["a", "b"]')


@pytest.fixture(scope="module")
def process() -> Iterator[GrammarProcess]:
    made = GrammarProcess()
    yield made
    made.close()


def works(process: GrammarProcess) -> bool:
    return bool(process.tried(SMALL, 0, MARKS, 400).text)


@pytest.mark.parametrize("kind", [GrammarKind.LARK, GrammarKind.JSON_SCHEMA])
def test_what_takes_too_much_beside_tools_is_refused_and_the_next_is_not(
    kind: GrammarKind, process: GrammarProcess
) -> None:
    """By itself it comes over HTTP, in `tests.http.test_hostile_grammars`."""
    text = rules(2675) if kind is GrammarKind.LARK else json.dumps(nested(1200))
    said = Grammar(kind, text)
    with pytest.raises(GrammarError, match=LIMIT):
        process.tried(Grammar(GrammarKind.LARK, "start: @said", said=said), 0, MARKS, 400)
    assert works(process)


def test_the_reason_is_short_however_long_the_grammar_is(process: GrammarProcess) -> None:
    with pytest.raises(GrammarError, match="too deeply nested") as caught:
        process.tried(Grammar(GrammarKind.LARK, f"start: {'(' * 60_000}"), 0, MARKS, 400)
    assert len(str(caught.value)) < 2000


def test_a_grammar_may_name_the_tokens_of_the_model(process: GrammarProcess) -> None:
    named = Grammar(GrammarKind.LARK, "start: <tool> /a+/ <[300]> <|end|>")
    assert process.tried(named, 0, MARKS, 400).text
    with pytest.raises(GrammarError, match="unknown special token"):
        process.tried(Grammar(GrammarKind.LARK, "start: <other>"), 0, MARKS, 400)


def test_the_memory_of_a_grammar_is_measured(process: GrammarProcess) -> None:
    values = Grammar(GrammarKind.CHOICE, json.dumps(["x" * 16_000]))
    if sys.platform == "linux":
        assert 4 << 20 < process.tried(values, 0, MARKS, 400).bytes < 8 << 20
    assert process.tried(SMALL, 0, MARKS, 400).bytes < 1 << 20


def test_a_grammar_that_nobody_waits_for_is_ended(
    process: GrammarProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrammarProcess, "seconds", 600.0)
    process.stop()  # nothing runs
    assert works(process)
    ended: list[Exception] = []

    def compile_for_long() -> None:
        try:
            while not ended:
                process.tried(Grammar(GrammarKind.REGEX, "(ab?c?){400}"), 0, MARKS, 400)
        except (GrammarError, ProgramProcessError) as error:
            ended.append(error)

    thread = threading.Thread(target=compile_for_long)
    thread.start()
    wait("it compiles", lambda: process._busy is not None)
    process.stop()
    thread.join()
    assert ended
    assert works(process)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_the_process_has_its_limits(process: GrammarProcess) -> None:
    assert works(process)
    number = process._child.result()._process.pid  # type: ignore[union-attr]
    limits = Path(f"/proc/{number}/limits").read_text()
    found = {line[:26].strip(): line[26:].split()[0] for line in limits.splitlines()[1:]}
    assert found["Max stack size"] == str(4 << 20)
    assert int(found["Max address space"]) < 1 << 30
    assert found["Max open files"] == "0"
    (thread,) = os.listdir(f"/proc/{number}/task")  # the filter of system calls is of one thread
    assert "Seccomp:\t2" in Path(f"/proc/{number}/task/{thread}/status").read_text()
    os.kill(number, signal.SIGKILL)
    wait("it has ended", lambda: not process._child.result().alive)  # type: ignore[union-attr]
    assert works(process)
