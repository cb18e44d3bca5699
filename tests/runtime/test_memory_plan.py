"""A plan fits, is no smaller than it has to be, and a refusal has the numbers."""

import logging
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specops.config import Settings
from specops.runtime.kvcache.block_pool import CacheShape
from specops.runtime.layer_shapes import Attention, GatedDelta, LayerShape, ShortConv
from specops.runtime.memory_plan import (
    DEFAULT_SLOTS,
    AvailableMemory,
    MemoryPlan,
    MemoryPlanError,
    ModelSizes,
    RequiredMemory,
    plan_for_models,
    plan_memory,
    spare_bytes,
)
from specops.system.memory import MemoryReading
from tests.models_e2e.repositories import REPOSITORIES

MB = 10**6
# TinyLlama's shape in int4, alone and with a draft of 160 M parameters; Phi-3-mini's; fp16 caches.


def token_bytes(kv_heads: int, head_size: int, layers: int) -> int:
    return CacheShape((Attention(kv_heads, head_size),) * layers, "fp16").bytes_per_token


TARGET = ModelSizes(token_bytes(4, 64, 22), 612 * MB, 2048, 32_000)
DRAFT = ModelSizes(token_bytes(12, 64, 12), 170 * MB, 768, 32_000)
PHI3_MINI = ModelSizes(token_bytes(32, 96, 32), 2300 * MB, 3072, 32_064)
ALONE = RequiredMemory.of(Settings(), [TARGET], 2048)
TINYLLAMA = RequiredMemory.of(Settings(), [TARGET, DRAFT], 2048)
PHI3 = RequiredMemory.of(Settings(), [PHI3_MINI], 4096)


def supply(limit_mb: int, held_mb: int = 100) -> AvailableMemory:
    held, limit = held_mb * MB, limit_mb * MB
    reading = MemoryReading(held, file=0, swap=0, limit=limit, swap_limit=0, source="cgroup v2")
    return AvailableMemory(reading, limit - held, held)


def test_a_demand_covers_target_and_draft_and_the_largest_pass() -> None:
    assert TARGET.kv_token_bytes == 22 * 2 * 4 * 64 * 2
    assert TINYLLAMA.kv_token_bytes == TARGET.kv_token_bytes + DRAFT.kv_token_bytes
    assert (TINYLLAMA.mapped_weights, TINYLLAMA.target_weights) == (782 * MB, 612 * MB)
    assert TINYLLAMA.pass_bytes == TARGET.pass_bytes(96, 80)  # the larger one: they take turns
    wide = RequiredMemory.of(Settings(max_batched_tokens=1024), [TARGET], 2048)
    assert wide.pass_bytes == TARGET.pass_bytes(1024, 80)
    narrow = RequiredMemory.of(Settings(max_batched_tokens=16, slots=4), [TARGET], 2048)
    assert narrow.pass_bytes == TARGET.pass_bytes(36, 44)
    assert TARGET.pass_bytes(96, 72) < TARGET.pass_bytes(96, 73) < TARGET.pass_bytes(97, 73)
    assert ALONE.rows == 72
    large = [replace(TARGET, vocab_size=262_144)]
    assert [RequiredMemory.of(Settings(slots=n), large, 2048).rows for n in (1, 8, 24)] == [
        9,
        32,
        48,
    ]
    assert RequiredMemory.of(Settings(), large, 2048).pass_bytes == large[0].pass_bytes(96, 40)
    unknown = replace(TARGET, hidden_size=0)
    assert unknown.pass_bytes(1, 0) == 2 * TARGET.pass_bytes(1, 0)


def published_layers(name: str) -> list[LayerShape]:
    """The rows of a published model's table, its MTP block's among them."""
    config = REPOSITORIES[name].config
    attention = Attention(config["num_key_value_heads"], config["head_dim"])
    layers = config["num_hidden_layers"]
    kinds = [*config.get("layer_types", ["full_attention"] * layers)]
    kinds += ["full_attention"] * config.get("mtp_num_hidden_layers", 0)
    rows: list[LayerShape] = []
    for kind in kinds:
        if kind == "full_attention":
            rows.append(attention)
            continue
        names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
        delta = GatedDelta(*(config[f"linear_{name}"] for name in names))
        channels = 2 * delta.key_heads * delta.key_size + delta.value_heads * delta.value_size
        rows += [ShortConv(channels, config["linear_conv_kernel_dim"]), delta]
    return rows


