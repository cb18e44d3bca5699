"""The whole of an export: check, build, write, and let the finished folder appear at once."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx

from specops.models.contract import FORMAT_VERSION, MANIFEST
from specops.models.convert.calibration import Activations
from specops.models.convert.checkpoint import MTP, Checkpoint
from specops.models.convert.families import family_of
from specops.models.convert.families.family import Family, Shapes
from specops.models.convert.gguf.checkpoint import GgufCheckpoint
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape
from specops.models.convert.quantization import Quantization
from specops.models.convert.weights import WeightStore
from specops.models.errors import ExportError
from specops.models.gguf_files import OWN_WEIGHTS, is_gguf
from specops.system.checksums import write_checksums
from specops.system.folders import atomic_folder

log = logging.getLogger(__name__)

_GRAPH_FILE, _MTP_FILE = "model.onnx", "mtp.onnx"
_LEFT_OUT = "the model's own MTP block is left out: %s"
# The duration of a calibrated conversion's parts, relative to a conversion to 8 bits.
_WRITING, _ROUNDING = 6, 12
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportedModel:
    """An exported folder and the content of its `specops.json`."""

    path: Path
    family: str
    quantization: Quantization
    source_digest: str
    shape: ModelShape
    num_parameters: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    has_mtp: bool

    @property
    def graph_file(self) -> Path:
        """The ONNX graph; the file of its weights is in the same folder."""
        return self.path / _GRAPH_FILE

    def manifest(self) -> dict[str, Any]:
        """The content of `specops.json`."""
        quantization = self.quantization
        return {
            "format_version": FORMAT_VERSION,
            "onnx_file": _GRAPH_FILE,
            "family": self.family,
            "quantization": {"name": quantization.name, **asdict(quantization)},
            "source_digest": self.source_digest,
            **asdict(self.shape),
            "num_parameters": self.num_parameters,
            "bos_token_id": self.bos_token_id,
            "eos_token_ids": list(self.eos_token_ids),
            **({"mtp_file": _MTP_FILE} if self.has_mtp else {}),
        }


def quantization_for(source: Path, text: str | None) -> Quantization | None:
    """The argument of `export_checkpoint` for a quantization's name.

    Without a name it is int4, or None for a GGUF, which keeps its own weights. Raises ValueError
    for an unknown name.
    """
    own = is_gguf(source) and text in (None, OWN_WEIGHTS)
    return None if own else Quantization.parse(text or "int4")


def export_checkpoint(
    source: Path,
    destination: Path,
    *,
    quantization: Quantization | None,
    weights: Sequence[Path] = (),
    progress: Progress | None = None,
    source_digest: str = "",
    in_place: bool = False,
) -> ExportedModel:
    """Exports a Hugging Face folder or a GGUF to an ONNX folder.

    Args:
        source: the folder or the GGUF file.
        destination: the folder to write. An earlier export there is replaced.
        quantization: None for a GGUF, which has its own quantization; never None for a folder.
        weights: the folder of the safetensors if it is not `source`, or torch state dicts.
        progress: called with the finished and the total bytes of the checkpoint.
        source_digest: for the manifest, `Parts.digest` of the checkpoint; empty: it is not known.
        in_place: leave a GGUF's blocks where they are, and link to a tokenizer.json: the export
            then works only while the checkpoint stays where it is.

    Raises:
        ExportError: the checkpoint cannot be exported faithfully, or `destination` is in use. After
            this and every other failure `destination` is unchanged.
    """
    checkpoint = GgufCheckpoint(source) if is_gguf(source) else Checkpoint(source, weights)
    quantization = _agreed(quantization, checkpoint)
    config = ModelConfig(checkpoint.config, checkpoint.config_file)
    family = family_of(config)
    shapes = family.tensors()
    block = _expected(checkpoint, family, shapes)
    stored = [checkpoint.tensors[name] for name in shapes]
    nbytes = sum(checkpoint.tensors[name].nbytes for name in shapes | block)
    bos_token_id, eos_token_ids = checkpoint.bos_and_eos(family.shape.vocab_size)
    if not eos_token_ids:
        log.warning("%s has no end token: answers end only at their token limit", source)
    model = ExportedModel(
        path=destination,
        family=family.name,
        quantization=quantization,
        source_digest=source_digest,
        shape=family.shape,
        num_parameters=sum(tensor.num_elements for tensor in stored),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
        has_mtp=bool(block),
    )
    with _export_folder(destination) as folder:
        counter = _ProgressCounter(nbytes, progress)
        activations = None
        if quantization.bits == 4 and quantization.calibrated:
            counter.calibrates()
            activations = _activations(source, weights, model, folder, counter)
        sources = checkpoint.files if in_place else ()
        with WeightStore(folder / f"{_GRAPH_FILE}.data", counter.add, sources) as store:
            graph = DecoderGraph(family.shape, quantization, store, activations)
            family.build(graph, checkpoint)
            onnx.save(graph.finish(family.name), folder / _GRAPH_FILE)
            if block:
                store.begin_graph()
                graph = DecoderGraph(family.shape, quantization, store)
                try:
                    family.build_mtp(graph, checkpoint)
                    onnx.save(graph.finish(f"{family.name}_mtp"), folder / _MTP_FILE)
                except ExportError as error:  # the model itself is whole
                    log.warning(_LEFT_OUT, error)
                    store.drop_graph()
                    model = replace(model, has_mtp=False)
        counter.finish()
        checkpoint.write_texts(folder, in_place=in_place)
        manifest = json.dumps(model.manifest(), indent=2) + "\n"
        (folder / MANIFEST).write_text(manifest, encoding="utf-8")
        write_checksums(folder)
    return model


def _expected(checkpoint: Checkpoint, family: Family, shapes: Shapes) -> Shapes:
    """Checks a checkpoint's tensors; returns the MTP block's, none where it has no use.

    Raises:
        ExportError: tensors of the model itself are missing, left over or of another shape.
    """
    ignored = family.ignored_tensors
    if not (family.has_mtp and checkpoint.has_mtp):
        checkpoint.expect(shapes, ignored)
        return {}
    checkpoint.expect(shapes, (*ignored, f"*{MTP}*"))
    block = family.mtp_tensors()
    try:
        checkpoint.expect(shapes | block, ignored)
    except ExportError as error:
        log.warning(_LEFT_OUT, error)
        return {}
    return block


def _activations(
    source: Path,
    weights: Sequence[Path],
    model: ExportedModel,
    folder: Path,
    counter: _ProgressCounter,
) -> Activations:
    """Converts the model to 8 bits and lets it write the text for calibration."""
    # Parts of the engine: other conversions start sooner without them.
    from specops.models.convert.calibration.samples import draw_samples  # noqa: PLC0415

    with TemporaryDirectory(dir=folder.parent, prefix=f"{folder.name}.") as scratch:
        eight = export_checkpoint(
            source,
            Path(scratch) / "int8",
            quantization=Quantization(bits=8, block=model.quantization.block),
            weights=weights,
            progress=lambda done, total: counter.reach(done / total),
            source_digest=model.source_digest,
        )
        tokens = draw_samples(
            eight.path,
            Path(scratch),
            lambda done, total: counter.reach(1 + _WRITING * done / total),
        )
        earlier = onnx.load(eight.graph_file, load_external_data=False)
    return Activations(tokens, earlier)


def _agreed(asked: Quantization | None, checkpoint: Checkpoint) -> Quantization:
    """The requested quantization or the checkpoint's own one; having both is an error."""
    if checkpoint.quantization is None:
        if asked is None:
            raise ExportError(f"{checkpoint.path} has no quantization of its own: specify one")
        return asked
    if asked is not None:
        raise ExportError(
            f"{checkpoint.path} keeps its own weights: the quantization must be {OWN_WEIGHTS}, not "
            f"{asked.name}"
        )
    return checkpoint.quantization


