"""Turns a checkpoint's weights into initializers: quantizes them in slabs and writes them in order.

Only the current slab is in memory, and the scales of one matrix until its codes are written.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from specops.models.contract import SOURCE
from specops.models.convert.calibration import Feedback
from specops.models.convert.checkpoint import Matrix
from specops.models.convert.gguf.rows import in_q8_0
from specops.models.convert.quantization import BlockFormat
from specops.models.convert.quantize import QuantizedWeight, check_finite, quantize_blockwise
from specops.models.errors import ExportError
from specops.system.cpus import available_threads

_ALIGNMENT = 4096  # one page: ONNX Runtime maps an initializer from an aligned offset
_SLAB_WEIGHTS = 2**18  # float32 weights quantized at a time: 1 MiB, so that passes stay in cache
_FEEDBACK_SLAB_WEIGHTS = 2**20  # error feedback works column by column and needs long columns
_DENSE_SLAB_WEIGHTS = 2**24  # float32 weights transposed at a time: 64 MiB
_INLINE_BYTES = 1024  # tensors up to this size stay in the graph file

_T = TypeVar("_T")
Extent = tuple[int, int]
"""Offset and length in the weight file, in bytes."""
Orders = list[list[int] | None]
"""For each part of a matrix the indices of its rows in their file; None: all, in their order."""
BlockNames = tuple[str, str, str]
"""The initializers of codes, scales and zero points; the last name is empty if there are none."""


class WeightStore:
    """Writes weights to the external-data file and collects the initializers that refer to it.

    The file holds one tensor after the other, each starting on a new page. Several graphs may have
    weights in it; shared weights are stored once.

    Args:
        path: the new file.
        on_read: gets the number of bytes of the checkpoint that each step has read.
        sources: files whose blocks are referred to, and not written again.
    """

    def __init__(
        self, path: Path, on_read: Callable[[int], None], sources: Sequence[Path] = ()
    ) -> None:
        self.initializers: list[onnx.TensorProto] = []
        self._path = path
        self._file = path.open("wb")
        self._on_read = on_read
        self._written: dict[tuple[str, object, bool], tuple[Extent, ...]] = {}
        self._rows: dict[str, tuple[list[str], Orders]] = {}
        self._sources = [file.resolve() for file in sources]
        self._workers = available_threads()
        self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="quantize")

    def begin_graph(self) -> None:
        """Begins the initializers of another graph."""
        self.initializers = []
        self._rows = {}
        self._start = self._file.tell()

    def drop_graph(self) -> None:
        """Drops the last graph's own weights; nothing is written after them."""
        self._file.truncate(self._start)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pool.shutdown()
        self._file.close()

    @property
    def folder(self) -> Path:
        """The folder of the external data; readers see everything that was written."""
        self._file.flush()
        return self._path.parent

    def vector(self, name: str, values: NDArray[np.float32]) -> str:
        """A weight of the checkpoint that is stored unchanged, such as a norm's."""
        self._on_read(values.nbytes)
        return self.constant(name, values)

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """A tensor of the graph that is in no checkpoint."""
        if values.nbytes <= _INLINE_BYTES:
            self.initializers.append(numpy_helper.from_array(values, name))
            return name
        kind = helper.np_dtype_to_tensor_dtype(values.dtype)
        return self._refer(name, kind, values.shape, self._write([values]))

    def dense_table(self, name: str, matrix: Matrix) -> str:
        """`matrix` [N, K] in float32, as Gather reads it."""
        key = (matrix.name, np.float32, False)
        if key not in self._written:
            rows = self._slabs(matrix, _DENSE_SLAB_WEIGHTS)
            with _naming(matrix):
                self._written[key] = (self._write(map(_finite, rows)),)
        (extent,) = self._written[key]
        return self._refer(name, TensorProto.FLOAT, matrix.shape, extent)

    def dense_transposed(self, name: str, matrix: Matrix) -> str:
        """`matrix` [N, K] in float32, as MatMul reads it: [K, N]."""
        features, inputs = matrix.shape
        step = max(1, _DENSE_SLAB_WEIGHTS // features)
        key = (matrix.name, np.float32, True)

        def columns() -> Iterator[NDArray[np.float32]]:
            for start in range(0, inputs, step):
                slab = matrix.columns(start, min(start + step, inputs))
                yield np.ascontiguousarray(_finite(slab).T)
                self._on_read(matrix.nbytes * slab.shape[1] // inputs)

        if key not in self._written:
            with _naming(matrix):
                self._written[key] = (self._write(columns()),)
        (extent,) = self._written[key]
        return self._refer(name, TensorProto.FLOAT, (inputs, features), extent)

    def file_rows(self, name: str, matrix: Matrix) -> tuple[list[str], Orders]:
        """The blocks of a GGUF's `matrix`: for each part [N, bytes of a row], written once.

        Other weights become Q8_0. Where rows stay in their file, a part's rows may have an order.
        """
        if matrix.name not in self._rows:
            found, orders = self._rows[matrix.name] = [], []
            for number, part in enumerate(matrix.parts):
                key = (matrix.name, number, False)
                blocks = self._mapped(replace(matrix, parts=(part,)), _SLAB_WEIGHTS, _blocks)
                called, order = f"{name}.rows_{number}", None
                if matrix.is_gguf and part.has_blocks and part.file.resolve() in self._sources:
                    for _ in blocks:  # only their scales are checked
                        pass
                    offset, shape, order = part.place
                    extent = offset, math.prod(shape)
                    location = f"{SOURCE}{self._sources.index(part.file.resolve())}"
                else:
                    if key not in self._written:
                        self._written[key] = (self._write(blocks),)
                    (extent,) = self._written[key]
                    shape, location = (len(part), extent[1] // len(part)), self._path.name
                found.append(self._refer(called, TensorProto.UINT8, shape, extent, location))
                orders.append(order)
        return self._rows[matrix.name]

    def matmul_blocks(
        self, name: str, matrix: Matrix, stored: BlockFormat, feedback: Feedback | None = None
    ) -> BlockNames:
        """`matrix` [N, K] as MatMulNBits reads it: codes [N, blocks, bytes of a block].

        `feedback` rounds the weights, if given.

        Args:
            name: of the weight.
            matrix: [N, K].
            stored: the format.
            feedback: rounds the weights; None: each to the nearest.
        """
        blocks = -(-matrix.shape[1] // stored.block)
        extents = self._quantized(matrix, stored, feedback, pad=True)
        shape = (matrix.shape[0], blocks, stored.block * stored.bits // 8)
        return self._refer_blocks(name, extents, shape, blocks)

    def table_blocks(self, name: str, matrix: Matrix, stored: BlockFormat) -> BlockNames:
        """`matrix` [N, K] as GatherBlockQuantized reads it: codes [N, bytes of a row].

        If K is whole blocks, these are the bytes of `matmul_blocks`: a head that is tied to the
        embedding and stored in the same format shares them.

        Args:
            name: of the weight.
            matrix: [N, K].
            stored: the format.
        """
        features, inputs = matrix.shape
        extents = self._quantized(matrix, stored, None, pad=inputs % stored.block == 0)
        shape = (features, inputs * stored.bits // 8)
        return self._refer_blocks(name, extents, shape, -(-inputs // stored.block))

    # -----------------------------------------------------------------------------------------

    def _quantized(
        self, matrix: Matrix, stored: BlockFormat, feedback: Feedback | None, *, pad: bool
    ) -> tuple[Extent, ...]:
        """Writes codes, scales and zero points, if any, once for each matrix and format."""
        key = (matrix.name, stored, pad)
        if key not in self._written:
            scales: list[NDArray[np.float32]] = []
            zero_points: list[NDArray[np.uint8]] = []
            row_bytes = None if pad else matrix.shape[1] * stored.bits // 8

            def codes() -> Iterator[NDArray[np.uint8]]:
                for quantized in self._quantize(matrix, stored, feedback):
                    scales.append(quantized.scales)
                    if quantized.zero_points is not None:
                        zero_points.append(quantized.zero_points)
                    yield quantized.packed.reshape(len(quantized.packed), -1)[:, :row_bytes]

            extents = [self._write(codes())]
            extents += [self._write(values) for values in (scales, zero_points) if values]
            self._written[key] = tuple(extents)
        return self._written[key]

    def _quantize(
        self, matrix: Matrix, stored: BlockFormat, feedback: Feedback | None
    ) -> Iterator[QuantizedWeight]:
        """Quantized slabs in order."""

        def work(slab: Any) -> QuantizedWeight:
            weight = np.asarray(slab, np.float32)
            if feedback is not None:
                return feedback.quantize(weight)
            return quantize_blockwise(weight, stored.bits, stored.block)

        return self._mapped(matrix, _FEEDBACK_SLAB_WEIGHTS if feedback else _SLAB_WEIGHTS, work)

    def _mapped(self, matrix: Matrix, weights: int, work: Callable[[Any], _T]) -> Iterator[_T]:
        """What `work` makes of each slab, in order; all processors work at the same time."""
        pending: list[Any] = []
        with _naming(matrix):
            for slab in self._slabs(matrix, weights):
                pending.append(slab)
                if len(pending) == 2 * self._workers:
                    yield from self._pool.map(work, pending)
                    pending.clear()
            yield from self._pool.map(work, pending)

    def _slabs(self, matrix: Matrix, weights: int) -> Iterator[Any]:
        for slab in matrix.rows(max(1, weights // matrix.shape[1])):
            yield slab
            self._on_read(matrix.nbytes * len(slab) // matrix.shape[0])

    def _write(self, chunks: Iterable[NDArray[Any]]) -> Extent:
        """Appends `chunks` as one tensor."""
        self._file.write(b"\0" * (-self._file.tell() % _ALIGNMENT))
        offset = self._file.tell()
        for chunk in chunks:
            self._file.write(chunk.data if chunk.flags.c_contiguous else chunk.tobytes())
        return offset, self._file.tell() - offset

    def _refer_blocks(
        self,
        name: str,
        extents: tuple[Extent, ...],
        shape: tuple[int, ...],
        blocks: int,
    ) -> BlockNames:
        tensors = [
            ("codes", TensorProto.UINT8, shape),
            ("scales", TensorProto.FLOAT, (shape[0], blocks)),
            ("zero_points", TensorProto.UINT8, (shape[0], -(-blocks // 2))),
        ]
        names = [
            self._refer(f"{name}.{part}", kind, sizes, extent)
            for (part, kind, sizes), extent in zip(tensors, extents, strict=False)
        ]
        return names[0], names[1], names[2] if len(names) > 2 else ""

    def _refer(
        self,
        name: str,
        kind: int,
        shape: tuple[int, ...],
        extent: Extent,
        location: str | None = None,
    ) -> str:
        tensor = onnx.TensorProto(
            name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL
        )
        offset, length = extent
        where = {"location": location or self._path.name, "offset": offset, "length": length}
        for key, value in where.items():
            tensor.external_data.add(key=key, value=str(value))
        self.initializers.append(tensor)
        return name


def _finite(slab: Any) -> NDArray[np.float32]:
    """Numbers as float32; ValueError if one is NaN or infinite."""
    values: NDArray[np.float32] = np.asarray(slab, np.float32)
    check_finite(values)
    return values


def _blocks(slab: Any) -> NDArray[np.uint8]:
    """Rows of a GGUF as they are; an array's rows in Q8_0."""
    if isinstance(slab, np.ndarray):
        return in_q8_0(np.asarray(slab, np.float32))
    return np.asarray(slab.blocks())


@contextmanager
def _naming(matrix: Matrix) -> Iterator[None]:
    """Names the tensor that contains NaN or infinity."""
    try:
        yield
    except ValueError as error:
        raise ExportError(
            f"tensor {matrix.name}: {error}; the checkpoint is damaged, download it again"
        ) from None