def test_layers_with_states_make_8000_tokens_cheap() -> None:
    """Qwen3.5 2B with its MTP block takes 0.16 of what Qwen3 1.7B takes, snapshots apart."""
    taken = {}
    for name in ("Qwen/Qwen3.5-2B", "Qwen/Qwen3-1.7B"):
        shape = CacheShape.of(published_layers(name), "fp16")
        sizes = ModelSizes(shape.bytes_per_token, 0, 2048, 0, shape.slot_bytes)
        demand = RequiredMemory.of(Settings(slots=1), [sizes], 8192)
        taken[name] = 8000 * demand.kv_token_bytes + demand.state_bytes
    new, old = taken.values()
    assert old == 8000 * 28 * 2 * 8 * 128 * 2
    assert new / old == pytest.approx(0.16, abs=0.01)


def test_memory_that_fills_up_later_counts_as_held() -> None:
    later = supply(1_000).less(50 * MB)
    assert (later.held, later.free) == (150 * MB, 850 * MB)
    assert supply(1_000).less(10_000 * MB).free == 0
    assert plan_memory(later, ALONE).kv_bytes < plan_memory(supply(1_000), ALONE).kv_bytes


BOTH, TARGETS, NONE = "in the page cache", "the target's stay", "from disk for every token"


@pytest.mark.parametrize(
    ("limit_mb", "demand", "asked", "expected", "weights"),
    [
        # With room every slot gets the whole context.
        (24_000, TINYLLAMA, {}, (DEFAULT_SLOTS, 2048, DEFAULT_SLOTS * 2048), BOTH),
        (24_000, TINYLLAMA, {"slots": 3, "context": 100}, (3, 100, 3 * 128), BOTH),
        # Under 1 GB the draft gives way; four requests of 200 + 64 tokens still fit twice.
        (1_000, ALONE, {}, (8, 2048, 8_576), BOTH),
        (1_000, TINYLLAMA, {}, (8, 2048, 3_264), TARGETS),
        # If no weights can stay, one modest request is planned.
        (700, TINYLLAMA, {}, (8, 1024, 1_024), NONE),
        # A requested context or size is planned even if weights must go.
        (827, ALONE, {}, (8, 896, 896), BOTH),
        (827, ALONE, {"context": 2048}, (8, 2048, 2048), NONE),
        (4_000, TINYLLAMA, {"slots": 2, "context": 1000, "kv_tokens": 1500}, (2, 1000, 1536), BOTH),
        (4_000, TINYLLAMA, {"kv_tokens": 20}, (8, 64, 64), BOTH),
        (24_000, TINYLLAMA, {"context": 9999}, (8, 2048, 8 * 2048), BOTH),  # the model's
    ],
)
def test_what_is_planned(
    limit_mb: int,
    demand: RequiredMemory,
    asked: dict[str, int],
    expected: tuple[int, int, int],
    weights: str,
) -> None:
    plan = plan_memory(supply(limit_mb), demand, **asked)
    assert (plan.slots, plan.context, plan.kv_tokens) == expected
    assert plan.num_blocks == plan.kv_tokens // 64
    assert plan.weights_fit == (weights == BOTH)
    assert (plan.left_for_weights >= demand.target_weights) == (weights != NONE)
    assert weights in [*plan.lines()][-1]


def test_both_models_stay_where_that_leaves_a_comfortable_cache() -> None:
    least = next(
        size for size in range(1000, 2000) if plan_memory(supply(size), TINYLLAMA).weights_fit
    )
    plan = plan_memory(supply(least), TINYLLAMA)
    assert plan.kv_tokens == plan.context == 1024
    assert plan_memory(supply(least - 1), TINYLLAMA).kv_tokens > 1024  # the draft's place


