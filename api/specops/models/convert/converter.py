"""The whole of an export: check, draw, write, and let the finished folder appear at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import onnx

from specops.models.convert.calibration import Activations, draw_samples
from specops.models.convert.checkpoint import Checkpoint
from specops.models.convert.errors import ExportError
from specops.models.convert.families import family_of
from specops.models.convert.gguf import GgufCheckpoint
from specops.models.convert.graph import DecoderGraph
from specops.models.convert.model_config import ModelConfig, ModelShape
from specops.models.convert.quantization import Quantization
from specops.models.convert.weights import WeightStore
from specops.models.convert.writer import MANIFEST, WeightFile, export_folder
from specops.models.gguf_files import OWN_WEIGHTS, is_gguf
from specops.system.checksums import write_checksums

FORMAT_VERSION = 4  # 3: 4-bit weights were rounded each to the nearest
_GRAPH_FILE = "model.onnx"
_WEIGHT_FILE = "model.onnx.data"
# How long the parts of a calibrated conversion take, where converting to 8 bits takes 1.
_WRITING, _ROUNDING = 6, 12
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportedModel:
    """An exported folder and what its `specops.json` says."""

    path: Path
    family: str
    quantization: Quantization
    source_digest: str
    shape: ModelShape
    num_parameters: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]

    @property
    def graph_file(self) -> Path:
        """The ONNX graph; its weights lie beside it."""
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
        }


def quantization_for(source: Path, text: str | None) -> Quantization | None:
    """What `export_checkpoint` is to be given for a quantization's name; None for a GGUF's own.

    No name stands for int4, and for a GGUF's own weights. Raises ValueError for an unknown one.
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
    source_digest: str | None = None,
) -> ExportedModel:
    """Exports the Hugging Face folder or the GGUF `source` to an ONNX folder at `destination`.

    `weights` is the folder of the safetensors, where they do not lie in the folder `source`, or
    state dicts of torch.
    `quantization` must be None for a GGUF, which has its own, and for nothing else. `progress` is
    called with the bytes of the checkpoint done so far and in all. `source_digest` goes into the
    manifest; without one, every byte of the checkpoint is read to take it. Raises ExportError for
    a checkpoint that cannot be exported faithfully; then, as after any other failure,
    `destination` is as it was before. An earlier export there is replaced.
    """
    checkpoint = GgufCheckpoint(source) if is_gguf(source) else Checkpoint(source, weights)
    quantization = _agreed(quantization, checkpoint)
    config = ModelConfig(checkpoint.config, checkpoint.config_file)
    family = family_of(config)
    shapes = family.tensors()
    checkpoint.expect(shapes, family.ignored_tensors)
    stored = [checkpoint.tensors[name] for name in shapes]
    bos_token_id, eos_token_ids = checkpoint.special_tokens()
    model = ExportedModel(
        path=destination,
        family=family.name,
        quantization=quantization,
        source_digest=source_digest or checkpoint.digest(),
        shape=family.shape,
        num_parameters=sum(tensor.num_elements for tensor in stored),
        bos_token_id=bos_token_id,
        eos_token_ids=eos_token_ids,
    )
    with export_folder(destination) as folder:
        counter = _ProgressCounter(sum(tensor.nbytes for tensor in stored), progress)
        activations = None
        if quantization.bits == 4 and quantization.calibrated:
            counter.calibrates()
            activations = _activations(source, weights, model, folder, counter)
        with WeightFile(folder / _WEIGHT_FILE) as file, WeightStore(file, counter.add) as store:
            graph = DecoderGraph(family.shape, quantization, store, activations)
            family.draw(graph, checkpoint)
        onnx.save(graph.finish(family.name), folder / _GRAPH_FILE)
        counter.finish()
        checkpoint.write_texts(folder)
        manifest = json.dumps(model.manifest(), indent=2) + "\n"
        (folder / MANIFEST).write_text(manifest, encoding="utf-8")
        write_checksums(folder)
    return model


def _activations(
    source: Path,
    weights: Sequence[Path],
    model: ExportedModel,
    folder: Path,
    counter: _ProgressCounter,
) -> Activations:
    """What the model computes with: it is converted to 8 bits first, and writes the text itself."""
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
        drawn = onnx.load(eight.graph_file, load_external_data=False)
    return Activations(tokens, eight.shape, drawn)


def _agreed(asked: Quantization | None, checkpoint: Checkpoint) -> Quantization:
    """What is asked for, or what the checkpoint has: never both."""
    if checkpoint.quantization is None:
        if asked is None:
            raise ExportError(f"{checkpoint.path} has no quantization of its own: name one")
        return asked
    if asked is not None:
        raise ExportError(
            f"{checkpoint.path} keeps the weights that it has: it takes {OWN_WEIGHTS}, not "
            f"{asked.name}"
        )
    return checkpoint.quantization


class _ProgressCounter:
    """Adds up bytes read; a tied weight that is read twice does not take it past the total."""

    def __init__(self, total: int, report: Progress | None) -> None:
        self._nbytes = total  # of the checkpoint
        self._done = 0
        self._total = total
        self._weight = 1  # of a byte
        self._report = report

    def calibrates(self) -> None:
        """Counts what comes before the weights are read, and that rounding them takes longer."""
        self._weight = _ROUNDING
        self._total = (1 + _WRITING + _ROUNDING) * self._nbytes

    def add(self, nbytes: int) -> None:
        self._advance(self._done + nbytes * self._weight)

    def reach(self, readings: float) -> None:
        """Says how far it is, in times that the checkpoint is read."""
        self._advance(int(readings * self._nbytes))

    def finish(self) -> None:
        self._advance(self._total)

    def _advance(self, done: int) -> None:
        before, self._done = self._done, min(done, self._total)
        if self._report is not None and self._done > before:
            self._report(self._done, self._total)
