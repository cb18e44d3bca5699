"""The load test's figures: stages, limits, the knee, and the prompts and shapes that it uses."""

import argparse
import importlib
import json
import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specops.metrics.metrics import LOAD_SHAPES


def figures(load: SimpleNamespace, rate: float, **changed: float | None) -> dict[str, Any]:
    tally = load.record.Tally()
    for _ in range(10):
        tally.count(load.record.Reply("ab", 5, 2, 0.7, 0.4, [(0.3, 1)]), {})
    made: dict[str, Any] = load.record.summary(tally, 10, 10)
    return made | {"arrived_per_second": rate, "asked_per_second": rate} | changed


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [([], 0.95, None), ([7], 0.5, 7), ([3, 1, 2], 0.5, 2), (list(range(1, 101)), 0.95, 95)],
)
def test_a_quantile_is_one_of_the_values(
    values: list[float], q: float, expected: float | None, load: SimpleNamespace
) -> None:
    assert load.record.quantile(Counter(values), q) == expected


def test_a_request_counts_in_the_stage_in_which_it_was_sent(load: SimpleNamespace) -> None:
    stages = [load.shapes.Stage(10, rate=1), load.shapes.Stage(5, rate=8)]
    recorder = load.record.Recorder([stage.scaled(2, 0.5) for stage in stages], started=1000)
    for sent in (999, 1000, 1019, 1020, 1029, 1050):
        recorder.at(sent).answered += 1
    recorder.ended = 1030
    recorder.tallies[0].output_tokens, recorder.tallies[0].last = 600, 1024
    first, second = recorder.rows()
    assert (first["answered"], second["answered"]) == (3, 3)
    assert (first["seconds"], second["seconds"]) == (24, 10)  # the last answer took until then
    assert (first["output_tokens_per_second"], first["arrived_per_second"]) == (25, 3 / 20)
    assert (first["asked_per_second"], second["asked_per_second"]) == (0.5, 4)
    assert recorder.whole()["answered"] == recorder.requests == 6


def test_a_run_that_is_stopped_early_has_the_time_and_the_stages_that_it_had(
    load: SimpleNamespace,
) -> None:
    recorder = load.record.Recorder([load.shapes.Stage(10, users=n) for n in (1, 2, 3)], 1000)
    recorder.at(1001).answered = 30
    recorder.ended = 1015
    first, second = recorder.rows()
    assert (first["seconds"], second["seconds"]) == (10, 5)
    assert recorder.whole()["answered_per_second"] == 2