def test_a_context_above_the_cache_is_refused() -> None:
    with pytest.raises(MemoryPlanError, match="SPECOPS_CONTEXT=1000 does not fit into") as refused:
        plan_memory(supply(4000), TINYLLAMA, context=1000, kv_tokens=512)
    assert "SPECOPS_KV_TOKENS=512" in str(refused.value)


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers_and_a_way_out() -> None:
    with pytest.raises(MemoryPlanError) as refused:
        plan_memory(supply(4000), PHI3, kv_tokens=16_384)
    message = str(refused.value)
    assert "a KV cache of 16,384 tokens" in message
    assert f"{16_384 * PHI3.kv_token_bytes / 1e6:,.1f} MB of keys and values" in message
    assert "limit of 4,000.0 MB (held by cgroup v2)" in message
    assert "3,900.0 MB are free" in message
    assert "the cache then takes what fits" in message
    found = re.search(r"([\d,]+) tokens would fit", message)
    assert found
    fitting = int(found[1].replace(",", ""))
    assert plan_memory(supply(4000), PHI3, kv_tokens=fitting).kv_tokens == fitting
    with pytest.raises(MemoryPlanError):
        plan_memory(supply(4000), PHI3, kv_tokens=fitting + 1)
    with pytest.raises(MemoryPlanError, match="Not even one short request fits"):
        plan_memory(supply(155), TINYLLAMA)


