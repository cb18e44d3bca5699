"""The model families that can be exported, and which architecture belongs to which family."""

from __future__ import annotations

from specops.models.convert.families.family import Family
from specops.models.convert.families.gemma3 import Gemma3, Gemma3Multimodal
from specops.models.convert.families.layer_norm_decoder import GPT2, OPT
from specops.models.convert.families.layer_norm_relatives import Cohere2, Phi, Starcoder2
from specops.models.convert.families.relatives import (
    GLM4,
    Ernie45,
    Exaone4,
    Granite,
    Llama,
    Ministral3,
    Mistral,
    Mistral3,
    OLMo2,
    OLMo3,
    Phi3,
    Qwen2,
    Qwen2VL,
    Qwen3,
    Qwen3VL,
    SmolLM3,
)
from specops.models.convert.model_config import ModelConfig

_BY_ARCHITECTURE: dict[str, type[Family]] = {
    "Cohere2ForCausalLM": Cohere2,
    "Ernie4_5ForCausalLM": Ernie45,
    "Ernie4_5_ForCausalLM": Ernie45,
    "Exaone4ForCausalLM": Exaone4,
    "GPT2LMHeadModel": GPT2,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma3ForConditionalGeneration": Gemma3Multimodal,
    "Glm4ForCausalLM": GLM4,
    "GraniteForCausalLM": Granite,
    "LlamaForCausalLM": Llama,
    "Ministral3ForCausalLM": Ministral3,
    "Mistral3ForConditionalGeneration": Mistral3,
    "MistralForCausalLM": Mistral,
    "OPTForCausalLM": OPT,
    "Olmo2ForCausalLM": OLMo2,
    "Olmo3ForCausalLM": OLMo3,
    "Phi3ForCausalLM": Phi3,
    "PhiForCausalLM": Phi,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen2VLForConditionalGeneration": Qwen2VL,
    "Qwen2_5_VLForConditionalGeneration": Qwen2VL,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3VLForConditionalGeneration": Qwen3VL,
    "SmolLM3ForCausalLM": SmolLM3,
    "Starcoder2ForCausalLM": Starcoder2,
}
# For a config.json without an architecture. Both Gemma 3 classes have the name "gemma3".
_BY_MODEL_TYPE: dict[str, type[Family]] = {
    **{family.name: family for family in _BY_ARCHITECTURE.values()},
    **{"gemma3": Gemma3Multimodal, "gemma3_text": Gemma3, "qwen2_5_vl": Qwen2VL},
}


def family_of(config: ModelConfig) -> Family:
    """The family of config.json's first architecture or, if it names none, of its `model_type`.

    Raises:
        ExportError: the family is unknown, or cannot draw one of the settings.
    """
    key, name, known = "architectures", config.first_text("architectures"), _BY_ARCHITECTURE
    if name is None:
        key, name, known = "model_type", config.text("model_type"), _BY_MODEL_TYPE
    if name not in known:
        raise config.error(
            key, f"names {name}, which cannot be exported; known are {', '.join(known)}"
        )
    return known[name](config)
