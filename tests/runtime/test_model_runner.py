"""The runner gives each pass to the graph as it is, and refuses graphs that do not fit."""

from collections.abc import Callable

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper
from onnx.parser import parse_model

from specops.runtime import layer_shapes
from specops.runtime.batch import Batch
from specops.runtime.kvcache.block_pool import CacheShape
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.layer_shapes import Attention
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.runtime.session import ModelLoadError, load, plain_options

SLOTS, CONTEXT, MAX_TOKENS = 3, 130, 16
SEEN = SLOTS * 3 + SLOTS * 3 + 4  # spans, block tables and the cache's descriptor
SHAPE = CacheShape((Attention(kv_heads=3, head_size=8),) * 2, "fp16")
METADATA = layer_shapes.dump([Attention(kv_heads=3, head_size=8)] * 2)


def make_session(
    *,
    positions: bool = False,
    vocab: int | str = SEEN,
    extra: str = "",
    metadata: dict[str, str] | None = None,
    hidden: bool = False,
) -> ort.InferenceSession:
    """A graph that outputs its inputs: a row of logits has spans, tables and descriptor, one after
    the other, plus the wanted token's id, plus 1,000 times its position."""
    inputs = "int64[1, T] input_ids, int64[S, 3] spans, int64[slots, 3] block_tables, "
    inputs += "int64[4] cache, int64[L] logit_rows"
    inputs += ", int64[1, T] position_ids" * positions + f", int64[1] {extra}" * bool(extra)
    outputs = f"float[1, L, {vocab}] logits" + ", float[1, L, 1] hidden" * hidden
    far = "Unsqueeze(position_ids, last)" if positions else "Sub(ids, ids)"
    model = parse_model(f"""
        <ir_version: 10, opset_import: ["" : 17]>
        outputs_its_inputs ({inputs}) => ({outputs})
            <int64[1] flat = {{-1}}, int64[1] last = {{2}}, int64[1] thousand = {{1000}}>
        {{
            flat_spans = Reshape(spans, flat)
            flat_tables = Reshape(block_tables, flat)
            seen = Concat<axis = 0>(flat_spans, flat_tables, cache)
            ids = Unsqueeze(input_ids, last)
            position = {far}
            times = Mul(position, thousand)
            tokens = Add(ids, times)
            chosen = Gather<axis = 1>(tokens, logit_rows)
            sums = Add(chosen, seen)
            more = {f"Add(sums, {extra})" if extra else "Identity(sums)"}
            logits = Cast<to = 1>(more)
            {"hidden = Cast<to = 1>(chosen)" * hidden}
        }}
    """)
    helper.set_model_props(model, METADATA if metadata is None else metadata)
    return load(model.SerializeToString(), plain_options())


def make_runner(session: ort.InferenceSession | None = None) -> ModelRunner:
    cache = KvCache(SHAPE, num_blocks=8, num_slots=SLOTS, context=CONTEXT)
    return ModelRunner(session or make_session(), cache, max_tokens=MAX_TOKENS)


def begin(runner: ModelRunner, *slots: int) -> None:
    for slot in slots:
        runner.cache.allocate(slot, range(CONTEXT))
        assert runner.cache.reserve(slot, 64)


def batch(*spans: tuple[int, int, list[int], int]) -> Batch:
    made = Batch()
    for span in spans:
        made.add(*span)
    return made


def seen(runner: ModelRunner, spans: list[list[int]]) -> np.ndarray:
    """The inputs that the graph must have had, apart from tokens."""
    padded = spans + [[0, 0, 0]] * (SLOTS - len(spans))
    cache = runner.cache
    flat = [np.ravel(padded), np.ravel(cache.block_tables), cache.descriptor]
    return np.concatenate(flat)


