"""Names the kind of a model that cannot be converted, and what to take instead."""

from collections.abc import Iterable

from specops.models.convert.model_config import ModelConfig

EXPERTS = "a mixture of experts, and only dense models run here: take a dense one"
_EXPERTS = (  # in lower case, parts of the names of architectures whose names do not say `moe`
    *("mixtral", "dbrx", "gptoss", "gpt-oss", "qwen3next", "llama4", "deepseekv", "deepseek2"),
    *("grok", "jamba"),
)
_EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_WITHOUT_TEXT = (  # ends of transformers' names
    *("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification"),
    *("ForQuestionAnswering", "ForMultipleChoice", "ForPreTraining", "ForImageClassification"),
    *("ForCTC", "ForAudioClassification"),
)
_ENCODERS = ("bert", "embedding", "t5encoder")  # parts of llama.cpp's names
_DRAFTS = ("assistant", "eagle3", "dflash")
_IMAGES = "clip"  # llama.cpp's name for all that reads images or sound


def not_supported(architecture: str, supported: Iterable[str]) -> str:
    """Names the kind of an architecture that is not `supported`."""
    if kind := _what_it_is(architecture):
        return f"is {architecture}, {kind}"
    known = ", ".join(sorted(supported))
    return f"is {architecture}, which is not supported; supported are {known}"


def _what_it_is(architecture: str) -> str:
    """What a model of this architecture is; empty if only its name is known."""
    lower = architecture.lower()
    if "moe" in lower or any(part in lower for part in _EXPERTS):
        return EXPERTS
    if lower == _IMAGES:
        return "which only reads images or sound (mmproj): take the file of the language model"
    if any(part in lower for part in _DRAFTS):
        return (
            "a draft for another model: as SPECOPS_TARGET take the model that it drafts for; as "
            "SPECOPS_DRAFT take the checkpoint of an EAGLE-3 head (safetensors or .bin), no GGUF"
        )
    if architecture.endswith(_WITHOUT_TEXT) or any(part in lower for part in _ENCODERS):
        return "a model that embeds or classifies: take one that generates text"
    return ""


def refuse(config: ModelConfig) -> None:
    """Raises ExportError for mixtures of experts, quantized weights and encoder-decoders."""
    for part in (config, config.section("text_config") or config):
        for key in _EXPERT_COUNTS:
            if key in part and (count := part.count(key)):
                raise part.error(key, f"is {count}: this is {EXPERTS}")
        if part.flag("enable_moe_block", False):
            raise part.error("enable_moe_block", f"is true: this is {EXPERTS}")
        if (quantized := part.section("quantization_config")) is not None:
            method = quantized.text("quant_method", "absent")
            raise quantized.error(
                "quant_method",
                f"is {method}: the weights are quantized already, and only F32, F16 and BF16 can "
                "be converted; take the model that they were made of, or a GGUF",
            )
    if config.flag("is_encoder_decoder", False):
        raise config.error(
            "is_encoder_decoder",
            "is true: encoders cannot be run; take a model with a decoder alone",
        )
