"""Metrics: the page shows what was observed, and every series is there before any traffic."""

import math
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from specops.engine.model_info import ModelState
from specops.metrics.metrics import Metrics
from specops.metrics.series import STATES
from specops.request import (
    PLACES,
    Draft,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    SourceStats,
    Step,
    StepKind,
)
from specops.system.memory import read_memory
from specops.system.resources import read_disk, read_faults

ASKED = GenerationRequest(request_id="its/id/7", prompt_tokens=(1, 2, 3), max_new_tokens=9)


class Readable(Metrics):
    """Metrics with readable values and a clock that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(clock=lambda: self.now)

    def value(self, name: str, /, **labels: str) -> float:
        value = self.registry.get_sample_value(f"specops_{name}", labels)
        assert value is not None, f"no series {name} {labels}"
        return value

    def values(self, names: str, /, **labels: str) -> list[float]:
        """Values of several series with the same labels."""
        return [self.value(name, **labels) for name in names.split()]


@pytest.fixture
def metrics() -> Readable:
    return Readable()


def draft(
    drafter: str, tokens: int, accepted: int, probs: tuple[float, ...] = (), adaptive: bool = True
) -> Draft:
    """A verified draft of so many tokens; a lookup finds them in earlier requests."""
    found_in = "history" if drafter == "suffix" else ""
    return Draft((7,) * tokens, None, drafter, probs, accepted, adaptive, found_in)


def verify_step(draft_tokens: int = 4, accepted: int = 2) -> Step:
    """A pass in which one request verifies one draft of the draft model."""
    return Step(
        StepKind.VERIFY,
        0.04,
        decoding=1,
        emitted_tokens=accepted + 1,
        drafts=[draft("draft", draft_tokens, accepted)],
        draft_seconds=0.5,
    )


def test_nothing_is_counted_before_any_traffic(metrics: Readable) -> None:
    """`tests/stack/test_dashboards.py` checks which series there are, with which labels."""
    shown = {
        sample.name.removeprefix("specops_")
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.value and sample.name.startswith("specops_")
    }
    machine = {"memory_bytes", "memory_pressure_seconds_total", "page_faults_total"}
    machine |= {"cpus", "cpu_periods_total", "disk_bytes", "oom_kills_total"}
    machine |= {"cpu_throttled_periods_total", "cpu_throttled_seconds_total"}
    machine |= {"template_processes_ended_total"}  # of this program, in other tests
    gauges = {"avg_jump", "draft_length", "draft_head_agreement", "estimated_speedup"}
    assert shown - machine == {"model_info", "model_state", *gauges}
    assert all(math.isnan(metrics.value(name)) for name in gauges)


def test_page_parses_and_holds_no_creation_times(metrics: Readable) -> None:
    page, content_type = metrics.expose()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    samples = [
        sample.name
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    ]
    assert "specops_latency_seconds_bucket" in samples
    assert not [name for name in samples if name.endswith("_created")]
    page, content_type = metrics.expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert page.endswith(b"# EOF\n")


def test_the_machine_is_read_when_asked(metrics: Readable) -> None:
    assert metrics.value("memory_bytes", kind="limit") == read_memory().limit
    assert metrics.value("disk_bytes", kind="total") == read_disk(Path())["total"]
    assert metrics.value("cpus") > 0
    before = read_faults()["minor"]
    assert before <= metrics.value("page_faults_total", kind="minor") <= read_faults()["minor"]


def test_verify_step_counts_tokens_drafts_and_positions(metrics: Readable) -> None:
    metrics.observe_step(verify_step())
    metrics.observe_step(verify_step(accepted=1))
    assert metrics.value("target_steps_total", kind="verify") == 2
    assert metrics.value("target_step_seconds_sum", kind="verify") == pytest.approx(0.08)
    totals = "generated_tokens_total decode_tokens_total sequence_steps_total draft_seconds_total"
    assert metrics.values(totals) == [5, 5, 2, 1.0]
    drafted = "drafts_total draft_tokens_total accepted_tokens_total"
    assert metrics.values(drafted, drafter="draft") == [2, 8, 3]
    assert metrics.values(drafted, drafter="suffix") == [0, 0, 0]
    at = "draft_tokens_per_position_total accepted_tokens_per_position_total"
    for number, accepted in (("1", 2), ("2", 1), ("3", 0), ("4", 0)):
        assert metrics.values(at, drafter="draft", position=number) == [2, accepted]


def test_prefill_step_is_no_jump(metrics: Readable) -> None:
    step = Step(StepKind.PREFILL, 0.2, prompt_tokens=128, emitted_tokens=1, first_tokens=1)
    metrics.observe_step(step)
    cached = Step(StepKind.PREFILL, 0.2, prompt_tokens=8, cached_tokens=100, preempted=3)
    metrics.observe_step(cached)
    assert metrics.values("prompt_tokens_total generated_tokens_total") == [136, 1]
    assert metrics.values("decode_tokens_total sequence_steps_total") == [0, 0]
    assert all(map(math.isnan, metrics.values("avg_jump draft_length")))
    assert metrics.value("cached_prompt_tokens_total") == 100
    assert metrics.value("preemptions_total") == 3


def test_a_mixed_pass_counts_its_prompts_and_its_decoding_requests(metrics: Readable) -> None:
    metrics.observe_step(
        Step(
            StepKind.MIXED,
            0.1,
            decoding=3,
            prompt_tokens=40,
            budget_tokens=50,
            emitted_tokens=6,  # three decoded, one accepted, two prompts ended
            first_tokens=2,
            drafts=[draft("draft", 2, 1)],
        )
    )
    names = "generated_tokens_total decode_tokens_total sequence_steps_total avg_jump"
    assert metrics.values(names) == [6, 4, 3, 4 / 3]
    for use, tokens in (("decoded", 3), ("verified", 2), ("prompt", 40)):
        assert metrics.value("pass_tokens_total", use=use) == tokens
    assert metrics.values("prompt_tokens_total prompt_budget_tokens_total") == [40, 50]


def test_drafts_of_several_drafters_in_one_pass_are_told_apart(metrics: Readable) -> None:
    """A draft of a grammar may be longer than the counted positions."""
    drafts = [draft("draft", 3, 3), draft("suffix", 5, 0), draft("suffix", 1, 1)]
    drafts += [draft("grammar", 20, 20, adaptive=False)]
    step = Step(StepKind.VERIFY, 0.1, decoding=4, emitted_tokens=27, drafts=drafts)
    metrics.observe_step(step)
    names = "drafts_total draft_tokens_total accepted_tokens_total"
    found = {name: metrics.values(names, drafter=name) for name in ("draft", "suffix", "grammar")}
    assert found == {"draft": [1, 3, 3], "suffix": [2, 6, 1], "grammar": [1, 20, 20]}
    places = {name: metrics.value("accepted_tokens_found_total", found_in=name) for name in PLACES}
    assert places == dict.fromkeys(PLACES, 0) | {"draft": 3, "history": 1, "grammar": 20}
    accepted = "accepted_tokens_per_position_total"
    for drafter, at_eight in (("draft", 0), ("suffix", 0), ("grammar", 1)):
        assert metrics.value(accepted, drafter=drafter, position="1") == 1
        assert metrics.value(accepted, drafter=drafter, position="8") == at_eight


def test_promised_and_accepted_draft_tokens_are_counted_by_tenth(metrics: Readable) -> None:
    drafts = [draft("suffix", 4, 2, (1.0, 0.95, 0.42)), draft("suffix", 1, 0, (0.9,))]
    step = Step(StepKind.VERIFY, 0.1, decoding=2, emitted_tokens=4, drafts=drafts)
    metrics.observe_step(step)
    for tenth, tried, promised, kept in (("9", 3, 2.85, 2), ("4", 1, 0.42, 0), ("0", 0, 0, 0)):
        names = "draft_promises_total draft_promised_total draft_promises_kept_total"
        found = metrics.values(names, drafter="suffix", tenth=tenth)
        assert found == pytest.approx([tried, promised, kept])


def test_misses_and_declined_drafts_are_steps_without_a_draft(metrics: Readable) -> None:
    metrics.observe_step(verify_step(draft_tokens=4))
    metrics.observe_step(verify_step(draft_tokens=1, accepted=0))
    step = Step(
        StepKind.DECODE,
        0.02,
        4,
        emitted_tokens=4,
        missed_drafters=["suffix", "suffix"],
        declined_drafters=["draft", "cascade"],
        failed_drafters=["draft"],
    )
    metrics.observe_step(step)
    assert metrics.values("draft_misses_total drafts_total", drafter="suffix") == [2, 0]
    assert metrics.values("draft_misses_total drafts_total", drafter="draft") == [0, 2]
    assert metrics.values("drafter_failures_total", drafter="draft") == [1]
    names = "chosen_draft_tokens_count chosen_draft_tokens_sum"
    assert metrics.values(names, drafter="draft") == [3, 5]
    assert metrics.values(names, drafter="cascade") == [1, 0]
    for most, count in (("0.0", 1), ("1.0", 2)):
        assert metrics.value("chosen_draft_tokens_bucket", drafter="draft", le=most) == count
    assert metrics.values("sequence_steps_total avg_jump draft_length") == [6, 8 / 6, 5 / 6]


def test_only_lengths_that_the_controller_chose_are_counted_as_chosen(metrics: Readable) -> None:
    drafts = [draft("suffix", 3, 1, adaptive=False), draft("grammar", 5, 5, adaptive=False)]
    drafts += [draft("suffix", 2, 1)]
    metrics.observe_step(Step(StepKind.VERIFY, 0.1, decoding=3, emitted_tokens=10, drafts=drafts))
    names = "draft_tokens_total chosen_draft_tokens_count chosen_draft_tokens_sum"
    assert metrics.values(names, drafter="suffix") == [5, 1, 2]
    assert metrics.values("draft_tokens_total", drafter="grammar") == [5]
    count = "specops_chosen_draft_tokens_count"
    assert metrics.registry.get_sample_value(count, {"drafter": "grammar"}) is None


def test_the_controllers_estimates_are_read_when_asked(metrics: Readable) -> None:
    costs = [("tokens", 2, 0.013), ("attention", 1, 0.002)]
    speedup = 1.5
    metrics.watch_controller(lambda: speedup, lambda: costs)
    assert math.isnan(metrics.value("estimated_speedup"))  # of no pass
    metrics.observe_step(verify_step())
    assert metrics.value("estimated_speedup") == 1.5
    assert metrics.value("pass_cost_seconds", kind="attention", size="1") == 0.002
    speedup, costs[0] = 1.25, ("tokens", 2, 0.02)
    assert metrics.value("estimated_speedup") == 1.25
    speedup = 5.0  # of the latest steps; the last minute brought fewer tokens a pass
    assert metrics.value("estimated_speedup") == metrics.value("avg_jump") == 3
    assert metrics.value("pass_cost_seconds", kind="tokens", size="2") == 0.02
    metrics.now += 60
    assert math.isnan(metrics.value("estimated_speedup"))


def test_average_jump_forgets_what_is_older_than_a_minute(metrics: Readable) -> None:
    metrics.observe_step(verify_step(accepted=4))
    metrics.now += 59
    metrics.observe_step(verify_step(accepted=0))
    assert metrics.value("avg_jump") == 3.0
    metrics.now += 1
    assert metrics.value("avg_jump") == 1.0
    metrics.now += 59
    assert math.isnan(metrics.value("avg_jump"))
    metrics.observe_step(verify_step(accepted=3))
    assert metrics.value("avg_jump") == 4.0


def test_gauges_show_the_last_step_the_cache_and_the_model(metrics: Readable) -> None:
    sizes = {"slots": 1000, "limit": 4000}
    cache = SimpleNamespace(
        tokens=300, cached_tokens=50, num_blocks=64, available_blocks=55, used_blocks=9,
        shared_blocks=4, cached_blocks=1, recurrent=SimpleNamespace(used_bytes=3000),
    )  # fmt: skip
    metrics.set_model({"name": "demo", "quant": "int8-128"}, 4, 4096, sizes)
    metrics.watch_cache(cache)
    assert metrics.value("model_info", name="demo", quant="int8-128") == 1
    metrics.observe_step(Step(running=2))
    metrics.observe_step(Step(running=1, snapshots={"taken": 3, "dropped": 1}))
    cache.tokens = 120
    assert metrics.values("requests_running slots") == [1, 4]
    assert metrics.values("kv_tokens kv_kept_tokens kv_capacity_tokens") == [120, 50, 4096]
    for state, blocks in (("used", 9), ("shared", 4), ("kept", 1), ("free", 54)):
        assert metrics.value("kv_blocks", state=state) == blocks
    assert metrics.value("kv_usage_ratio") == 9 / 64
    for kind, count in (sizes | {"snapshots": 3000}).items():
        assert metrics.value("state_bytes", kind=kind) == count
    for event, count in (("taken", 3), ("used", 0), ("dropped", 1)):
        assert metrics.value("state_snapshots_total", event=event) == count


@pytest.mark.parametrize("reason", FinishReason)
def test_finished_request_is_counted_by_outcome_and_timed(
    metrics: Readable, reason: FinishReason
) -> None:
    stats = GenerationStats(
        generated_tokens=9, queue_seconds=1.5, prefill_seconds=0.5, cached_prompt_tokens=2
    )
    metrics.observe_finish(ASKED, reason, stats, 3.0)
    metrics.observe_finish(ASKED, reason, None, 1.0)
    assert metrics.value("requests_total", outcome=reason.value) == 2
    assert metrics.value("prefix_hits_total") == 1  # counted where requests are: a share of them
    assert metrics.value("latency_seconds_sum") == 4.0
    assert metrics.value("queue_wait_seconds_sum") == 1.5
    assert metrics.value("time_to_first_token_seconds_count") == 1
    assert metrics.value("time_to_first_token_seconds_sum") == 2.0
    useful = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert metrics.value("wasted_tokens_total") == (0 if useful else 9)
    assert metrics.values("request_prompt_tokens_count request_prompt_tokens_sum") == [2, 6]
    lengths = metrics.values("request_generated_tokens_count request_generated_tokens_sum")
    assert lengths == ([1, 9] if useful else [0, 0])


def test_suggestions_are_the_requests_that_go_before_others(metrics: Readable) -> None:
    asked = replace(ASKED, priority=-1)
    accepted = {"suffix": SourceStats(accepted_per_position=[3, 1])}
    stats = GenerationStats(
        prompt_tokens=50, cached_prompt_tokens=48, generated_tokens=9, sequence_steps=4,
        sources=accepted,
    )  # fmt: skip
    for reason in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.CANCELLED):
        metrics.observe_finish(asked, reason, stats, 0.4)
    for priority in (0, 1):  # a chat, and a prompt that is read ahead
        other = replace(ASKED, priority=priority)
        metrics.observe_finish(other, FinishReason.STOP, stats, 0.4)
    assert metrics.value("suggestions_total", outcome="cancelled") == 1
    assert metrics.value("suggestions_total", outcome="stop") == 1
    assert metrics.values("suggestion_seconds_count suggestion_seconds_sum") == [2, 0.8]
    assert metrics.value("suggestion_steps_total") == 8
    for use, tokens in (("cached", 96), ("computed", 4), ("decoded", 16), ("accepted", 8)):
        assert metrics.value("suggestion_tokens_total", use=use) == tokens


def test_embeddings_have_prompts_and_no_answer(metrics: Readable) -> None:
    asked = replace(ASKED, embed=True, more_prompts=((4,), (5, 6)))
    metrics.observe_finish(asked, FinishReason.STOP, GenerationStats(), 1.0)
    assert metrics.values("request_prompt_tokens_sum request_generated_tokens_count") == [6, 0]


def test_latencies_name_a_request_that_had_them(metrics: Readable) -> None:
    """In OpenMetrics, where Prometheus reads them; the page in Prometheus' own format has none."""
    stats = GenerationStats(generated_tokens=9, prefill_seconds=0.4)
    metrics.observe_finish(ASKED, FinishReason.STOP, stats, 3.2)
    later = replace(ASKED, request_id="its/id/8")
    metrics.observe_finish(later, FinishReason.STOP, stats, 3.5)
    page, _ = metrics.expose("application/openmetrics-text; version=1.0.0")
    found = {
        (sample.name, sample.labels["le"]): (sample.exemplar.labels, sample.exemplar.value)
        for family in openmetrics(page.decode())
        for sample in family.samples
        if sample.exemplar
    }
    assert found == {
        ("specops_latency_seconds_bucket", "4.0"): ({"request_id": "its/id"}, 3.5),
        ("specops_time_to_first_token_seconds_bucket", "0.5"): ({"request_id": "its/id"}, 0.4),
    }
    assert b"its/id" not in metrics.expose()[0]


