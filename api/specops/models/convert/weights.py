"""Turns a checkpoint's weights into initializers: quantized in slabs, written in order.

Only the slab at hand is in memory; the scales of one matrix are kept until its codes are written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specops.models.convert.calibration import Feedback
from specops.models.convert.checkpoint import Matrix
from specops.models.convert.errors import ExportError
from specops.models.convert.quantization import BlockFormat
from specops.models.convert.quantize import QuantizedWeight, quantize_blockwise
from specops.models.convert.writer import Extent, WeightFile

_SLAB_WEIGHTS = 2**18  # float32 weights quantized at a time: 1 MiB, so that passes stay in cache
_FEEDBACK_SLAB_WEIGHTS = 2**20  # with feedback, which works column by column: long ones
_DENSE_SLAB_WEIGHTS = 2**24  # float32 weights transposed at a time: 64 MiB
_INLINE_BYTES = 1024  # below it a tensor is kept in the graph file itself


class BlockNames(NamedTuple):
    """The initializers of a quantized weight; `zero_points` is empty where there are none."""

    codes: str
    scales: str
    zero_points: str


class CodeTable(NamedTuple):
    """A table [N, K] of codes uint8 [N, K]: `scale * (code - zero)`, plus offsets if any.

    Scales and offsets are float32 [N, blocks]; `offsets` is empty where there are none.
    """

    codes: str
    scales: str
    offsets: str
    zero: int
    blocks: int


class _Written(NamedTuple):
    codes: Extent
    scales: Extent
    zero_points: Extent | None


class WeightStore:
    """Writes weights to the external-data file and collects the initializers that point there."""

    def __init__(self, file: WeightFile, on_read: Callable[[int], None]) -> None:
        """`on_read` is told how many bytes of the checkpoint each step has consumed."""
        self.initializers: list[onnx.TensorProto] = []
        self._file = file
        self._on_read = on_read
        self._written: dict[tuple[str, BlockFormat, bool], _Written] = {}
        affinity = getattr(os, "sched_getaffinity", None)  # macOS has none
        self._workers = len(affinity(0)) if affinity else os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="quantize")

    def __enter__(self) -> WeightStore:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()

    @property
    def folder(self) -> Path:
        """Where the external data lie; all that was written can be read there."""
        self._file.flush()
        return self._file.path.parent

    def vector(self, name: str, values: NDArray[np.float32]) -> str:
        """A weight that is stored as it is, such as a norm's."""
        self._on_read(values.nbytes)
        return self.constant(name, values)

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """A tensor that the graph needs and no checkpoint holds."""
        if values.nbytes <= _INLINE_BYTES:
            self.initializers.append(numpy_helper.from_array(values, name))
            return name
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        return self._point(name, kind, values.shape, self._file.write([values]))

    def dense_table(self, name: str, matrix: Matrix) -> str:
        """`matrix` [N, K] in float32 as Gather reads it."""
        rows = self._slabs(matrix, _DENSE_SLAB_WEIGHTS)
        with _naming(matrix):
            extent = self._file.write(np.asarray(slab, np.float32) for slab in rows)
        return self._point(name, TensorProto.FLOAT, matrix.shape, extent)

    def code_table(self, name: str, matrix: Matrix) -> CodeTable:
        """`matrix` [N, K], which has codes, as they are: a byte each."""
        scales: list[NDArray[np.float32]] = []
        offsets: list[NDArray[np.float32]] = []
        zero = 0

        def codes() -> Iterator[NDArray[np.uint8]]:
            nonlocal zero
            for slab in self._slabs(matrix, _SLAB_WEIGHTS):
                found = slab.codes()
                zero = found.zero
                scales.append(found.scales)
                if found.offsets is not None:
                    offsets.append(found.offsets)
                yield found.codes.reshape(len(found.codes), -1)

        with _naming(matrix):
            written = self._file.write(codes())
        rows, columns = matrix.shape
        blocks = (rows, scales[0].shape[1])
        names = [self._point(f"{name}.codes", TensorProto.UINT8, (rows, columns), written)]
        for kind, values in (("scales", scales), ("offsets", offsets)):
            if values:
                extent = self._file.write(values)
                names.append(self._point(f"{name}.{kind}", TensorProto.FLOAT, blocks, extent))
        return CodeTable(names[0], names[1], names[2] if offsets else "", zero, blocks[1])

    def dense_transposed(self, name: str, matrix: Matrix) -> str:
        """`matrix` [N, K] in float32 as MatMul reads it: [K, N]."""
        features, inputs = matrix.shape
        extent = self._file.write(self._transposed(matrix))
        return self._point(name, TensorProto.FLOAT, (inputs, features), extent)

    def matmul_blocks(
        self, name: str, matrix: Matrix, stored: BlockFormat, feedback: Feedback | None = None
    ) -> BlockNames:
        """`matrix` [N, K] as MatMulNBits reads it: codes [N, blocks, bytes of a block].

        Rounded with `feedback`, if there is any.
        """
        features, inputs = matrix.shape
        blocks = -(-inputs // stored.block)
        written = self._quantized(matrix, stored, feedback, pad=True)
        shape = (features, blocks, stored.block * stored.bits // 8)
        return self._point_blocks(name, written, shape, blocks, stored)

    def table_blocks(self, name: str, matrix: Matrix, stored: BlockFormat) -> BlockNames:
        """`matrix` [N, K] as GatherBlockQuantized reads it: codes [N, bytes of a row].

        Where K is whole blocks these are the bytes of `matmul_blocks`, so a head tied to the
        embedding and stored alike shares them in the file.
        """
        features, inputs = matrix.shape
        written = self._quantized(matrix, stored, None, pad=inputs % stored.block == 0)
        shape = (features, inputs * stored.bits // 8)
        return self._point_blocks(name, written, shape, -(-inputs // stored.block), stored)

    # -----------------------------------------------------------------------------------------

    def _quantized(
        self, matrix: Matrix, stored: BlockFormat, feedback: Feedback | None, *, pad: bool
    ) -> _Written:
        key = (matrix.name, stored, pad)
        if key not in self._written:
            scales: list[NDArray[np.float32]] = []
            zero_points: list[NDArray[Any]] = []
            row_bytes = None if pad else matrix.shape[1] * stored.bits // 8

            def codes() -> Iterator[NDArray[np.uint8]]:
                for quantized in self._quantize(matrix, stored, feedback):
                    scales.append(quantized.scales)
                    if quantized.zero_points is not None:
                        zero_points.append(quantized.zero_points)
                    yield quantized.packed.reshape(len(quantized.packed), -1)[:, :row_bytes]

            self._written[key] = _Written(
                self._file.write(codes()),
                self._file.write(scales),
                self._file.write(zero_points) if zero_points else None,
            )
        return self._written[key]

    def _quantize(
        self, matrix: Matrix, stored: BlockFormat, feedback: Feedback | None
    ) -> Iterator[QuantizedWeight]:
        """Quantized slabs in order, as many at a time as there are processors."""

        def work(slab: Any) -> QuantizedWeight:
            if matrix.own_format is not None:
                kept: QuantizedWeight = slab.quantized(stored.bits, fractions=stored.fractions)
                return kept
            weight = np.asarray(slab, np.float32)
            if feedback is not None:
                return feedback.quantize(weight)
            return quantize_blockwise(weight, stored.bits, stored.block)

        pending: list[Any] = []
        slabs = self._slabs(matrix, _FEEDBACK_SLAB_WEIGHTS if feedback else _SLAB_WEIGHTS)
        with _naming(matrix):
            for slab in slabs:
                pending.append(slab)
                if len(pending) == 2 * self._workers:
                    yield from self._pool.map(work, pending)
                    pending.clear()
            yield from self._pool.map(work, pending)

    def _slabs(self, matrix: Matrix, weights: int) -> Iterator[Any]:
        for slab in matrix.rows(max(1, weights // matrix.shape[1])):
            yield slab
            self._on_read(matrix.nbytes * len(slab) // matrix.shape[0])

    def _transposed(self, matrix: Matrix) -> Iterator[NDArray[np.float32]]:
        features, inputs = matrix.shape
        step = max(1, _DENSE_SLAB_WEIGHTS // features)
        for start in range(0, inputs, step):
            slab = matrix.columns(start, min(start + step, inputs))
            yield np.ascontiguousarray(slab.T)
            self._on_read(matrix.nbytes * slab.shape[1] // inputs)

    def _point_blocks(
        self,
        name: str,
        written: _Written,
        codes_shape: tuple[int, ...],
        blocks: int,
        stored: BlockFormat,
    ) -> BlockNames:
        codes = self._point(f"{name}.codes", TensorProto.UINT8, codes_shape, written.codes)
        scales_shape = (codes_shape[0], blocks)
        scales = self._point(f"{name}.scales", TensorProto.FLOAT, scales_shape, written.scales)
        zero_points = ""
        if written.zero_points is not None:
            kind, width = TensorProto.UINT8, -(-blocks // 2)
            if stored.fractions:
                kind, width = TensorProto.FLOAT, blocks
            shape = (codes_shape[0], width)
            zero_points = self._point(f"{name}.zero_points", kind, shape, written.zero_points)
        return BlockNames(codes, scales, zero_points)

    def _point(self, name: str, kind: int, shape: tuple[int, ...], extent: Extent) -> str:
        tensor = onnx.TensorProto(
            name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL
        )
        where = {"location": self._file.path.name, "offset": extent.offset, "length": extent.length}
        for key, value in where.items():
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name


@contextmanager
def _naming(matrix: Matrix) -> Iterator[None]:
    """Says which tensor's numbers are none."""
    try:
        yield
    except ValueError as error:
        raise ExportError(
            f"tensor {matrix.name}: {error}; the checkpoint is damaged, download it again"
        ) from None
