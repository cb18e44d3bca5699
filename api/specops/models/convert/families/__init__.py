"""One file per model family; this table says which file draws which architecture."""

from __future__ import annotations

from specops.models.convert.families.family import Family
from specops.models.convert.families.gpt2 import GPT2
from specops.models.convert.families.llama import Llama
from specops.models.convert.families.opt import OPT
from specops.models.convert.families.phi3 import Phi3
from specops.models.convert.families.qwen2 import Qwen2
from specops.models.convert.model_config import ModelConfig

_FAMILIES: dict[str, type[Family]] = {
    "GPT2LMHeadModel": GPT2,
    "LlamaForCausalLM": Llama,
    "OPTForCausalLM": OPT,
    "Phi3ForCausalLM": Phi3,
    "Qwen2ForCausalLM": Qwen2,
}


def family_of(config: ModelConfig) -> Family:
    """The family that config.json's first architecture belongs to; ExportError if none does."""
    architecture = config.first_text("architectures")
    if architecture not in _FAMILIES:
        raise config.error(
            "architectures",
            f"names {architecture}, which cannot be exported; known are {', '.join(_FAMILIES)}",
        )
    return _FAMILIES[architecture](config)