@contextmanager
def _export_folder(destination: Path) -> Iterator[Path]:
    """A temporary folder that replaces `destination` at the end, see `atomic_folder`.

    Raises:
        ExportError: `destination` holds something else than an export, or another export writes it.
    """
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(atomic_folder(destination, MANIFEST))
        except (BlockingIOError, FileExistsError) as error:
            raise ExportError(f"{error.filename}: {error.strerror}") from None
        yield folder


class _ProgressCounter:
    """Adds up the bytes read; a tied weight is read twice and does not exceed the total."""

    def __init__(self, nbytes: int, report: Progress | None) -> None:
        """`nbytes` is the size of the checkpoint."""
        self._nbytes = self._total = nbytes
        self._done = 0
        self._weight = 1  # progress per byte
        self._report = report

    def calibrates(self) -> None:
        """Includes the time before the weights are read; calibrated rounding takes longer."""
        self._weight = _ROUNDING
        self._total = (1 + _WRITING + _ROUNDING) * self._nbytes

    def add(self, nbytes: int) -> None:
        self._advance(self._done + nbytes * self._weight)

    def reach(self, readings: float) -> None:
        """Sets the progress, in units of one conversion to 8 bits."""
        self._advance(int(readings * self._nbytes))

    def finish(self) -> None:
        self._advance(self._total)

    def _advance(self, done: int) -> None:
        before, self._done = self._done, min(done, self._total)
        if self._report is not None and self._done > before:
            self._report(self._done, self._total)