def test_both_formats_have_the_same_series(metrics: Readable) -> None:
    classic, modern = metrics.expose()[0], metrics.expose("application/openmetrics-text")[0]
    read = (text_string_to_metric_families(classic.decode()), openmetrics(modern.decode()))
    names, others = (
        {sample.name for family in families for sample in family.samples} for families in read
    )
    assert names == others


def test_tokens_are_counted_for_clients_that_have_keys(metrics: Readable) -> None:
    metrics.observe_admitted(ASKED)

    def generated(client: str, tokens: int) -> None:
        step = Step(StepKind.DECODE, emitted_tokens=tokens, client_tokens={client: tokens})
        metrics.observe_step(step)

    generated("", 4)
    names = "client_requests_total client_prompt_tokens_total client_generated_tokens_total"
    assert metrics.values(names, client="everyone") == [1, 3, 4]
    metrics.set_clients(["alice", "key-2"])
    metrics.observe_admitted(replace(ASKED, client="alice"))
    generated("alice", 2)
    assert metrics.values(names, client="alice") == [1, 3, 2]
    assert metrics.values(names, client="key-2") == [0, 0, 0]
    with pytest.raises(KeyError):
        generated("a stranger", 1)
    page = metrics.expose()[0].decode()
    assert set(re.findall(r'client="(.*?)"', page)) == {"alice", "key-2"}


