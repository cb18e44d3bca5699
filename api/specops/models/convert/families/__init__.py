"""One file per model family; a table says which file draws which architecture."""

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

_BY_ARCHITECTURE: dict[str, type[Family]] = {
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
# For a config.json that names no architecture. Gemma 3's own name is that of both its classes.
_BY_MODEL_TYPE: dict[str, type[Family]] = {
    **{family.name: family for family in _BY_ARCHITECTURE.values()},
    **{"gemma3": Gemma3Pictures, "gemma3_text": Gemma3},
}


def family_of(config: ModelConfig) -> Family:
    """The family that config.json's first architecture belongs to, or else its `model_type`.

    Raises:
        ExportError: no family does, or one of its settings cannot be drawn.
    """
    key, name, known = "architectures", config.first_text("architectures"), _BY_ARCHITECTURE
    if name is None:
        key, name, known = "model_type", config.text("model_type"), _BY_MODEL_TYPE
    if name not in known:
        raise config.error(
            key, f"names {name}, which cannot be exported; known are {', '.join(known)}"
        )
    return known[name](config)
