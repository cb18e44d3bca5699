"""Converts checkpoints to ONNX graphs that the engine can run.

Checkpoints are Hugging Face folders, torch state dicts or GGUF files of llama.cpp. Nothing in the
serving path imports this package. It needs neither torch nor the memory of a whole model: it reads
tensors from memory-mapped files, quantizes them in slabs of rows and writes them in order to one
external-data file.
"""

from specops.models.convert.converter import ExportedModel, export_checkpoint, quantization_for
from specops.models.convert.quantization import Quantization
from specops.models.errors import ExportError

__all__ = [
    "ExportError",
    "ExportedModel",
    "Quantization",
    "export_checkpoint",
    "quantization_for",
]
