"""Metrics: what is observed is what is read back, and every series is there before any traffic."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from specops.engine.engine import ModelState
from specops.metrics.metrics import Metrics
from specops.metrics.series import STATES
from specops.request import (
    DraftStats,
    FinishReason,
    GenerationStats,
    StepKind,
    StepResult,
    StepStats,
)


class Readable(Metrics):
    """Metrics whose values can be read back, on a clock that stands."""

    def __init__(self) -> None:
        self.now = 1000.0
        super().__init__(CollectorRegistry(), clock=lambda: self.now)

    def value(self, name: str, /, **labels: str) -> float:
        value = self.registry.get_sample_value(f"specops_{name}", labels)
        assert value is not None, f"no series {name} {labels}"
        return value

    def values(self, names: str, /, **labels: str) -> list[float]:
        """Of several series with the same labels."""
        return [self.value(name, **labels) for name in names.split()]


@pytest.fixture
def metrics() -> Readable:
    return Readable()


def verify_step(draft_tokens: int = 4, accepted: int = 2, **changes: object) -> StepStats:
    """A pass in which one request verifies one draft of the draft model."""
    fields: dict[str, object] = {
        "kind": StepKind.VERIFY,
        "seconds": 0.04,
        "decoding": 1,
        "emitted_tokens": accepted + 1,
        "drafts": (DraftStats("draft", draft_tokens, accepted),),
        "draft_seconds": 0.5,
    }
    return StepStats(**fields | changes)  # type: ignore[arg-type]


def test_nothing_is_counted_before_any_traffic(metrics: Readable) -> None:
    """Which series there are with which labels is `tests/stack/test_contract.py`'s matter."""
    shown = {
        sample.name
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.value and sample.name.startswith("specops_")
    }
    machine = {"memory_bytes", "memory_pressure_seconds_total", "page_faults_total"}
    machine |= {"cpus", "cpu_periods_total", "disk_bytes", "oom_kills_total"}
    machine |= {"cpu_throttled_periods_total", "cpu_throttled_seconds_total"}
    of_all = {"model_info", "model_state", "estimated_speedup"}
    assert shown - {f"specops_{name}" for name in machine} == {f"specops_{name}" for name in of_all}


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


