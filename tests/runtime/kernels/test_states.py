"""Layers with a recurrent state: the right numbers, and the same bits however tokens come.

A request's tokens come in chunks, one by one or with draft tokens, some of which are rejected,
beside other requests'. What counts is that outputs and states are those of the whole sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from specops.runtime import kernels
from tests.runtime.kernels.states import (
    RING,
    SHAPES,
    SLOTS,
    TRUE_SHAPES,
    Floats,
    Layer,
    Shape,
    Span,
    Tokens,
    random_tokens,
)

LENGTH = 230
MOST = np.iinfo(np.int64).max
layers = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def sequences(shape: Shape, length: int = LENGTH) -> list[Tokens]:
    return [random_tokens(shape, length, slot) for slot in range(SLOTS)]


def error(found: Floats, expected: Floats) -> float:
    """The largest error of a number, relative to 1 + its size."""
    return float((np.abs(found - expected) / (1 + np.abs(expected))).max())


def whole(shape: Shape, tokens: Sequence[Tokens]) -> tuple[Floats, list[Floats]]:
    """What plain C computes in one piece: outputs, by the operator of an export, and states."""
    kernels.force("plain C")
    layer, count = Layer(shape), len(tokens[0]["mixed"])
    stacked = {name: np.stack([one[name] for one in tokens]) for name in shape.inputs}
    for slot in range(SLOTS):
        layer.step(tokens, (slot, 0, count, 0, count))
    kernels.force(None)
    return layer.whole(**stacked)[0], [layer.state(slot) for slot in range(SLOTS)]


@pytest.mark.parametrize(
    "shape", [*SHAPES.values(), *TRUE_SHAPES.values()], ids=[*SHAPES, *TRUE_SHAPES]
)
def test_it_computes_what_numpy_computes(shape: Shape) -> None:
    layer, tokens = Layer(shape), random_tokens(shape, 300, 0)
    out, state = layer.reference(tokens)
    found = layer.step([tokens], (0, 0, 300, 0, 300))
    assert error(found, out) < 1e-4
    assert error(layer.state(0), state) < 1e-4


@layers
def test_thousands_of_tokens_stay_close(shape: Shape) -> None:
    layer, tokens = Layer(shape), random_tokens(shape, 2000, 0)
    found = layer.step([tokens], (0, 0, 2000, 0, 2000))
    assert error(found, layer.reference(tokens)[0]) < 1e-4


def test_the_delta_rule_is_that_of_transformers() -> None:
    """In its recurrent form and float32; with the norm that follows it."""
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    shape, count = TRUE_SHAPES["Qwen3.5-4B"], 300
    layer, tokens = Layer(shape), random_tokens(shape, count, 0)
    given = {name: torch.tensor(rows) for name, rows in (tokens | layer.weights).items()}
    heads, keys, size = shape.heads, shape.groups * shape.key_size, shape.value_size
    mixed = given["mixed"].split([keys, keys, heads * size], -1)
    queries, key, value = (part.reshape(1, count, -1, size) for part in mixed)
    out, state = qwen.torch_recurrent_gated_delta_rule(
        *(part.repeat_interleave(heads // shape.groups, 2) for part in (queries, key)),
        value,
        g=(given["decay"] * torch.nn.functional.softplus(given["a"] + given["bias"]))[None],
        beta=given["b"].sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    norm = qwen.Qwen3_5RMSNormGated(size, eps=1e-6)
    norm.weight.data = given["norm"]
    out = norm(out.reshape(-1, size), given["gate"].reshape(-1, size)).reshape(count, -1)
    found = layer.step([tokens], (0, 0, count, 0, count))
    assert error(found, out.detach().numpy()) < 2e-5
    assert error(layer.state(0), state[0].numpy()) < 2e-5


def test_the_state_space_is_that_of_transformers() -> None:
    """Token by token in float32."""
    torch = pytest.importorskip("torch", reason="needs the extra `reference`")
    granite = pytest.importorskip("transformers.models.granitemoehybrid.modeling_granitemoehybrid")
    shape, count = TRUE_SHAPES["Granite-4.0-h"], 300
    layer, tokens = Layer(shape), random_tokens(shape, count, 0)
    given = {name: torch.tensor(rows) for name, rows in (tokens | layer.weights).items()}
    heads, size, width = shape.heads, shape.value_size, shape.key_size
    x, b, c = given["mixed"].split([heads * size, width, width], -1)
    state, out = torch.zeros(1, heads, size, width), []
    for t in range(count):
        y = granite.mamba2_selective_state_update(
            state,
            x[t].reshape(1, heads, size),
            given["dt"][t].reshape(1, heads, 1).expand(1, heads, size),
            given["decay"][:, None, None].expand(heads, size, width),
            b[t].reshape(1, 1, width),
            c[t].reshape(1, 1, width),
            given["skip"][:, None].expand(heads, size),
            z=None,
            dt_bias=given["bias"][:, None].expand(heads, size),
            dt_softplus=True,
        )
        out.append(y.reshape(-1) * torch.nn.functional.silu(given["gate"][t]))
    found = layer.step([tokens], (0, 0, count, 0, count))
    assert error(found, torch.stack(out).numpy()) < 2e-5
    assert error(layer.state(0), state[0].mT.numpy()) < 2e-5


def test_extreme_decays_and_rates_stay_finite_and_right() -> None:
    """Decays of e^-316 to e^0, rates from 0 to 1, values from -0.3 to 25."""
    shape, count, rng = SHAPES["GatedDelta"], 200, np.random.default_rng(3)
    layer = Layer(shape)
    layer.weights["decay"][:], layer.weights["bias"][:] = -1, 0
    layer = Layer(shape, layer.weights)
    tokens = random_tokens(shape, count, 2)
    wanted = np.exp(rng.uniform(np.log(1e-6), np.log(316), tokens["a"].shape))
    tokens["a"] = np.where(wanted > 20, wanted, np.log(np.expm1(np.minimum(wanted, 20))))
    tokens["a"] = tokens["a"].astype(np.float32)
    tokens["b"] = rng.uniform(-30, 30, tokens["b"].shape).astype(np.float32)
    values = shape.heads * shape.value_size
    tokens["mixed"][:, -values:] = rng.uniform(-0.3, 25, (count, values))
    expected, state = layer.reference(tokens)
    found = layer.step([tokens], (0, 0, count, 0, count))
    assert error(found, expected) < 1e-4
    assert error(layer.state(0), state) < 1e-4


@dataclass
class Request:
    """One slot's way through its sequence."""

    slot: int
    mode: str
    at: int = 0
    applied: int = 0

    def next(self, rng: np.random.Generator) -> tuple[Span, int]:
        """A span, and how many of its tokens count; the others are rejected draft tokens."""
        left, mode = LENGTH - self.at, self.mode
        if mode == "mixed":
            mode = str(rng.choice(["chunks", "single", "drafts", "draft model"]))
        most = {"chunks": 96, "single": 1, "drafts": 17, "draft model": 9}[mode]
        count = min(int(rng.integers(1, most + 1)), left)
        right = int(rng.integers(1, count + 1)) if mode == "drafts" else count
        num_committed = self.at + (1 if mode == "drafts" else count)
        if mode == "draft model":  # it has read more than is verified
            num_committed = int(rng.integers(max(self.applied, self.at - 2), self.at + count + 1))
            num_committed = max(num_committed, self.at + count - RING)
        span = self.slot, self.at, count, self.applied, num_committed
        self.at, self.applied = self.at + right, num_committed
        return span, right