def test_the_users_of_a_stage_are_those_who_were_there(
    load: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(load.record.time, "time", lambda: now[0])
    stages = [load.shapes.Stage(10, users=2), load.shapes.Stage(10, users=1)]
    master, worker = (load.record.Recorder(stages, 1000) for _ in range(2))
    for at, change in ((1000, +1), (1005, +1), (1013, -1), (1018, -1)):
        now[0] = at
        worker.count_users(change)
        if at == 1005:
            master.add(json.loads(json.dumps(worker.take())))
    master.add(worker.take())
    now[0] = 1019
    assert [stage["users"] for stage in master.rows()] == [1.5, 11 / 9]
    assert [stage["asked_users"] for stage in master.rows()] == [2, 1]
    assert master.whole()["users"] == 26 / 19


def test_tokens_and_first_tokens_are_charted_when_they_came(
    load: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load.record.time, "time", lambda: 1010.0)
    recorder = load.record.Recorder([load.shapes.Stage(10, users=1)], 1000)
    stream = load.record.Reply("", 2, 5, 7.5, 2.0, [(1.0, 2), (4.0, 2)])  # sent after 2.5 seconds
    recorder.at(1003).count(stream, {})
    recorder.at(1003).count(load.record.Reply("", 2, 3, 5.0), {})
    recorder.ended = 1010.0
    pieces = recorder.over_time(5)
    assert [piece["seconds"] for piece in pieces] == [2, 4, 6, 8, 10]
    tokens = [piece["output_tokens_per_second"] * 2 for piece in pieces]
    assert tokens == [0, 0, 3, 0, 5]
    assert [piece["ttft_p95"] for piece in pieces] == [None, None, 2.0, None, None]
    drawn = importlib.import_module("charts").svg(pieces)
    for _, _, lines in importlib.import_module("charts").CHARTS:
        assert all(f">{label}<" in drawn for label, _ in lines.values())
    paths = "".join(re.findall('d="([^"]*)" class="line"', drawn))
    assert re.findall(r"[ML]", paths) == [*"MLLLLMM"]


def test_the_report_tells_what_was_known_and_how_long_prompts_waited(
    load: SimpleNamespace,
) -> None:
    costs = load.prefill.PassCosts.read(
        'specops_pass_cost_seconds{kind="tokens",size="1"} 0.01\n'
        'specops_pass_cost_seconds{kind="tokens",size="101"} 0.11\n'
        'specops_pass_cost_seconds{kind="draft_tokens",size="1"} 9.0\n'
        'specops_pass_cost_seconds{kind="attention",size="1"} 1.0\n'
    )
    assert costs.alone(51, 0) == pytest.approx(0.06 + 51 * 52 / 2e6)
    assert costs.alone(303, 1000) == pytest.approx(0.33 + (303_000 + 303 * 304 / 2) / 1e6)
    assert load.prefill.PassCosts.read("no such metric") is None
    recorder = load.record.Recorder([load.shapes.Stage(10, users=1)], 0)
    for size, cached, found in (
        (128, 100, {"text": 3}),
        (129, 0, {"history": 1}),
        (2049, None, {}),
    ):
        told = {"cached_tokens": cached, "passes": 2, "found_in": found, "alone": 0.25}
        recorder.at(0).count(load.record.Reply("", size, 5, 2.0, 0.5, (), **told), {})
    report = load.summary.Report(recorder, options(load), "")
    whole = report.whole
    assert whole["cached_share"] == 100 / 257
    assert whole["tokens_per_pass"] == 2
    assert (whole["slowdown_count"], whole["slowdown_p50"]) == (3, 2)
    counts = [whole[f"{size}_count"] for size in load.record.SIZES]
    assert counts == [1, 1, 0, 1]
    assert load.summary.found_in(whole) == "text 75%, history 25%"
    lines = "\n".join(report.lines())
    assert "prompt tokens known: 38.9 %, tokens a pass: 2, accepted drafts from: text 75%" in lines
    assert "warning" not in lines
    report.whole["repeated_share"] = 0.21
    assert "warning: 21% of the prompts were sent before" in "\n".join(report.lines())


def test_answers_that_come_after_the_last_stage_take_their_time(load: SimpleNamespace) -> None:
    recorder = load.record.Recorder((load.shapes.Stage(10, users=2),), started=1000)
    recorder.ended = 1010
    for ended in (1008.0, 1016.0):
        tally = recorder.at(1001)
        tally.answered, tally.output_tokens = tally.answered + 1, tally.output_tokens + 40
        tally.last = ended
    whole = recorder.whole()
    assert (whole["output_tokens_per_second"], whole["answered_per_second"]) == (5, 0.125)


def test_figures_of_workers_add_up(load: SimpleNamespace) -> None:
    stages = (load.shapes.Stage(10, users=1),)
    worker, master = (load.record.Recorder(stages, 0) for _ in range(2))
    for tokens in (3, 4):
        worker.at(5).count(load.record.Reply("", 2, tokens, latency=tokens / 10), {})
        master.add(json.loads(json.dumps(worker.take())))
    whole = master.whole()
    assert (whole["answered"], whole["output_tokens"], whole["latency_p99"]) == (2, 7, 0.4)
    assert worker.whole()["answered"] == 0
    shares = load.record.summary(load.record.Tally(answered=6, refused=3, failed=1), 5, 5)
    assert (shares["refused_share"], shares["failed_share"]) == (0.3, 0.1)
    assert shares["arrived_per_second"] == 2


def test_times_of_a_request_have_the_fields_definitions(load: SimpleNamespace) -> None:
    chunks = [(1.0, 1, 1), (1.2, 2, 2), (1.3, 1, 1)]
    reply = load.record.Reply("abcd", 5, 4, 0.7, 0.4, load.record.token_gaps(chunks, 4))
    assert reply.tpot == pytest.approx(0.1)
    tally = load.record.Tally()
    tally.count(reply, load.slo.goodput_limits("ttft:400, tpot:101 e2el:700"))
    tally.count(reply, load.slo.goodput_limits("ttft:399"))
    whole = load.record.Reply("abcd", 5, 4, 0.7)
    tally.count(whole, load.slo.goodput_limits("ttft:1"))  # it has no first token
    assert (tally.answered, tally.good) == (3, 2)
    assert tally.spreads["itl"] == {0.1: 6}
    assert (tally.spreads["ttft"], tally.spreads["latency"]) == ({0.4: 2}, {0.7: 3})
    figures = load.record.summary(tally, 2, 2)
    assert (figures["good_per_second"], figures["input_tokens_per_second"]) == (1, 7.5)
    one = load.record.Reply("a", 5, 1, 0.7, 0.4)
    assert one.tpot is None


def test_where_a_protocol_counts_no_tokens_they_are_spread_over_the_chunks(
    load: SimpleNamespace,
) -> None:
    chunks = [(0.0, None, 2), (1.0, None, 6), (1.5, None, 0), (2.0, None, 2)]
    gaps = load.record.token_gaps(chunks, 5)
    assert gaps == [(1.0, 3), (1.0, 1)]
    assert load.record.token_gaps(chunks[:1], 5) == []


FOUND = {"text": 1}
USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
DETAILS = {"input_tokens_details": {"cached_tokens": 3}}
EVENTS: dict[str, list[dict[str, Any]]] = {
    "generate": [
        {"text": "ab", "tokens": [{}, {}]},
        {"finish_reason": "stop", "generated_text": "", "prompt_tokens": 7, "generated_tokens": 2}
        | {"details": {"cached_prompt_tokens": 3, "sequence_steps": 1, "accepted_found_in": FOUND}},
    ],
    "openai": [
        {"choices": [{"text": "ab"}], "usage": None},
        {"choices": [], "usage": USAGE, "timings": {"steps": 1, "accepted_found_in": FOUND}},
    ],
    "chat": [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"reasoning_content": "a"}}]},
        {"choices": [{"delta": {"content": "b"}}]},
        {"choices": [], "usage": USAGE, "timings": {"steps": 1, "accepted_found_in": FOUND}},
    ],
    "responses": [
        {"type": "response.created", "response": {}},
        {"type": "response.output_text.delta", "delta": "ab"},
        {
            "type": "response.completed",
            "response": {"usage": {"input_tokens": 7, "output_tokens": 2} | DETAILS},
        },
    ],
    "messages": [
        {"type": "message_start", "message": {}},
        {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "ab"}},
        {
            "type": "message_delta",
            "usage": {"input_tokens": 4, "cache_read_input_tokens": 3, "output_tokens": 2},
        },
        {"type": "message_stop"},
    ],
    "ollama-generate": [
        {"response": "ab", "done": False},
        {"response": "", "done": True, "prompt_eval_count": 7, "eval_count": 2},
    ],
    "ollama-chat": [
        {"message": {"role": "assistant", "content": "ab"}, "done": False},
        {"message": {"content": ""}, "done": True, "prompt_eval_count": 7, "eval_count": 2},
    ],
}