def test_endpoints_have_series_before_their_first_answer(metrics: Readable) -> None:
    metrics.set_endpoint("/generate", (200, 429))
    metrics.observe_http("/generate", 200)
    for status, count in (("200", 1), ("429", 0)):
        assert metrics.value("http_requests_total", endpoint="/generate", status=status) == count


def test_time_between_tokens_is_spread_over_a_jump(metrics: Readable) -> None:
    metrics.observe_step(Step(StepKind.VERIFY, intervals={0.02: 4}))
    assert metrics.value("inter_token_latency_seconds_sum") == pytest.approx(0.08)
    assert metrics.value("inter_token_latency_seconds_bucket", le="0.02") == 4
    assert metrics.value("inter_token_latency_seconds_bucket", le="0.01") == 0


def test_labels_have_fixed_sets_of_values(metrics: Readable) -> None:
    """A value that a client can choose would make the number of series unbounded."""
    metrics.observe_rejected("queue_full")
    assert metrics.value("requests_rejected_total", reason="queue_full") == 1
    with pytest.raises(KeyError):
        metrics.observe_rejected("prompt from 10.0.0.1")
    for shape in ("ramp", "ramp", "from 10.0.0.1"):
        metrics.observe_load_test(shape)
    assert metrics.value("load_test_requests_total", shape="ramp") == 2
    assert metrics.value("load_test_requests_total", shape="other") == 1


