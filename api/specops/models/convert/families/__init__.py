"""One file per model family; these tables say which file draws which architecture."""

from __future__ import annotations

from specops.models.convert.families.family import Family
from specops.models.convert.families.gemma3 import Gemma3, Gemma3Pictures
from specops.models.convert.families.gpt2 import GPT2
from specops.models.convert.families.granite import Granite
from specops.models.convert.families.llama import Llama
from specops.models.convert.families.mistral import Mistral
from specops.models.convert.families.olmo2 import OLMo2
from specops.models.convert.families.opt import OPT
from specops.models.convert.families.phi3 import Phi3
from specops.models.convert.families.qwen2 import Qwen2
from specops.models.convert.families.qwen3 import Qwen3
from specops.models.convert.families.smollm3 import SmolLM3
from specops.models.convert.model_config import ModelConfig

_FAMILIES: dict[str, type[Family]] = {
    "GPT2LMHeadModel": GPT2,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3Pictures,
    "GraniteForCausalLM": Granite,
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Mistral,
    "OPTForCausalLM": OPT,
    "Olmo2ForCausalLM": OLMo2,
    "Phi3ForCausalLM": Phi3,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen3ForCausalLM": Qwen3,
    "SmolLM3ForCausalLM": SmolLM3,
}


# What goes by which `model_type`, for a config.json that names no architecture.
_ARCHITECTURES = {
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "granite": "GraniteForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
}


def family_of(config: ModelConfig) -> Family:
    """The family that config.json's first architecture belongs to, or else its `model_type`.

    Raises:
        ExportError: no family does, or one of its settings cannot be drawn.
    """
    if not config.gives("architectures"):
        kind = config.text("model_type")
        if kind not in _ARCHITECTURES:
            raise config.error(
                "model_type",
                f"names {kind}, which cannot be exported; known are {', '.join(_ARCHITECTURES)}",
            )
        return _FAMILIES[_ARCHITECTURES[kind]](config)
    architecture = config.first_text("architectures")
    if architecture not in _FAMILIES:
        raise config.error(
            "architectures",
            f"names {architecture}, which cannot be exported; known are {', '.join(_FAMILIES)}",
        )
    return _FAMILIES[architecture](config)
