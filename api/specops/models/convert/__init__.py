"""Checkpoint to ONNX: turns a Hugging Face folder into a graph the decoder can run.

Checkpoints are Hugging Face folders, state dicts of torch, or llama.cpp's GGUF files.

Nothing in the serving path imports this package. It needs neither torch nor the memory of
a whole model: tensors are read from memory-mapped files, quantized in slabs of rows and
written to one external-data file in order.
"""

from specops.models.convert.converter import ExportedModel, export_checkpoint, quantization_for
from specops.models.convert.errors import ExportError
from specops.models.convert.quantization import Quantization

__all__ = [
    "ExportError",
    "ExportedModel",
    "Quantization",
    "export_checkpoint",
    "quantization_for",
]