def test_a_pass_gets_spans_tables_and_cache_and_returns_the_wanted_logits() -> None:
    runner = make_runner()
    begin(runner, 0, 2)
    assert runner.cache.reserve(2, 130)
    logits = runner.forward(batch((2, 70, [5, 6, 7], 2), (0, 3, [9], 1)))
    given = seen(runner, [[2, 70, 3], [0, 3, 1]])
    assert np.array_equal(logits, np.array([[6], [7], [9]], np.float32) + given.astype(np.float32))
    assert logits.dtype == np.float32


def test_a_pass_sees_nothing_of_the_one_before() -> None:
    runner = make_runner()
    begin(runner, 0, 1, 2)
    runner.forward(batch((0, 0, [1] * 4, 4), (1, 0, [1] * 4, 4), (2, 0, [1] * 4, 4)))
    runner.cache.release(1)
    logits = runner.forward(batch((2, 4, [8], 1)))
    given = seen(runner, [[2, 4, 1]])
    assert np.array_equal(logits, given[None].astype(np.float32) + 8)


def test_positions_are_given_if_the_graph_asks_for_them() -> None:
    runner = make_runner(make_session(positions=True))
    begin(runner, 0, 1)
    for start in (0, 7):
        spans = [[0, start, 2], [1, 2 * start, 1]]
        logits = runner.forward(batch((0, start, [3, 4], 2), (1, 2 * start, [5], 1)))
        expected = [3 + 1000 * start, 4 + 1000 * (start + 1), 5 + 2000 * start]
        given = seen(runner, spans)[None] + np.array(expected)[:, None]
        assert np.array_equal(logits, given.astype(np.float32))


def test_a_pass_may_have_no_logits_and_leaves_lengths_as_they_are() -> None:
    runner = make_runner()
    begin(runner, 0)
    assert runner.forward(batch((0, 0, [1, 2], 0))).shape == (0, SEEN)
    assert runner.forward(batch((0, 2, [1], 1))).shape == (1, SEEN)
    assert runner.cache.length(0) == 0


@pytest.mark.parametrize("count", [0, MAX_TOKENS + 1])
def test_an_empty_or_too_large_pass_is_refused(count: int) -> None:
    runner = make_runner()
    begin(runner, 0)
    made = batch((0, 0, [1] * count, 0)) if count else Batch()
    with pytest.raises(ValueError, match=f"1 to 16 tokens, not {count}"):
        runner.forward(made)


def test_positions_that_the_slot_may_not_write_are_refused() -> None:
    runner = make_runner()
    begin(runner, 0)
    tokens = range(CONTEXT)
    with pytest.raises(ValueError, match="positions 60 to 64 of slot 0 are not reserved"):
        runner.forward(batch((0, 60, [1] * 5, 0)))
    with pytest.raises(ValueError, match="slot 1 is free"):
        runner.forward(batch((1, 0, [1], 0)))
    runner.cache.commit(0, tokens, 64)
    assert runner.cache.reserve(0, 65)
    runner.forward(batch((0, 64, [1], 0)))
    with pytest.raises(ValueError, match="a pass may write 64 to 127"):
        runner.forward(batch((0, 63, [1, 2], 0)))  # others may hold the full block by now


def test_the_caches_shape_is_read_from_the_graph() -> None:
    assert cache_shape(make_session(), "fp16") == SHAPE
    with pytest.raises(ValueError, match="not fp8"):
        cache_shape(make_session(), "fp8")


@pytest.mark.parametrize(
    "metadata", [{}, {"specops.layers": "two"}, {"specops.layers": '[{"mamba": {}}]'}]
)
def test_a_graph_that_was_not_rewritten_is_refused(metadata: dict[str, str]) -> None:
    with pytest.raises(ModelLoadError, match=r"specops\.layers"):
        cache_shape(make_session(metadata=metadata), "fp32")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_session(extra="attention_mask"), "attention_mask"),
        (lambda: make_session(vocab="V"), "of a fixed size"),
    ],
)
def test_a_graph_that_does_not_fit_is_refused(
    make: Callable[[], ort.InferenceSession], message: str
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        make_runner(make())
