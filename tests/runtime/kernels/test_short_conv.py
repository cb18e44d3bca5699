"""The short convolution over spans: the right numbers, and the same bits however tokens come."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from specops.runtime import kernels
from tests.passes import random_chunks
from tests.runtime.kernels import recurrences
from tests.runtime.kernels.operators import operator

CHANNELS, SLOTS, RING, FIRST, TOTAL = 528, 3, 12, 5, 560  # two pieces and a rest for threads
STATES = 32
LENGTH = 70
MOST = np.iinfo(np.int64).max

Spans = Sequence[tuple[int, int, int]]


class Convolution:
    """A layer of the operator, and the memory of its slots, which nothing initializes."""

    def __init__(self, kernel_size: int = 3, *, gates: bool = True, bias: bool = False) -> None:
        rng = np.random.default_rng(kernel_size)
        parts = 3 if gates else 1
        self.weights = {"weight": rng.normal(size=(kernel_size, CHANNELS)).astype(np.float32)}
        if bias:
            self.weights["bias"] = rng.normal(size=CHANNELS).astype(np.float32)
        self.x = rng.normal(size=(SLOTS, LENGTH, parts * CHANNELS)).astype(np.float32)
        # Other layers' states lie before the ring.
        self.memory = np.full((SLOTS, STATES + RING * TOTAL), np.nan, np.float32)
        numbers = self.memory.ctypes.data, SLOTS, RING, TOTAL, STATES
        self.kept = np.array(numbers, np.int64)
        inputs = ("x", "weight", "bias" if bias else "", "spans", "kept_inputs")
        attributes = {"first": FIRST, "total": TOTAL}
        self.run = operator("ShortConv", inputs, ["out"], self.weights, **attributes)
        self.whole = operator("ShortConv", inputs[:3], ["out"], self.weights, **attributes)

    def feeds(self, *spans: tuple[int, int, int]) -> dict[str, Any]:
        x = np.concatenate([self.x[slot, start : start + count] for slot, start, count in spans])
        return {"x": x[None], "spans": np.array(spans, np.int64), "kept_inputs": self.kept}

    def step(self, *spans: tuple[int, int, int]) -> np.ndarray:
        return self.run(**self.feeds(*spans))[0][0]


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("gates", [True, False], ids=["gates", "no gates"])
@pytest.mark.parametrize("kernel_size", [1, 3, 4])
def test_it_computes_what_numpy_computes(kernel_size: int, gates: bool, bias: bool) -> None:
    made = Convolution(kernel_size, gates=gates, bias=bias)
    expected = recurrences.short_conv(made.x[0], **made.weights)
    np.testing.assert_allclose(made.step((0, 0, LENGTH)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gates", [True, False], ids=["gates", "no gates"])
@pytest.mark.usefixtures("each_kernel")
def test_chunks_other_slots_and_rejected_tokens_change_no_bit(gates: bool) -> None:
    """The bits are those of the reference in plain C for a whole sequence without a memory."""
    made = Convolution(gates=gates, bias=not gates)
    kernels.force("plain C")
    expected = Convolution(gates=gates, bias=not gates).whole(x=made.x)[0]
    at, rng = [0] * SLOTS, np.random.default_rng(4)
    pieces = [random_chunks(range(LENGTH), seed=slot, longest=24) for slot in range(SLOTS)]
    while any(pieces):
        spans = [
            (slot, at[slot], len(pieces[slot].pop(0)))
            for slot in rng.permutation(SLOTS).tolist()
            if pieces[slot]
        ]
        out, row = made.step(*spans), 0
        for slot, start, count in spans:
            assert np.array_equal(out[row : row + count], expected[slot, start : start + count])
            at[slot], row = start + count, row + count
        for slot in range(SLOTS):  # drafts that are rejected
            drafted = min(RING - 3, LENGTH - at[slot])
            if drafted:
                wrong = made.feeds((slot, at[slot], drafted))
                made.run(**wrong | {"x": wrong["x"] + 1})


def test_a_layer_writes_its_own_part_of_the_memory() -> None:
    made = Convolution()
    made.step((1, 0, 5))
    written = np.isfinite(made.memory)
    rows = written[1, STATES:].reshape(RING, TOTAL)
    assert rows[:5, FIRST : FIRST + CHANNELS].all()
    assert written.sum() == 5 * CHANNELS


WRONG: list[tuple[str, np.ndarray, str]] = [
    ("x", np.zeros((1, 4, 3 * CHANNELS), np.float32), "another number of tokens"),
    ("x", np.zeros((1, 5, 2 * CHANNELS), np.float32), "another number of channels"),
    ("x", np.zeros(5, np.float32), r"x is \[..., T, channels or 3"),
    ("spans", np.array([(3, 0, 5)], np.int64), "no such slot"),
    ("spans", np.array([(0, -1, 5)], np.int64), "below 0"),
    ("spans", np.array([(0, 0, 3), (0, 3, 2)], np.int64), "two spans"),
    ("spans", np.array([(0, 0, MOST)], np.int64), "another number of tokens"),
    ("kept_inputs", np.zeros(3, np.int64), "five numbers"),
    ("kept_inputs", np.array([0, SLOTS, RING, TOTAL, STATES], np.int64), "is 0"),
    ("kept_inputs", np.array([64, MOST, RING, TOTAL, STATES], np.int64), "1024 slots"),
    ("kept_inputs", np.array([64, SLOTS, 2, TOTAL, STATES], np.int64), "as many positions"),
    ("kept_inputs", np.array([64, SLOTS, RING, TOTAL - 1, STATES], np.int64), "kept floats"),
    ("kept_inputs", np.array([64, SLOTS, RING, TOTAL, -1], np.int64), "or below 0"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_inputs_are_refused(name: str, value: np.ndarray, message: str) -> None:
    made = Convolution()
    with pytest.raises(Exception, match=message):  # onnxruntime's classes have no common base
        made.run(**made.feeds((0, 0, 5)) | {name: value})
