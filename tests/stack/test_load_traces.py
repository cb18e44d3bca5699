"""Traces of real traffic: each format by a file of its kind with a tenth of its lines broken."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.stack.support import ROOT
from tests.stack.test_load_prompts import spelled, tokens, workload
from tests.stack.test_load_report import options
from tests.stack.test_load_test import StandIn, run_locust
from tests.waiting import printed

Line = Callable[[int], str]
BEGAN = datetime(2023, 11, 16, 18, 15, 46, 680590, UTC)


def mooncake(n: int) -> str:
    row = {"timestamp": 3000 * n, "input_length": 600 + n, "output_length": 9 + n}
    return json.dumps(row | {"hash_ids": [0, n + 1]})


def bailian(n: int) -> str:
    row = {"chat_id": n, "parent_chat_id": -1, "timestamp": 3.0 * n, "type": "text", "turn": 1}
    row |= {"input_length": 600 + n, "output_length": 9 + n}
    return json.dumps(row | {"hash_ids": [0, *(50 * n + k for k in range(1, 38))]})


def azure(n: int, zone: str = "") -> str:
    time = (BEGAN + timedelta(seconds=3 * n)).replace(tzinfo=None)
    return f"{time.isoformat(' ')}0{zone},{600 + n},{9 + n}"


def burst(n: int) -> str:
    return f"{5 + 3 * n},ChatGPT,{600 + n},{9 + n},{609 + 2 * n},Conversation log"


def own(n: int) -> str:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"ask {n}"}]
    row = {"messages": said} if n % 2 else {"prompt": f"ask {n}"}
    return json.dumps(row | {"output_tokens": 9 + n, "timestamp": 3 * n})


AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
# Name: first line, line n, a broken line, and what is said of it.
FORMATS: dict[str, tuple[str, Line, str, str]] = {
    "mooncake": ("", mooncake, '{"hash_ids": [1], "input_length": 5}', "no 'output_length'"),
    "mooncake, cut off": ("", mooncake, mooncake(3)[:-9], "not JSON"),
    "mooncake, without ids": ("", mooncake, mooncake(3).replace("[0, 4]", "7"), "hash_ids is no"),
    "bailian": ("", bailian, bailian(1).replace("601", "-601"), "input_length is -601"),
    "azure 2023": (AZURE, azure, "2023-11-16 18:15:46.6805900,374", "2 fields instead of 3"),
    "azure 2024": (AZURE, lambda n: azure(n, "+00:00"), "yesterday,374,4", "isoformat"),
    "burstgpt": (BURST, burst, "5,GPT-4,40,0,40,API log", "failed: 0 response tokens"),
    "own": ("", own, '{"text": "x"}', "no 'prompt'"),
    "own, no UTF-8": ("", own, '{"prompt": "\udcff"}', "not UTF-8"),
    "own, no object": ("", own, "[]", "not an object"),
    "own, no time": ("", own, '{"prompt": "x", "timestamp": NaN}', "timestamp is nan"),
}


def write(path: Path, name: str, lines: int = 100) -> Path:
    """A file in which line 5 of each ten is broken."""
    first, line, broken, _ = FORMATS[name]
    rows = [broken if n % 10 == 4 else line(n) for n in range(lines)]
    path.write_bytes((first + "\n".join(rows) + "\n").encode(errors="surrogateescape"))
    return path


@pytest.mark.parametrize("name", FORMATS)
def test_lines_are_read_and_broken_ones_are_left_out_by_their_numbers(
    name: str, load: SimpleNamespace, tmp_path: Path
) -> None:
    path = write(tmp_path / "trace", name)
    survey = load.traces.survey(path)
    assert (survey.entries, survey.left_out, survey.seconds) == (90, 10, 3 * 99)
    header = bool(FORMATS[name][0])
    numbers = [n + header for n in (5, 15, 25)]
    assert [reason.partition(":")[0] for reason in survey.reasons] == [f"line {n}" for n in numbers]
    assert all(FORMATS[name][3] in reason for reason in survey.reasons), survey.reasons
    assert str(survey).endswith("; and 7 more")
    parts = [[*load.traces.entries(path, n, 2)] for n in range(2)]
    first, second, *_ = (entry for pair in zip(*parts, strict=True) for entry in pair)
    assert (first.at, second.at, first.answers, second.answers) == (0, 3, (9,), (10,))
    known = (second.turns, second.system) if name.startswith("own") else second.length
    assert known == ((("ask 1",), "Be brief.") if name.startswith("own") else 601)
    assert sorted(entry.at for part in parts for entry in part) == [
        pytest.approx(3 * n, abs=1e-4) for n in range(100) if n % 10 != 4
    ]
    assert [*load.traces.entries(path, 2, 2)] == []  # it joined later


def test_data_sets_have_sharegpts_layout_or_texts_of_our_own(
    load: SimpleNamespace, tmp_path: Path
) -> None:
    said = [("system", "s"), ("human", "a"), ("gpt", "b" * 400), ("human", "c"), ("gpt", "d" * 32)]
    row = {"conversations": [{"from": who, "value": text} for who, text in said]}
    path = tmp_path / "share.json"
    for text in (json.dumps([row] * 3), json.dumps([row] * 3, indent=1)):
        path.write_text(text)
        asks = workload(load, "--dataset", str(path), "--turns", "9", "--users", "1")
        found = [asks.conversation() for _ in range(4)]
        assert found[3] is None
        assert asks.exhausted
        assert {(c.turns, c.tokens, c.system) for c in found[:3]} == {(("a", "c"), (100, 8), "s")}
    path.write_text(json.dumps([row] * 3)[:-300])
    assert "line 3: not JSON" in str(load.traces.survey(path))
    path.write_text("")
    with pytest.raises(ValueError, match=r"share\.json cannot be read: it is empty"):
        load.traces.survey(path)


def test_equal_ids_become_equal_texts_and_what_does_not_fit_is_cut_and_counted(
    load: SimpleNamespace, tmp_path: Path
) -> None:
    path = write(tmp_path / "trace.jsonl", "mooncake")
    given = ("--dataset", str(path), "--seed", "4")
    asks = workload(load, *given, encode=spelled)
    first, second = (asks.conversation() for _ in range(2))
    shared = len(load.texts.os.path.commonprefix([first.turns[0], second.turns[0]]))
    assert tokens(first.turns[0][:shared]) == pytest.approx(512, rel=0.05)
    assert tokens(first.turns[0]) == pytest.approx(600, rel=0.05)
    assert not first.cut
    assert workload(load, *given, encode=spelled).conversation() == first
    small = workload(load, *given, encode=spelled, context=256).conversation()
    assert small.cut
    assert tokens(small.turns[0]) + small.tokens[0] <= 256
    path.write_text(json.dumps({"prompt": "äöü " * 200}) + "\n" + json.dumps({"prompt": "short"}))
    asks = workload(load, *given, encode=spelled, context=256)
    long, short = (asks.conversation() for _ in range(2))
    assert (long.cut, short.cut) == (True, False)
    assert ("äöü " * 200).startswith(long.turns[0].rstrip("\ufffd"))
    assert 100 < tokens(long.turns[0]) <= 256


def test_times_are_kept_unless_users_or_a_rate_are_asked_for(
    load: SimpleNamespace, tmp_path: Path
) -> None:
    given = ("--dataset", str(write(tmp_path / "a.csv", "azure 2023")))
    shape, stages = load.options.shape, load.options.stages
    trace = options(load, *given, "--headless", "--trace-speed", "0.1")
    assert shape(trace) == "trace"
    assert stages(trace)[0].rate == pytest.approx(0.1 * 90 / 297)
    assert shape(options(load, *given, "--users", "3")) == "users"
    assert shape(options(load, *given, "--request-rate", "3")) == "arrivals"
    for more in (("--repeat-share", "0.5"), ("--input-len", "9"), ("--trace-speed", "0")):
        with pytest.raises(ValueError, match=more[0]):
            options(load, *given, *more)
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}')
    with pytest.raises(ValueError, match="has no times"):
        options(load, "--dataset", str(tmp_path / "own.jsonl"), "--shape", "trace")


def test_the_page_reads_files_of_one_folder_alone(
    load: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "datasets").mkdir()
    monkeypatch.setattr(load.options, "DATASETS", tmp_path / "datasets")
    (tmp_path / "secret").write_text("a")
    (tmp_path / "datasets" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "datasets" / "a.csv").write_text("a")
    load.options.check_page_dataset("a.csv")
    for name in ("../secret", "/etc/passwd", str(tmp_path / "secret"), "link", "..", "x/../a.csv"):
        with pytest.raises(ValueError, match=r"must be the name of a file in .*; not a path"):
            load.options.check_page_dataset(name)
    with pytest.raises(ValueError, match=r"where there is a\.csv.*'b\.csv' is not there"):
        load.options.check_page_dataset("b.csv")


MEASURE = """
import resource, sys
from pathlib import Path
import traces
path = Path(sys.argv[1])
survey = traces.survey(path)
read = sum(1 for _ in traces.entries(path, 0, 2)) + sum(1 for _ in traces.entries(path, 1, 2))
if sys.platform == "darwin":
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
else:  # there it would be that of the process that has forked this one
    status = dict(line.split(":", 1) for line in open("/proc/self/status"))
    peak = int(status["VmHWM"].split()[0]) * 1024
