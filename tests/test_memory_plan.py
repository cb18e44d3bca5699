"""The plan fits what it says it fits, takes no less than it could, and refuses with numbers."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.config import ConfigError, Settings
from specops.engine import Engine
from specops.memory_plan import (
    MOST_ROWS,
    Demand,
    MemoryPlan,
    MemoryPlanError,
    Supply,
    pass_bytes,
    plan_memory,
    spare_bytes,
)

MB = 10**6
# TinyLlama's shape in int4 with a draft of 160 M parameters, and Phi-3-mini's; float32 caches.
TINYLLAMA = Demand(
    kv_token_bytes=22 * 2 * 4 * 64 * 4 + 12 * 2 * 12 * 64 * 4,
    mapped_weights=850 * MB,
    target_weights=680 * MB,
    fixed_pass_bytes=33 * MB,
    context_pass_bytes=128 * 32 * 4,
    context=2048,
)
PHI3 = Demand(
    kv_token_bytes=32 * 2 * 32 * 96 * 4,
    mapped_weights=2300 * MB,
    target_weights=2300 * MB,
    fixed_pass_bytes=42 * MB,
    context_pass_bytes=128 * 32 * 4,
    context=4096,
)


def supply(limit_mb: int, held_mb: int = 200) -> Supply:
    free = (limit_mb - held_mb) * MB
    return Supply(limit_mb * MB, free, held_mb * MB, swap=0, source="cgroup v2")


def anonymous(plan: MemoryPlan) -> int:
    return plan.kv_bytes + plan.pass_bytes + spare_bytes(plan.supply.limit)


def test_what_fills_up_later_counts_as_held() -> None:
    later = supply(2_000).less(300 * MB)
    assert (later.held, later.free, later.limit) == (500 * MB, 1_500 * MB, 2_000 * MB)
    assert supply(2_000).less(10_000 * MB).free == 0
    full = plan_memory(supply(2_000), TINYLLAMA)
    assert plan_memory(later, TINYLLAMA).kv_bytes < full.kv_bytes


def test_a_machine_with_room_gives_all_rows_the_whole_context() -> None:
    plan = plan_memory(supply(24_000), TINYLLAMA)
    assert (plan.rows, plan.context) == (MOST_ROWS, 2048)
    assert plan.weights_fit


def test_under_4_gb_tinyllama_keeps_its_weights_in_memory_and_all_rows() -> None:
    plan = plan_memory(supply(4000), TINYLLAMA)
    assert (plan.rows, plan.context) == (MOST_ROWS, 2048)
    assert plan.weights_fit


def test_rows_are_given_up_before_a_comfortable_context() -> None:
    plan = plan_memory(supply(1500), TINYLLAMA)
    assert 1 < plan.rows < MOST_ROWS
    assert 1024 <= plan.context < 2048
    assert plan.weights_fit
    more = plan_memory(supply(1500), TINYLLAMA, rows=plan.rows + 1)
    assert more.context < 1024


def test_under_4_gb_phi3_gets_one_row_and_what_fits_beside_its_weights() -> None:
    plan = plan_memory(supply(4000), PHI3)
    assert plan.rows == 1
    assert 1024 <= plan.context < 2048
    assert plan.weights_fit


def test_where_weights_cannot_stay_one_modest_row_is_planned_and_the_table_says_so() -> None:
    plan = plan_memory(supply(800), TINYLLAMA)
    assert plan.rows == 1
    assert not plan.weights_fit
    assert any("disk" in line for line in plan.lines())


def test_where_both_models_weights_cannot_stay_the_targets_do_beside_a_shorter_context() -> None:
    plan = plan_memory(supply(1000, held_mb=70), TINYLLAMA)
    assert plan.rows == 1
    assert 512 <= plan.context < 2048
    assert TINYLLAMA.target_weights <= plan.left_for_weights < TINYLLAMA.mapped_weights
    assert any("the target's stay" in line for line in plan.lines())
    assert not any("every token" in line for line in plan.lines())


def test_a_context_that_is_asked_for_is_kept_even_where_weights_must_go() -> None:
    plan = plan_memory(supply(1000, held_mb=70), TINYLLAMA, context=2048)
    assert (plan.rows, plan.context) == (1, 2048)
    assert plan.left_for_weights < TINYLLAMA.target_weights


def test_what_is_asked_for_and_fits_is_what_is_planned() -> None:
    plan = plan_memory(supply(4000), TINYLLAMA, rows=2, context=1000)
    assert (plan.rows, plan.context, plan.shrunk) == (2, 1000, False)


def test_more_context_than_the_model_has_is_its_context() -> None:
    assert plan_memory(supply(4000), TINYLLAMA, rows=1, context=9999).context == 2048


def test_rows_that_are_asked_for_are_kept_with_the_context_that_fits() -> None:
    plan = plan_memory(supply(4000), PHI3, rows=4)
    assert plan.rows == 4
    assert 0 < plan.context < 2048


def test_a_context_that_is_asked_for_is_kept_with_the_rows_that_fit() -> None:
    plan = plan_memory(supply(4000), PHI3, context=500)
    assert plan.context == 500
    assert 1 < plan.rows <= MOST_ROWS


def test_what_does_not_fit_is_refused_with_the_numbers_and_the_way_out() -> None:
    with pytest.raises(MemoryPlanError) as refused:
        plan_memory(supply(4000), PHI3, rows=4, context=4096)
    message = str(refused.value)
    assert "4 rows of 4,096 tokens" in message
    assert f"{4 * 4096 * PHI3.kv_token_bytes / 1e6:,.1f} MB of KV cache" in message
    assert "limit of 4,000.0 MB (cgroup v2)" in message
    assert "3,800.0 MB are free" in message
    assert "SPECOPS_MEMORY_FIT=shrink" in message


def test_what_does_not_fit_is_shrunk_where_that_is_wanted() -> None:
    plan = plan_memory(supply(4000), PHI3, rows=4, context=4096, shrink=True)
    assert plan.shrunk
    assert anonymous(plan) <= plan.supply.free
    assert (plan.rows, plan.context) == (4, 1152)
    tighter = plan_memory(supply(2000), PHI3, rows=4, context=4096, shrink=True)
    assert (tighter.rows, tighter.context) == (2, 1024)  # rows go first


def test_a_cap_below_the_smallest_cache_is_refused_even_then() -> None:
    for shrink in (False, True):
        with pytest.raises(MemoryPlanError, match="Not even one short row fits"):
            plan_memory(supply(260), TINYLLAMA, shrink=shrink)


@given(
    limit=st.integers(100, 30_000),
    held=st.integers(20, 3000),
    weights=st.integers(0, 5000),
    draft=st.integers(0, 500),
    kv=st.integers(64, 1_000_000),
    context=st.integers(1, 8192),
    rows=st.integers(0, 8),
    asked=st.integers(0, 8192),
    shrink=st.booleans(),
)
def test_every_plan_fits(**drawn: int) -> None:
    rows, asked, context = drawn["rows"], drawn["asked"], drawn["context"]
    target = drawn["weights"] * MB
    both = target + drawn["draft"] * MB
    demand = Demand(drawn["kv"], both, target, 20 * MB, 128 * 32 * 4, context)
    there = supply(drawn["limit"], min(drawn["held"], drawn["limit"]))
    shrink = bool(drawn["shrink"])
    try:
        plan = plan_memory(there, demand, rows=rows, context=asked, shrink=shrink)
    except MemoryPlanError:
        wanted = MemoryPlan(there, demand, rows or 1, min(context, asked or 128))
        assert anonymous(wanted) > there.free
        return
    assert anonymous(plan) <= there.free
    assert plan.most_anonymous <= there.limit
    assert 1 <= plan.context <= context
    assert plan.rows >= 1
    if not plan.shrunk:
        assert plan.rows == rows or not rows
        assert plan.context == min(asked, context) or not asked


@given(limit=st.integers(400, 8000), more=st.integers(0, 4000))
def test_more_memory_never_plans_less(limit: int, more: int) -> None:
    small, large = (plan_memory(supply(size), TINYLLAMA) for size in (limit, limit + more))
    if small.weights_fit:
        assert large.kv_bytes >= small.kv_bytes


def test_a_pass_takes_more_with_more_tokens_and_more_heads() -> None:
    shape = {"hidden": 2048, "vocab": 32_000, "logits": 1}
    fixed, per_token = pass_bytes(width=128, heads=32, **shape)
    assert per_token == 128 * 32 * 4
    assert pass_bytes(width=256, heads=32, **shape)[0] > fixed


def test_the_table_adds_up() -> None:
    plan = plan_memory(supply(4000), TINYLLAMA)
    lines = {line[:14].strip(): line[14:].split(" MB")[0].strip() for line in plan.lines()}
    figures = {name: float(text.replace(",", "")) for name, text in lines.items()}
    parts = sum(figures[name] for name in ("held now", "KV cache", "a pass", "spare"))
    assert figures["anonymous"] == pytest.approx(parts, abs=0.3)
    assert figures["anonymous"] < figures["limit"]


# The engine under a cap that is made up: what is planned is what is allocated.


def test_the_engine_allocates_what_is_planned_and_logs_it(
    tiny_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "specops.graphs"):
        engine = Engine.load(replace(tiny_settings, rows=0))
    assert engine.info.rows == engine.plan.rows == MOST_ROWS
    assert engine.info.context == engine.plan.context == 128
    assert engine.scheduler.target.cache.rows == MOST_ROWS
    assert engine.info.kv_bytes == engine.plan.kv_bytes
    logged = [record.getMessage() for record in caplog.records]
    assert [line for line in logged if "KV cache" in line and "4 x 128 tokens" in line]


def test_the_engine_does_not_start_where_its_cache_does_not_fit(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Supply.read()
    fixed, context = pass_bytes(width=16, hidden=256, heads=4, vocab=320, logits=16)
    room = spare_bytes(1) + fixed + 128 * context + 2 * 128 * 2560  # two rows, and no third
    tight = replace(real, limit=1000 * MB, free=room)
    monkeypatch.setattr("specops.graphs.Supply.read", lambda: tight)
    with pytest.raises(ConfigError, match="3 rows of 128 tokens do not fit"):
        Engine.load(tiny_settings)
    engine = Engine.load(replace(tiny_settings, memory_fit="shrink"))
    assert engine.plan.shrunk
    assert (engine.info.rows, engine.info.context) == (2, 128)