@pytest.mark.parametrize("name", EVENTS)
def test_text_and_tokens_are_read_from_streams_of_every_protocol(
    name: str, load: SimpleNamespace
) -> None:
    assert set(EVENTS) == set(load.protocols.PROTOCOLS)
    protocol = load.protocols.PROTOCOLS[name]
    lines = [b"event: x", b": pause"]
    lines += [b"data: " + json.dumps(event).encode() for event in EVENTS[name]]
    read = [
        protocol.read(event) for event in load.protocols.stream_events([*lines, b"data: [DONE]"])
    ]
    assert "".join(progress.text for progress in read) == "ab"
    (whole,) = [progress.whole for progress in read if progress.whole is not None]
    assert (whole.input_tokens, whole.output_tokens) == (7, 2)
    assert whole.cached_tokens == (None if name.startswith("ollama") else 3)
    tells = name in ("generate", "openai", "chat")
    assert (whole.passes, whole.found_in) == ((1, FOUND) if tells else (None, {}))


def options(load: SimpleNamespace, *arguments: str) -> argparse.Namespace:
    """Parse the load test's options, and Locust's that they look at."""

    class Parser(argparse.ArgumentParser):
        def add_argument(self, *names: Any, **more: Any) -> Any:
            kept = {k: v for k, v in more.items() if k not in ("env_var", "include_in_web_ui")}
            return super().add_argument(*names, **kept)

    parser = Parser()
    parser.add_argument("--headless", action="store_true")
    parser.add_argument("--run-time", type=int)
    parser.add_argument("--users", dest="num_users", type=int)
    parser.add_argument("--spawn-rate", type=float)
    parser.add_argument("--tags", nargs="*")
    parser.add_argument("--exclude-tags", nargs="*")
    load.options.add_to(parser)
    parsed = parser.parse_args(arguments)
    load.options.settle(parsed)
    load.options.check(parsed)
    return parsed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--turns 0", "--turns must be at least 1"),
        ("--request-rate -1", "--request-rate must be at least 0"),
        ("--request-rate nan", "--request-rate must be at least 0"),
        ("--time-scale 0", "--time-scale must be more than 0"),
        ("--range-ratio 1", "--range-ratio must be"),
        ("--request-rate 1 --shape ramp", "--request-rate goes with the shape arrivals"),
        ("--api messages --ignore-eos", "--ignore-eos"),
        ("--api chat --drafter none", "--drafter"),
        ("--headless --users 3", "add --run-time"),
        ("--goodput ttfb:3", "ttft, tpot or e2el"),
        ("--goodput ttft:x", "'ttft:x' has no number"),
        ("--gate latency_p95", "NAME=LIMIT"),
        ("--category editor --shape ramp", "use the shape users"),
        ("--category editor --turns 2", "--turns has no effect on --category editor"),
        ("--category editor --api chat", "--api has no effect on --category editor"),
        ("--dataset pyproject.toml", "pyproject.toml cannot be read: line 1: neither JSON nor"),
        ("--repeat-share 2", "--repeat-share must be in"),
        ("--burstiness 0", "--burstiness must be more than 0"),
        ("--prefix-repetition-num-prefixes 0", "--prefix-repetition-num-prefixes must be at least"),
        ("--shape trace", "add --dataset FILE"),
        ("--category editor --repeat-share 0.5", "--repeat-share has no effect"),
        ("--request-rate 4 --tags plain", "arrivals need streams: remove --tags"),
        ("--shape ramp --exclude-tags stream", "arrivals need streams: remove --tags"),
    ],
)
def test_a_bad_option_is_refused_in_one_line(
    arguments: str, complaint: str, load: SimpleNamespace
) -> None:
    with pytest.raises(ValueError, match=complaint) as refused:
        options(load, *arguments.split())
    assert "\n" not in str(refused.value)


