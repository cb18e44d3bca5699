"""How long a pass through a decoder's linear layers takes, by block size and zero points.

TinyLlama-1.1B's shapes and nothing else of it, with random codes: how long a pass takes depends
on the shapes, not on what the weights say. Beside `quantization`, this is what a block size is
chosen by.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from bench.quiet import settle
from bench.report import Table
from bench.stats import Summary, ratios, rotated
from specops.cpus import available_threads

_HIDDEN, _WIDE, _QKV = 2048, 5632, 2560
_BASE = "int4-128"  # what the others are compared with

Progress = Callable[[str], None]
Seconds = dict[str, dict[int, list[float]]]
"""Of a pass, round by round, by the kind of weights and the tokens in a pass."""


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        layers: of the stack.
        rounds: in which every stack is timed once, in turns.
        passes: a round's passes, whose median counts.
        widths: tokens in a pass.
    """

    layers: int = 6
    rounds: int = 5
    passes: int = 20
    widths: tuple[int, ...] = (1, 4)


class Stack(NamedTuple):
    """One kind of weights whose passes are timed."""

    bits: int
    block: int
    zero_points: bool

    @property
    def title(self) -> str:
        """Such as `int4-128` and `int4-128-zp`."""
        return f"int{self.bits}-{self.block}" + ("-zp" if self.zero_points else "")


def _stacks() -> list[Stack]:
    int4 = [Stack(4, block, zero) for block in (32, 64, 128, 256) for zero in (False, True)]
    return [*int4, *(Stack(8, block, False) for block in (32, 64, 128, 256))]


def measure(plan: Plan, progress: Progress) -> Seconds:
    """Seconds of a pass for each kind of weights and each width, round by round."""
    stacks = {stack.title: stack for stack in _stacks()}
    found: Seconds = {title: {width: [] for width in plan.widths} for title in stacks}
    with TemporaryDirectory() as scratch:
        sessions = {}
        for title, stack in stacks.items():
            progress(f"drawing {plan.layers} layers in {title}")
            sessions[title] = _open(stack, plan.layers, Path(scratch) / title)
        for turn in range(plan.rounds):
            for title in rotated(list(stacks), turn):
                settle()
                for width in plan.widths:
                    found[title][width].append(_time(sessions[title], width, plan.passes))
    return found


def _time(session: ort.InferenceSession, width: int, passes: int) -> float:
    x = np.random.default_rng(0).standard_normal((1, width, _HIDDEN), np.float32)
    session.run(None, {"x": x})
    seconds = []
    for _ in range(passes):
        start = time.perf_counter()
        session.run(None, {"x": x})
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def _open(stack: Stack, layers: int, folder: Path) -> ort.InferenceSession:
    """The linear layers of a decoder, chained, with random codes."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []

    def linear(name: str, x: str, features: int, inputs: int) -> str:
        blocks = inputs // stack.block
        arrays: dict[str, np.ndarray[Any, Any]] = {
            "codes": rng.integers(
                0, 256, (features, blocks, stack.block * stack.bits // 8), np.uint8
            ),
            "scales": np.full((features, blocks), 1e-3, np.float32),
        }
        if stack.zero_points:
            arrays["zeros"] = rng.integers(0, 256, (features, -(-blocks // 2)), np.uint8)
        for kind, values in arrays.items():
            weights.append(onnx.numpy_helper.from_array(values, f"{name}.{kind}"))
        nodes.append(
            helper.make_node(
                "MatMulNBits",
                [x, *(f"{name}.{kind}" for kind in arrays)],
                [name],
                domain="com.microsoft",
                K=inputs,
                N=features,
                bits=stack.bits,
                block_size=stack.block,
                accuracy_level=4,
            )
        )
        return name

    x = "x"
    for layer in range(layers):
        qkv = linear(f"{layer}.qkv", x, _QKV, _HIDDEN)
        nodes.append(helper.make_node("Slice", [qkv, "0", "hidden", "2"], [f"{layer}.heads"]))
        x = linear(f"{layer}.output", f"{layer}.heads", _HIDDEN, _HIDDEN)
        gate, up = (linear(f"{layer}.{part}", x, _WIDE, _HIDDEN) for part in ("gate", "up"))
        nodes.append(helper.make_node("Add", [gate, up], [f"{layer}.gated"]))
        x = linear(f"{layer}.down", f"{layer}.gated", _HIDDEN, _WIDE)
    for name, value in (("0", 0), ("hidden", _HIDDEN), ("2", 2)):
        weights.append(onnx.numpy_helper.from_array(np.array([value], np.int64), name))
    graph = helper.make_graph(
        nodes,
        "stack",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, "width", _HIDDEN])],
        [helper.make_tensor_value_info(x, TensorProto.FLOAT, [1, "width", _HIDDEN])],
        weights,
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    file = folder / "stack.onnx"
    onnx.save(model, file, save_as_external_data=True, location="stack.onnx.data")
    options = ort.SessionOptions()
    options.intra_op_num_threads = available_threads()
    options.log_severity_level = 3
    # Whoever waits its turn must not spin on the cores meanwhile.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    for path in folder.iterdir():
        path.unlink()
    return session


def table(found: Seconds, plan: Plan) -> Table:
    """A row per kind of weights."""
    base = found[_BASE]
    rows = []
    for title, times in found.items():
        cells = [title]
        for width in plan.widths:
            relative = Summary.of(ratios(times[width], base[width]))
            cells += [f"{1000 * statistics.median(times[width]):.2f}", f"{relative.median:.2f}"]
        rows.append(cells)
    columns = ["weights"]
    for width in plan.widths:
        columns += [f"M={width}, ms", f"to {_BASE}"]
    return Table(
        f"A pass through {plan.layers} of TinyLlama-1.1B's 22 layers, linear layers alone",
        columns,
        rows,
        notes=(f"medians of {plan.rounds} rounds of {plan.passes} passes; ratios within a round",),
    )


def result(found: Seconds, plan: Plan) -> dict[str, Any]:
    """What was measured, fit for JSON; times in seconds."""
    times = {
        title: {str(width): seconds for width, seconds in widths.items()}
        for title, widths in found.items()
    }
    return {"plan": asdict(plan), "seconds": times}