@given(
    limit=st.integers(100, 30_000),
    held=st.integers(20, 3000),
    target=st.integers(0, 5000),
    draft=st.integers(0, 500),
    kv=st.integers(64, 1_000_000),
    context=st.integers(1, 8192),
    slots=st.integers(0, 16),
    asked=st.integers(0, 8192),
    tokens=st.integers(0, 100_000),
    states=st.integers(0, 700),
)
def test_every_plan_fits(
    *,
    limit: int,
    held: int,
    target: int,
    draft: int,
    kv: int,
    context: int,
    slots: int,
    asked: int,
    tokens: int,
    states: int,
) -> None:
    demand = RequiredMemory(
        kv, (target + draft) * MB, target * MB, 20 * MB, context, states * MB, 4 * states * MB
    )
    there = supply(limit, min(held, limit))
    try:
        plan = plan_memory(there, demand, slots=slots, context=asked, kv_tokens=tokens)
    except MemoryPlanError:
        longest = min(asked or 128, context)
        least = max(tokens or longest, longest if asked else 1)
        wanted = MemoryPlan(there, demand, 8, longest, -(-least // 64) * 64)
        assert wanted.needed > there.free or (asked and longest > tokens)
        return
    assert plan.needed <= there.free
    assert plan.most_anonymous <= there.reading.limit
    assert plan.slots == slots or (plan.slots == DEFAULT_SLOTS and not slots)
    assert plan.kv_tokens == plan.num_blocks * 64
    assert 1 <= plan.context <= min(context, plan.kv_tokens)
    assert plan.context == min(asked, context) or not asked
    assert 0 <= plan.kv_tokens - tokens < 64 or not tokens
    assert 0 <= plan.snapshot_bytes <= demand.most_snapshot_bytes
    assert plan.weights_fit or not plan.snapshot_bytes
    if not tokens:
        assert plan.kv_tokens <= plan.slots * -(-context // 64) * 64


@given(limit=st.integers(400, 8000), more=st.integers(0, 4000))
def test_more_memory_never_plans_less(limit: int, more: int) -> None:
    small, large = (plan_memory(supply(size), TINYLLAMA) for size in (limit, limit + more))
    if small.weights_fit:
        assert large.kv_tokens >= small.kv_tokens


@pytest.mark.parametrize(
    ("limit_mb", "asked", "tokens", "snapshots"),
    [
        (24_000, {}, 8 * 32_768, 4 * 240),  # as many as are of use
        (24_000, {"slots": 1}, 32_768, 4 * 240),  # to one slot's requests as well
        (4_000, {}, 178_816, 732),  # a quarter of what is left beside weights and states
        (4_000, {"context": 4096}, 8 * 4096, 4 * 240),  # the cache leaves room
        (1_140, {}, 6_784, 28),
        (1_045, {}, 1_024, 4),  # a comfortable cache comes first
        (1_022, {}, 1_024, 0),  # and so do the weights
    ],
)
def test_snapshots_get_a_part_of_what_is_left_and_give_way_first(
    limit_mb: int, asked: dict[str, int], tokens: int, snapshots: int
) -> None:
    """Qwen3.5-0.8B's shape: 12 KB of keys and values for a token, 30 MB of states for a slot."""
    model = ModelSizes(12_288, 600 * MB, 1024, 32_000, 30 * MB)
    slots = asked.get("slots", 0)
    demand = RequiredMemory.of(Settings(slots=slots), [model], 32_768)
    plan = plan_memory(supply(limit_mb), demand, **asked)
    assert (plan.kv_tokens, plan.snapshot_bytes // MB) == (tokens, snapshots)
    alone = RequiredMemory.of(Settings(prefix_cache="off"), [model], 32_768)  # nobody could use one
    assert plan_memory(supply(limit_mb), alone, **asked).snapshot_bytes == 0


@pytest.mark.parametrize("states", [0, 100 * MB])
def test_the_table_adds_up(states: int) -> None:
    plan = plan_memory(
        supply(4000),
        replace(TINYLLAMA, state_bytes=states, most_snapshot_bytes=states, grammar_bytes=90 * MB),
    )
    lines = {line[:14].strip(): line[14:].split(" MB")[0].strip() for line in plan.lines()}
    figures = {name: float(text.replace(",", "")) for name, text in lines.items()}
    parts = [name for name in ("states", "snapshots") if name in figures]
    assert bool(parts) == bool(states)
    parts += ["held now", "KV cache", "a pass", "grammars", "spare"]
    assert figures["anonymous"] == pytest.approx(sum(figures[name] for name in parts), abs=0.4)
    assert figures["anonymous"] < figures["limit"]


def test_settings_give_the_plan_of_loaded_models_and_it_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(AvailableMemory, "read", lambda: supply(2000))
    settings = Settings(slots=5, context=1024, kv_tokens=4096)
    with caplog.at_level(logging.INFO, "specops.runtime.memory_plan"):
        plan = plan_for_models(settings, [TARGET, DRAFT], 2048, later_bytes=50 * MB)
    assert (plan.slots, plan.context, plan.kv_tokens) == (5, 1024, 4096)
    assert plan.available.held == 150 * MB
    logged = [record.getMessage() for record in caplog.records]
    assert [line for line in logged if "KV cache" in line and "4,096 tokens" in line]


def test_grammars_are_planned_wherever_they_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come before weights in memory; a KV cache that is asked for comes before them."""
    kept, given_up = list[int](), list[int]()
    for limit in range(200, 1000, 50):
        monkeypatch.setattr(AvailableMemory, "read", partial(supply, limit))
        try:
            plan = plan_for_models(Settings(), [TARGET], 2048, grammar_bytes=90 * MB)
        except MemoryPlanError:
            continue
        (kept if plan.required.grammar_bytes else given_up).append(limit)
        assert plan.needed <= plan.available.free
    assert max(given_up) < min(kept) < max(given_up) + 100
    monkeypatch.setattr(AvailableMemory, "read", partial(supply, min(kept)))
    asked = Settings(kv_tokens=4096)
    assert not plan_for_models(asked, [TARGET], 2048, grammar_bytes=90 * MB).required.grammar_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has memory to give back")
def test_freed_memory_is_given_back_before_it_is_counted() -> None:
    """Blocks stay behind the freed ones, as behind those of a tokenizer that was read."""
    count = """
from specops.runtime.memory_plan import AvailableMemory
from specops.system.allocator import configure_malloc
from specops.system.memory import process_memory
configure_malloc()
blocks = [bytearray(b"x" * 2_000) for _ in range(40_000)]
last = bytearray(2_000)
blocks.clear()
before = process_memory().anon
AvailableMemory.read()
print(before - process_memory().anon)
"""
    done = subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 70 * MB


def test_a_fiftieth_of_the_cap_stays_free_within_bounds() -> None:
    assert spare_bytes(500 * MB) == 36 << 20
    assert spare_bytes(4000 * MB) == 80 * MB
    assert spare_bytes(64_000 * MB) == 256 << 20