def test_as_many_requests_at_once_as_processes(load: SimpleNamespace) -> None:
    given = options(load, "--max-concurrency", "3", "--users", "9", "--num-prompts", "9")
    load.options.check(given, 3)
    with pytest.raises(ValueError, match="--max-concurrency must be at least 4, not 3"):
        load.options.check(given, 4)


def test_shapes_follow_the_options(load: SimpleNamespace) -> None:
    stage = load.shapes.Stage

    def stages(*arguments: str) -> Any:
        return load.options.stages(options(load, *arguments))

    assert stages("--headless") == load.shapes.FIXED["smoke"]
    assert stages("--headless", "--users", "5", "--run-time", "9") == (stage(9, users=5),)
    assert stages("--headless", "--num-prompts", "5", "--max-concurrency", "3") == (
        stage(math.inf, users=3),
    )
    assert stages("--request-rate", "2.5", "--num-prompts", "5") == (stage(math.inf, rate=2.5),)
    assert stages("--shape", "arrivals", "--time-scale", "0.5") == (stage(60, rate=4),)
    ramp = stages("--shape", "ramp", "--time-scale", "0.5", "--rate-scale", "0.1")
    assert (ramp[1].seconds, ramp[1].rate, ramp[-1].locust_users) == (10, 0.4, 5)


def test_limits_can_be_changed_and_are_on_measured_figures(load: SimpleNamespace) -> None:
    limits = load.slo.limits
    changed = limits({"failed": 1.0, "tpot_p50": 2.0}, ["failed=0.5", "tpot_p50=", "itl_p99=3"])
    assert changed == {"failed": 0.5, "itl_p99": 3.0}
    for change, complaint in {
        "failed": "NAME=LIMIT",
        "failed=b": "no number",
        "failed=nan": "no number",
        "latency_p42=1": "no such figure; similar: latency_p",
    }.items():
        with pytest.raises(ValueError, match=complaint):
            limits({}, [change])
    for kept in (load.slo.GATES, load.slo.OBJECTIVES):
        assert all(verdict.good for verdict in load.slo.judge(figures(load, 1), kept))


