"""Calibrated rounding loses less than rounding to the nearest, for every family."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from specops.models.convert import Quantization, export_checkpoint
from specops.models.convert.calibration import Feedback, samples
from specops.models.convert.calibration.samples import draw_samples
from specops.models.convert.quantize import quantize_blockwise
from specops.runtime.kvcache.block_pool import CacheShape
from specops.runtime.kvcache.manager import KvCache
from tests.checkpoints import make_checkpoint
from tests.models.convert.dequantize import dequantize_blockwise, unpacked
from tests.models.convert.runner import Runner

DEMO = Path(__file__).parents[3] / "api" / "models" / "demo"

Float = NDArray[np.float32]


def lost(weight: Float, moment: Float, restored: Float) -> float:
    """The mean square error of a product, as a share of the product's mean square."""
    error = weight - restored
    return float(((error @ moment) * error).sum() / ((weight @ moment) * weight).sum())


@pytest.mark.parametrize(("columns", "block"), [(96, 32), (200, 32), (1100, 128)])
def test_errors_cancel_if_inputs_are_correlated(columns: int, block: int) -> None:
    rng = np.random.default_rng(0)
    mixed = np.eye(columns) + 0.2 * rng.standard_normal((columns, columns))
    x = (rng.standard_normal((2000, columns)) @ mixed).astype(np.float32)
    moment = x.T @ x / np.float32(len(x))
    weight = rng.standard_normal((64, columns), np.float32)
    restored = [
        dequantize_blockwise(quantized, 4, columns)
        for quantized in (
            Feedback(moment, block).quantize(weight),
            quantize_blockwise(weight, 4, block),
        )
    ]
    assert lost(weight, moment, restored[0]) < 0.7 * lost(weight, moment, restored[1])


@pytest.mark.parametrize(("rows", "columns", "block"), [(70, 96, 32), (5, 200, 64)])
def test_each_column_makes_up_for_those_before_it(rows: int, columns: int, block: int) -> None:
    """Compared with the steps written one after the other, in float64."""
    rng = np.random.default_rng(columns)
    x = rng.standard_normal((4000, columns)) @ rng.standard_normal((columns, columns))
    moment = (x.T @ x / len(x)).astype(np.float32)
    weight = rng.standard_normal((rows, columns), np.float32)
    found = Feedback(moment.copy(), block).quantize(weight)
    restored = dequantize_blockwise(found, 4, columns)
    damped = moment / np.trace(moment) * columns + 0.01 * np.eye(columns)
    upper = np.linalg.cholesky(damped[::-1, ::-1].astype(np.float64))[::-1, ::-1]
    assert found.zero_points is not None
    zero_points = unpacked(found.zero_points.astype(np.uint8), 4)
    errors = np.zeros_like(weight, np.float64)
    for column in range(columns):
        feedback = upper[:column, column] / upper[column, column]
        wanted = weight[:, column] + errors[:, :column] @ feedback
        step = found.scales[:, column // block]
        zero = zero_points[:, column // block] * step
        nearest = np.clip(wanted, -zero, 15 * step - zero)
        assert (np.abs(restored[:, column] - nearest) <= 0.502 * step).all()
        errors[:, column] = weight[:, column] - restored[:, column]


def test_uncorrelated_inputs_give_rounding_to_the_nearest() -> None:
    weight = np.random.default_rng(0).standard_normal((16, 64), np.float32)
    found, expected = Feedback(np.eye(64, dtype=np.float32), 32).quantize(weight), weight
    nearest = quantize_blockwise(expected, 4, 32)
    for part, wanted in zip(found, nearest, strict=True):
        np.testing.assert_allclose(part, wanted, rtol=1e-5)


def test_a_moment_that_is_not_positive_definite_is_damped() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 700)).astype(np.float32)
    moment = x.T @ x / np.float32(len(x))
    moment[600, 601] = moment[601, 600] = 1.2  # impossible: a correlation above 1
    weight = rng.standard_normal((8, 700), np.float32)
    restored = dequantize_blockwise(Feedback(moment, 128).quantize(weight), 4, 700)
    nearest = dequantize_blockwise(quantize_blockwise(weight, 4, 128), 4, 700)
    assert np.square(restored - weight).sum() < 2 * np.square(nearest - weight).sum()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_family_is_rounded_by_its_own_samples(tmp_path: Path, kind: str) -> None:
    source = make_checkpoint(tmp_path / "source", kind)
    said: list[float] = []
    model = export_checkpoint(
        source,
        tmp_path / "int4",
        quantization=Quantization.parse("int4-32"),
        progress=lambda done, total: said.append(done / total),
    )
    assert said == sorted(said)
    assert said[-1] == 1
    assert sorted(file.name for file in tmp_path.iterdir()) == ["int4", "source"]
    plain = export_checkpoint(
        source, tmp_path / "rtn", quantization=Quantization.parse("int4-32-rtn")
    )
    nodes = [
        [
            (node.op_type, node.output)
            for node in onnx.load(folder.graph_file, load_external_data=False).graph.node
        ]
        for folder in (model, plain)
    ]
    assert nodes[0] == nodes[1]
    weights = [(folder.path / "model.onnx.data").read_bytes() for folder in (model, plain)]
    assert weights[0] != weights[1]


def test_samples_have_states_in_memory_only_as_far_as_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_checkpoint(tmp_path / "source", "qwen3_5_text", layers=2)
    model = export_checkpoint(source, tmp_path / "made", quantization=Quantization.parse("int8-32"))
    used: list[tuple[CacheShape, int]] = []

    class Watched(KvCache):
        def __init__(self, shape: CacheShape, *, num_slots: int, **given: Any) -> None:
            used.append((shape, num_slots))
            super().__init__(shape, num_slots=num_slots, **given)

    def write() -> list[list[int]]:
        said: list[float] = []
        texts = draw_samples(model.path, tmp_path, lambda done, total: said.append(done / total))
        assert said == sorted(said)
        assert said[-1] == 1
        assert texts.shape == (64, 128)
        return texts.tolist()

    monkeypatch.setattr(samples, "KvCache", Watched)
    at_once = write()
    assert len({*map(tuple, at_once)}) == 64
    ((shape, slots),) = used
    assert slots == 64
    for room in (25, 0):
        monkeypatch.setattr(samples, "_STATES_BYTES", room * shape.slot_bytes)
        texts = write()
        assert len({*map(tuple, texts)}) == 64
        assert used.pop() == (shape, room or 1)
        assert texts == write()


def test_a_trained_model_loses_less(tmp_path: Path) -> None:
    """The bundled draft model's mean KL divergence to fp32, on its own text."""
    models = {
        name: export_checkpoint(
            DEMO / "draft", tmp_path / name, quantization=Quantization.parse(name)
        )
        for name in ("fp32", "int8-32", "int4-32-rtn", "int4-32")
    }
    texts = draw_samples(models["int8-32"].path, tmp_path, lambda done, total: None)[::4]
    runners = {name: Runner(model, capacity=texts.shape[1]) for name, model in models.items()}
    found = dict.fromkeys(models, 0.0)
    for text in texts:
        odds = {}
        for name, runner in runners.items():
            runner.rewind(0)
            logits = runner.step(text.tolist()).astype(np.float64)
            odds[name] = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
        for name in models:
            ours = np.exp(odds["fp32"]) * (odds["fp32"] - odds[name])
            found[name] += float(ours.sum(-1).mean()) / len(texts)
    assert found["int4-32"] < 0.6 * found["int4-32-rtn"]