def test_openmetrics_is_answered_where_it_is_asked_for(metrics: Readable) -> None:
    page, content_type = metrics.expose("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert page.endswith(b"# EOF\n")


def test_two_services_in_one_process_do_not_share_series() -> None:
    first, second = Readable(), Readable()
    first.observe_rejected("queue_full")
    assert second.value("requests_rejected_total", reason="queue_full") == 0


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
    for use, tokens in (("decoded", 2), ("verified", 8), ("prompt", 0)):
        assert metrics.value("pass_tokens_total", use=use) == tokens
    at = "draft_tokens_per_position_total accepted_tokens_per_position_total"
    for number, accepted in (("1", 2), ("2", 1), ("3", 0), ("4", 0)):
        assert metrics.values(at, drafter="draft", position=number) == [2, accepted]


def test_prefill_step_is_no_jump(metrics: Readable) -> None:
    metrics.observe_step(
        StepStats(StepKind.PREFILL, 0.2, prompt_tokens=128, emitted_tokens=1, first_tokens=1)
    )
    assert metrics.values("prompt_tokens_total generated_tokens_total") == [128, 1]
    assert metrics.values("decode_tokens_total sequence_steps_total avg_jump") == [0, 0, 0]


def test_a_prompts_cached_beginning_is_a_hit_and_no_work(metrics: Readable) -> None:
    metrics.observe_step(
        StepStats(StepKind.PREFILL, 0.2, prompt_tokens=8, cached_tokens=100, prefix_hits=2)
    )
    metrics.observe_step(StepStats(StepKind.PREFILL, 0.2, prompt_tokens=5))
    names = "prefix_hits_total cached_prompt_tokens_total prompt_tokens_total"
    assert metrics.values(names) == [2, 100, 13]


def test_a_mixed_pass_counts_for_prompts_and_for_those_that_decode(metrics: Readable) -> None:
    metrics.observe_step(
        StepStats(
            StepKind.MIXED,
            0.1,
            decoding=3,
            prompt_tokens=40,
            budget_tokens=50,
            emitted_tokens=6,  # three decoded, one accepted, two prompts ended
            first_tokens=2,
            drafts=(DraftStats("draft", 2, 1),),
        )
    )
    assert metrics.value("target_steps_total", kind="mixed") == 1
    names = "generated_tokens_total decode_tokens_total sequence_steps_total avg_jump"
    assert metrics.values(names) == [6, 4, 3, 4 / 3]
    for use, tokens in (("decoded", 3), ("verified", 2), ("prompt", 40)):
        assert metrics.value("pass_tokens_total", use=use) == tokens
    assert metrics.values("prompt_tokens_total prompt_budget_tokens_total") == [40, 50]


def test_a_prompt_that_got_no_room_counts_what_was_offered(metrics: Readable) -> None:
    metrics.observe_step(verify_step(budget_tokens=8))
    assert metrics.value("prompt_budget_tokens_total") == 8
    assert metrics.value("pass_tokens_total", use="prompt") == 0


def test_drafts_of_several_drafters_in_one_pass_are_told_apart(metrics: Readable) -> None:
    drafts = (DraftStats("draft", 3, 3), DraftStats("suffix", 5, 0), DraftStats("suffix", 1, 1))
    metrics.observe_step(
        StepStats(StepKind.VERIFY, 0.1, decoding=3, emitted_tokens=7, drafts=drafts)
    )
    for drafter, count, drafted, accepted in (("draft", 1, 3, 3), ("suffix", 2, 6, 1)):
        names = "drafts_total draft_tokens_total accepted_tokens_total"
        assert metrics.values(names, drafter=drafter) == [count, drafted, accepted]
    for drafter, accepted in (("draft", [1, 1, 1, 0]), ("suffix", [1, 0, 0, 0])):
        positions = [
            metrics.value("accepted_tokens_per_position_total", drafter=drafter, position=str(one))
            for one in (1, 2, 3, 4)
        ]
        assert positions == accepted


def test_a_grammars_draft_may_be_longer_than_positions_are_counted(metrics: Readable) -> None:
    drafts = (DraftStats("grammar", 20, 20),)
    metrics.observe_step(StepStats(StepKind.VERIFY, 0.1, decoding=1, drafts=drafts))
    last = {"drafter": "grammar", "position": "8"}
    assert metrics.value("accepted_tokens_per_position_total", **last) == 1
    assert metrics.value("draft_tokens_total", drafter="grammar") == 20


def test_what_was_promised_and_what_was_kept_are_counted_by_tenth(metrics: Readable) -> None:
    drafts = (DraftStats("suffix", 4, 2, (1.0, 0.95, 0.42)), DraftStats("suffix", 1, 0, (0.9,)))
    metrics.observe_step(
        StepStats(StepKind.VERIFY, 0.1, decoding=2, emitted_tokens=4, drafts=drafts)
    )
    for tenth, tried, promised, kept in (("9", 3, 2.85, 2), ("4", 1, 0.42, 0), ("0", 0, 0, 0)):
        names = "draft_promises_total draft_promised_total draft_promises_kept_total"
        found = metrics.values(names, drafter="suffix", tenth=tenth)
        assert found == pytest.approx([tried, promised, kept])


def test_preemptions_are_counted(metrics: Readable) -> None:
    metrics.observe_step(verify_step(preempted=2))
    assert metrics.value("preemptions_total") == 2


def test_misses_count_as_steps_but_not_as_drafts(metrics: Readable) -> None:
    metrics.observe_step(verify_step())
    missed = ("suffix", "suffix", "draft")
    step = StepStats(StepKind.DECODE, 0.02, 3, emitted_tokens=3, draft_seconds=0.25)
    metrics.observe_step(replace(step, missed_drafters=missed))
    assert metrics.values("draft_misses_total drafts_total", drafter="suffix") == [2, 0]
    assert metrics.values("draft_misses_total drafts_total", drafter="draft") == [1, 1]
    names = "draft_seconds_total sequence_steps_total avg_jump draft_length"
    assert metrics.values(names) == [0.75, 4, 6 / 4, 4 / 4]


def test_chosen_lengths_are_counted_by_drafter_and_0_is_one(metrics: Readable) -> None:
    metrics.observe_step(verify_step(draft_tokens=4))
    metrics.observe_step(verify_step(draft_tokens=1, accepted=0))
    plain = StepStats(StepKind.DECODE, 0.02, 4, emitted_tokens=4, missed_drafters=("draft",))
    metrics.observe_step(replace(plain, declined_drafters=("draft", "cascade")))
    names = "chosen_draft_tokens_count chosen_draft_tokens_sum"
    assert metrics.values(names, drafter="draft") == [3, 5]
    assert metrics.values(names, drafter="cascade") == [1, 0]
    for most, count in (("0.0", 1), ("1.0", 2)):
        assert metrics.value("chosen_draft_tokens_bucket", drafter="draft", le=most) == count


def test_the_controllers_estimates_are_read_when_asked(metrics: Readable) -> None:
    assert metrics.value("estimated_speedup") == 1
    costs = [("tokens", 1, 0.01), ("tokens", 2, 0.013), ("attention", 1, 0.002)]
    speedup = 1.5
    metrics.watch_controller(lambda: speedup, lambda: costs)
    assert metrics.value("estimated_speedup") == 1.5
    speedup = 1.25
    assert metrics.value("estimated_speedup") == 1.25
    assert metrics.value("pass_cost_seconds", kind="tokens", size="2") == 0.013
    assert metrics.value("pass_cost_seconds", kind="attention", size="1") == 0.002
    costs[1] = ("tokens", 2, 0.02)
    assert metrics.value("pass_cost_seconds", kind="tokens", size="2") == 0.02


def test_average_jump_forgets_what_is_older_than_a_minute(metrics: Readable) -> None:
    metrics.observe_step(verify_step(accepted=4))
    metrics.now += 59
    metrics.observe_step(verify_step(accepted=0))
    assert metrics.value("avg_jump") == 3.0
    metrics.now += 1
    assert metrics.value("avg_jump") == 1.0
    metrics.now += 59
    assert metrics.value("avg_jump") == 0.0
    metrics.observe_step(verify_step(accepted=3))
    assert metrics.value("avg_jump") == 4.0


def test_load_gauges_show_the_last_step(metrics: Readable) -> None:
    metrics.set_kv_capacity(4096, 64)
    assert metrics.value("kv_blocks", state="free") == 64
    metrics.observe_step_result(StepResult(None, (), running=2, waiting=5, kv_tokens=300))
    last = StepResult(None, (), running=1, waiting=0, kv_tokens=120, kept_tokens=50)
    metrics.observe_step_result(replace(last, used_blocks=9, shared_blocks=4, kept_blocks=1))
    assert metrics.values("requests_running requests_waiting") == [1, 0]
    assert metrics.values("kv_tokens kv_kept_tokens kv_capacity_tokens") == [120, 50, 4096]
    for state, blocks in (("used", 9), ("shared", 4), ("kept", 1), ("free", 54)):
        assert metrics.value("kv_blocks", state=state) == blocks
    assert metrics.value("kv_usage_ratio") == 9 / 64


def test_finished_request_is_counted_by_outcome_and_timed(metrics: Readable) -> None:
    stats = GenerationStats(generated_tokens=9)
    metrics.observe_finish(FinishReason.LENGTH, stats, 3.0, 0.5)
    assert metrics.value("requests_total", outcome="length") == 1
    assert metrics.value("latency_seconds_sum") == 3.0
    assert metrics.value("latency_seconds_bucket", le="2.0") == 0
    assert metrics.value("latency_seconds_bucket", le="4.0") == 1
    assert metrics.value("time_to_first_token_seconds_sum") == 0.5
    assert metrics.value("wasted_tokens_total") == 0


@pytest.mark.parametrize("reason", ["cancelled", "timeout", "error"])
def test_tokens_that_nobody_got_are_wasted(metrics: Readable, reason: str) -> None:
    metrics.observe_finish(FinishReason(reason), GenerationStats(generated_tokens=9), 3.0, 0.5)
    metrics.observe_finish(FinishReason(reason), None, 1.0, None)
    assert metrics.value("requests_total", outcome=reason) == 2
    assert metrics.value("wasted_tokens_total") == 9
    assert metrics.value("time_to_first_token_seconds_count") == 1


def test_time_between_tokens_is_spread_over_a_jump(metrics: Readable) -> None:
    metrics.observe_inter_token(0.08, tokens=4)
    assert metrics.value("inter_token_latency_seconds_count") == 4
    assert metrics.value("inter_token_latency_seconds_sum") == pytest.approx(0.08)
    assert metrics.value("inter_token_latency_seconds_bucket", le="0.02") == 4
    assert metrics.value("inter_token_latency_seconds_bucket", le="0.01") == 0


def test_queue_wait_is_timed(metrics: Readable) -> None:
    metrics.observe_queue_wait(1.5)
    assert metrics.value("queue_wait_seconds_sum") == 1.5


def test_rejection_has_one_of_a_fixed_set_of_reasons(metrics: Readable) -> None:
    metrics.observe_rejected("queue_full")
    assert metrics.value("requests_rejected_total", reason="queue_full") == 1
    with pytest.raises(KeyError):
        metrics.observe_rejected("prompt from 10.0.0.1")


def test_exactly_one_state_is_shown(metrics: Readable) -> None:
    for state in STATES:
        metrics.set_state(state)
        shown = {name for name in STATES if metrics.value("model_state", state=name)}
        assert shown == {state}
    with pytest.raises(ValueError, match="asleep"):
        metrics.set_state("asleep")


def test_states_are_those_of_the_engine() -> None:
    assert {state.value for state in ModelState} == set(STATES)


def test_model_is_shown_once_it_is_known(metrics: Readable) -> None:
    assert metrics.value("model_info", name="not loaded") == 1
    metrics.set_model({"name": "demo", "quant": "int8-128"})
    assert metrics.value("model_info", name="demo", quant="int8-128") == 1


def test_the_time_of_getting_ready_is_kept(metrics: Readable) -> None:
    metrics.set_state("loading")
    assert metrics.value("model_ready_timestamp_seconds") == 0
    before = time.time()
    metrics.set_state("ready")
    ready = metrics.value("model_ready_timestamp_seconds")
    assert before <= ready <= time.time()
    metrics.set_state("draining")
    assert metrics.value("model_ready_timestamp_seconds") == ready


def test_load_tests_have_a_fixed_set_of_shapes(metrics: Readable) -> None:
    for shape in ("ramp", "ramp", "from 10.0.0.1"):
        metrics.observe_load_test(shape)
    assert metrics.value("load_test_requests_total", shape="ramp") == 2
    assert metrics.value("load_test_requests_total", shape="other") == 1


def test_limits_are_shown(metrics: Readable) -> None:
    metrics.set_slots(4)
    metrics.set_queue_size(32)
    assert metrics.values("slots queue_size") == [4, 32]


def test_single_figures_are_read_by_name_and_label(metrics: Readable) -> None:
    metrics.observe_step(verify_step())
    found = metrics.read(["specops_generated_tokens_total", "specops_accepted_tokens_total"])
    assert found["generated_tokens_total"] == 3
    assert found["accepted_tokens_total/draft"] == 2
    assert found["accepted_tokens_total/suffix"] == 0
    assert not [name for name in found if not name.startswith(("generated", "accepted"))]