@pytest.mark.usefixtures("each_kernel")
@pytest.mark.parametrize("mode", ["chunks", "single", "drafts", "draft model", "mixed"])
@layers
def test_pieces_other_slots_and_rejected_tokens_change_no_bit(shape: Shape, mode: str) -> None:
    chosen, tokens = kernels.kernel(), sequences(shape)
    outputs, states = whole(shape, tokens)
    kernels.force(chosen)
    layer, rng = Layer(shape), np.random.default_rng(7)
    requests = [Request(slot, mode) for slot in range(SLOTS)]
    while running := [one for one in requests if one.at < LENGTH]:
        picked = [running[i] for i in rng.permutation(len(running))[: rng.integers(1, SLOTS + 1)]]
        steps = [one.next(rng) for one in picked]
        given = [{name: rows.copy() for name, rows in one.items()} for one in tokens]
        for (slot, start, _, _, _), right in steps:
            for rows in given[slot].values():
                rows[start + right :] += 1  # rejected tokens are other ones
        out, row = layer.step(given, *(span for span, _ in steps)), 0
        for (slot, start, count, _, _), right in steps:
            assert np.array_equal(out[row : row + right], outputs[slot, start : start + right])
            row += count
    for one, state in zip(requests, states, strict=True):
        assert np.array_equal(layer.settle(one.slot, LENGTH, one.applied), state)


@layers
def test_a_layer_writes_its_own_part_of_the_memory(shape: Shape) -> None:
    layer = Layer(shape)
    layer.step(sequences(shape), (1, 0, 5, 0, 2))
    states, rows = np.split(np.isfinite(layer.memory[1]), [layer.state_total])
    assert states[shape.state_first :][: shape.state].all()
    assert states.sum() == shape.state
    rows = rows.reshape(RING, -1)
    own = slice(shape.first, shape.first + shape.row - -shape.heads % 16)  # without what pads them
    assert rows[2:5, own].all()
    assert rows.sum() == rows[2:5, own].size
    assert not np.isfinite(layer.memory[[0, 2]]).any()