def test_nothing_keeps_a_limit_on_what_was_not_measured(load: SimpleNamespace) -> None:
    tally = load.record.Tally
    for counted, share, reason in (
        ({}, None, "as nothing was answered: no request has ended"),
        (
            {"refused": 3, "cancelled": 2},
            0,
            "as nothing was answered: 3 refused (429), 2 cancelled",
        ),
        ({"failed": 1}, 1, "as nothing was answered: 1 failed"),
        ({"answered": 2}, 0, "no answer has it"),
    ):
        found = load.record.summary(tally(**counted), 5, 5)
        assert found["failed_share"] == share
        assert found["ttft_mean"] is found["latency_p95"] is None
        failed, ttft = load.slo.judge(found, {"failed_share": 0.5, "ttft_p95": 1})
        assert failed.good == (share == 0)
        assert not ttft.good
        assert str(ttft) == f"ttft_p95 (at most 1): MISSED, {reason}"
    empty = load.record.summary(tally(), 5, 5)
    nothing = load.record.as_csv([empty]).splitlines()[1].split(",").count("")
    assert nothing == 5 * len(load.record.TIMES) + 8
    assert empty.pop("found_in") == {}
    for name, value in empty.items():
        assert value is None or math.isfinite(value), name


def test_a_run_without_streams_has_no_objective_on_them(load: SimpleNamespace) -> None:
    recorder = load.record.Recorder([load.shapes.Stage(10, users=1)], 0)
    recorder.at(0).count(load.record.Reply("", 2, 4, latency=1), {})

    def missed(*arguments: str) -> str:
        report = load.summary.Report(recorder, options(load, *arguments), "")
        found: str = report.missed(report.stages[0])
        return found

    typing = ("--category", "editor")
    unmeasured = [missed(*more) for more in ((), typing, ("--tags", "plain"))]
    assert unmeasured == ["no answer has it", "", ""]
    assert missed(*typing, "--objective", "latency_p95=0.5") == "latency_p95 1 > 0.5"
    assert missed("--exclude-tags", "plain")
    assert missed(*typing, "--objective", "ttft_p95=1")


def test_the_knee_is_the_last_stage_before_the_first_bad_one_and_is_drawn(
    load: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    firsts = {1: 0.0, 2: 0.9, 4: 1.1, 8: 0.0}
    stages = [figures(load, rate, ttft_p95=seconds) for rate, seconds in firsts.items()]
    found = load.slo.knee(stages, load.slo.OBJECTIVES)
    assert found["arrived_per_second"] == 2
    assert load.slo.knee(stages[2:], load.slo.OBJECTIVES) is None
    assert load.slo.knee([figures(load, 1, answered=0)], load.slo.OBJECTIVES) is None
    assert load.slo.knee([figures(load, 1, answered=0)], {}) is None
    pytest.importorskip("matplotlib")
    stages.append(load.record.summary(load.record.Tally(), 5, 5) | {"asked_per_second": 16.0})
    report = {"stages": stages, "whole": {"failed": 0}, "objectives": load.slo.OBJECTIVES}
    path = tmp_path / "a.json"
    path.write_text(json.dumps({**report, "knee": found}))
    picture = tmp_path / "a.png"
    monkeypatch.setattr("sys.argv", ["knee", f"fast={path}", "--output", str(picture)])
    importlib.import_module("bench.serving.knee").main()
    assert picture.stat().st_size > 10_000
    row = capsys.readouterr().out.strip().splitlines()[-1]
    assert row.startswith("| fast | 2.0 | 2.0 |")
    assert row.endswith("| - | - | 0 |")


def test_fixed_shapes_end_and_all_have_their_mark_on_the_dashboards(load: SimpleNamespace) -> None:
    for stages in load.shapes.FIXED.values():
        total = sum(stage.seconds for stage in stages)
        assert total <= 900
        assert load.shapes.stage_at(stages, total - 0.01) == len(stages) - 1
        assert load.shapes.stage_at(stages, total) is None
    stages = (load.shapes.Stage(10, users=1), load.shapes.Stage(5, users=8))
    at = [load.shapes.stage_at(stages, second) for second in (0, 9, 10, 14, 15)]
    assert at == [0, 0, 1, 1, None]
    assert {*load.shapes.SHAPES, "other"} == set(LOAD_SHAPES)