print(survey.entries, read, peak)
"""


@pytest.mark.parametrize("name", ["mooncake", "list"])
def test_a_hundred_thousand_lines_fit_into_a_hundred_megabytes(name: str, tmp_path: Path) -> None:
    path = tmp_path / "trace"
    if name == "list":
        row = '{"conversations": [{"from": "human", "value": "' + "a" * 2000 + '"}]}'
        path.write_text("[" + ",\n".join([row] * 100_000) + "]")
        lines = 100_000
    else:
        write(path, name, lines=100_000)
        lines = 90_000
    survey, read, peak = map(int, printed(MEASURE, path, cwd=ROOT / "loadtest").split())
    assert survey == read == lines
    assert peak < 100e6


def test_each_line_is_sent_once_and_ends_the_run(tmp_path: Path) -> None:
    path, api = write(tmp_path / "own.jsonl", "own", lines=40), StandIn(chat=True)
    asked = ("--dataset", str(path), "--trace-speed", "60", "--processes", "2")
    found = run_locust(api, tmp_path, *asked)
    assert found.status == 0, found.output
    prompts = sorted(body["prompt"] for body in api.asked)
    assert prompts == sorted(f"ask {n}" for n in range(40) if n % 10 != 4)
    whole: dict[str, Any] = found.report["whole"]
    assert (whole["answered"], whole["repeated"], whole["cut"]) == (36, 0, 0)
    assert "own.jsonl: 36 lines, 4 more skipped: line 5: no 'prompt'" in found.output