def test_exactly_one_state_is_shown(metrics: Readable) -> None:
    assert {state.value for state in ModelState} == set(STATES)
    for state in STATES:
        metrics.set_state(state)
        assert {name for name in STATES if metrics.value("model_state", state=name)} == {state}
    with pytest.raises(KeyError, match="asleep"):
        metrics.set_state("asleep")


def test_the_time_of_getting_ready_is_kept(metrics: Readable) -> None:
    metrics.set_state("loading")
    assert metrics.value("model_ready_timestamp_seconds") == 0
    before = time.time()
    metrics.set_state("ready")
    ready = metrics.value("model_ready_timestamp_seconds")
    assert before <= ready <= time.time()
    metrics.set_state("draining")
    assert metrics.value("model_ready_timestamp_seconds") == ready


def test_single_figures_are_read_by_name_and_label(metrics: Readable) -> None:
    metrics.observe_step(verify_step())
    found = metrics.read(["specops_generated_tokens_total", "specops_accepted_tokens_total"])
    assert found["generated_tokens_total"] == 3
    assert found["accepted_tokens_total/draft"] == 2
    assert found["accepted_tokens_total/suffix"] == 0
    assert not [name for name in found if not name.startswith(("generated", "accepted"))]


@pytest.mark.parametrize(
    ("broken", "missing"),
    [
        ("specops.metrics.collectors.read_memory", {"memory_bytes"}),
        ("specops.metrics.collectors.resources.read_disk", {"disk_bytes"}),
        (
            "specops.metrics.collectors.resources.read_throttling",
            {"cpu_periods_total", "cpu_throttled_periods_total", "cpu_throttled_seconds_total"},
        ),
        ("prometheus_client.ProcessCollector.collect", {"process_resident_memory_bytes"}),
    ],
)
def test_a_figure_that_cannot_be_read_is_missing_alone(
    metrics: Readable, monkeypatch: pytest.MonkeyPatch, broken: str, missing: set[str]
) -> None:
    def names() -> set[str]:
        families = text_string_to_metric_families(metrics.expose()[0].decode())
        return {item.name.removeprefix("specops_") for one in families for item in one.samples}

    def fail(*_: object) -> None:
        raise OSError("no such file")

    before = names()
    monkeypatch.setattr(broken, fail)
    lost = before - names()
    assert missing <= lost
    assert not [name for name in lost - missing if not name.startswith("process_")]
    assert metrics.value("callback_failures_total", where="scrape") >= 1
    assert metrics.read(["specops_generated_tokens_total"])


def test_an_estimate_that_cannot_be_read_is_no_number(metrics: Readable) -> None:
    def fail() -> float:
        raise RuntimeError("changed while it was read")

    metrics.watch_controller(fail, fail)  # type: ignore[arg-type]
    metrics.observe_step(verify_step())
    page = metrics.expose()[0].decode()
    assert "specops_estimated_speedup NaN" in page
    assert "specops_pass_cost_seconds{" not in page
    assert metrics.value("callback_failures_total", where="scrape") >= 2
