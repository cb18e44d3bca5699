"""The Llama family, after which the drawing of its relatives is named.

Tensor names are those of transformers' LlamaForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder


class Llama(GatedDecoder):
    """Llama 1 to 3, TinyLlama, SmolLM 1 and 2 and what else calls itself LlamaForCausalLM."""

    name = "llama"
    defaults: ClassVar = {"max_position_embeddings": 2048}