@layers
def test_a_new_sequence_reads_nothing_of_the_last_one(shape: Shape) -> None:
    layer, tokens = Layer(shape), sequences(shape, 20)
    expected = layer.step(tokens, (0, 0, 20, 0, 20))
    layer.memory[:] = np.nan
    assert np.array_equal(layer.step(tokens, (0, 0, 20, 0, 20)), expected)


@layers
def test_a_fading_state_becomes_zero_and_never_denormal(shape: Shape) -> None:
    """Not in any step, for decays just below 1 up to those that make it vanish at once."""
    weights = Layer(shape).weights
    weights["decay"][:] = -np.geomspace(0.05, 40, shape.heads)
    weights["bias"][:] = 0
    layer, tokens = Layer(shape, weights), random_tokens(shape, 1600, 4)
    tokens["a" if shape.delta else "dt"][:] = 0.5413  # a rate of 1
    tokens["mixed"][3:] *= 1e-25
    if shape.delta:
        tokens["b"][3:] = -80
    for start in range(1600):
        found = layer.step([tokens], (0, start, 1, start, start + 1))
        state = layer.state(0)
        for numbers in (found, state):
            assert not ((numbers != 0) & (np.abs(numbers) < np.finfo(np.float32).tiny)).any()
    assert not state.any()


@layers
def test_numbers_that_are_not_finite_stay_in_their_slot(shape: Shape) -> None:
    layer, tokens = Layer(shape), sequences(shape, 20)
    spans = (0, 0, 20, 0, 20), (1, 0, 20, 0, 20)
    expected = layer.step(tokens, *spans)[20:]
    tokens[0]["mixed"][3] = np.nan
    tokens[0]["gate"][5] = np.inf
    found = layer.step(tokens, *spans)
    assert np.isnan(found[3:20]).any()
    assert np.array_equal(found[20:], expected)


def tensor(*shape: int) -> Floats:
    return np.zeros(shape, np.float32)


def whole_numbers(*rows: object) -> np.ndarray:
    return np.array(rows, np.int64)


WRONG: list[tuple[str, np.ndarray, str]] = [
    ("mixed", tensor(1, 5, 17), "key's head is a multiple of 16|no multiple of those of keys"),
    ("mixed", tensor(5), r"\[..., T, sizes\]"),
    ("mixed", tensor(1, 4, 384), "gate has another shape"),
    ("gate", tensor(1, 5, 255), "gate has another shape|multiple of 32|multiple of 16"),
    ("gate", tensor(1, 4, 192), "gate has another shape"),
    ("spans", whole_numbers((3, 0, 5)), "no such slot"),
    ("spans", whole_numbers((0, 0, MOST)), "another number of tokens"),
    ("spans", whole_numbers((0, 0, 3), (0, 3, 2)), "two spans"),
    ("progress", whole_numbers((0, 5), (0, 0)), r"progress is \[S, 2\]"),
    ("progress", whole_numbers((1, 5)), "behind the first token"),
    ("progress", whole_numbers((-1, 5)), "behind the first token"),
    ("progress", whole_numbers((0, 6)), "committed tokens are not between"),
    ("progress", whole_numbers((0, -1)), "committed tokens are not between"),
    ("kept_inputs", np.zeros(4, np.int64), "five numbers"),
]


@layers
@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_wrong_inputs_are_refused(shape: Shape, name: str, value: np.ndarray, message: str) -> None:
    layer = Layer(shape)
    with pytest.raises(Exception, match=message):  # onnxruntime's classes have no common base
        layer.run(**layer.feeds(sequences(shape, 5), (0, 0, 5, 0, 5)) | {name: value})


@layers
def test_wrong_memory_is_refused(shape: Shape) -> None:
    layer = Layer(shape)
    feeds = layer.feeds(sequences(shape, 60), (0, 30, 30, 30, 60))
    wrong = {
        "address": {0: 0},
        "1024 slots": {1: MOST},
        "positions": {2: 0},
        "kept floats": {3: layer.total + 1},
        "states have another size": {4: layer.state_total - 16},
    }
    for message, numbers in wrong.items():
        kept = layer.kept.copy()
        for place, number in numbers.items():
            kept[place] = number
        with pytest.raises(Exception, match=message):
            layer.run(**feeds | {"kept_inputs": kept})
    for progress in ((30 - RING - 1, 60), (30, 60 - RING - 1)):
        with pytest.raises(Exception, match="inputs of fewer positions"):
            layer.run(**feeds | {"progress": whole_numbers(progress)})
