"""The Mistral family: Llama, some with attention over a sliding window.

Tensor names are those of transformers' MistralForCausalLM.
"""

from __future__ import annotations

from typing import ClassVar

from specops.models.convert.families.gated_decoder import GatedDecoder


class Mistral(GatedDecoder):
    """Mistral 7B, Nemo, Small and what else calls itself MistralForCausalLM."""

    name = "mistral"
    defaults: ClassVar = {"max_position_embeddings": 131072, "num_key_value_heads": 8}
    optional_biases = ()
    windowed = True
