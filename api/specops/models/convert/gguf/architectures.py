"""Finds the family that reads a GGUF, and refuses settings that no family supports."""

from typing import Any

from specops.models.convert.families.family import BY_GGUF, Family
from specops.models.convert.gguf.header import Metadata
from specops.models.convert.refusals import EXPERTS, not_supported

WINDOW, MTP_LAYERS = "{arch}.attention.sliding_window", "{arch}.nextn_predict_layers"
# Keys of settings that few families support, and the values without effect.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "{arch}.logit_scale": (0, 1),
    "{arch}.embedding_scale": (0, 1),
    "{arch}.residual_scale": (0, 1),
    "{arch}.attention.scale": (0,),
    "{arch}.attention.clamp_kqv": (0,),
    "{arch}.attention.max_alibi_bias": (0,),
    "{arch}.attn_logit_softcapping": (0,),
    "{arch}.final_logit_softcapping": (0,),
    "{arch}.attention.causal": (True,),
    "{arch}.use_parallel_residual": (False,),
    "{arch}.pooling_type": (0,),
}
_TYPE, _MODEL, _EXPERTS = "general.type", "model", "{arch}.expert_count"
# What a file may repeat, and the keys that it has to equal.
_REPEATED = {
    "{arch}.embedding_length_out": "{arch}.embedding_length",
    "{arch}.attention.key_length_swa": "{arch}.attention.key_length",
    "{arch}.attention.value_length_swa": "{arch}.attention.value_length",
    "{arch}.rope.dimension_count_swa": "{arch}.rope.dimension_count",
    "{arch}.rope.freq_base_swa": "{arch}.rope.freq_base",
}
_SECTIONS = "{arch}.rope.dimension_sections"


def family_in(metadata: Metadata) -> type[Family]:
    """The family that reads a file.

    Raises:
        ExportError: no family reads the architecture, or one of the settings.
    """
    families = BY_GGUF.get(metadata.architecture)
    if families is None:
        problem = not_supported(metadata.architecture, BY_GGUF)
        raise metadata.error("general.architecture", problem)
    if metadata.text(_TYPE, _MODEL) != _MODEL:
        kind = metadata.text(_TYPE)
        raise metadata.error(_TYPE, f"is {kind}: this is not a model; take the model's own file")
    if metadata.optional_integer(_EXPERTS):
        raise metadata.error(_EXPERTS, f"is {metadata.integer(_EXPERTS)}: this is {EXPERTS}")
    family = families[-1 if metadata.optional_integer(WINDOW) else 0]
    own = {*family.gguf_numbers.values(), *family.gguf_keys}
    for key, allowed in _NEUTRAL.items():
        if key not in own:
            check_neutral(metadata, key, allowed)
    check_neutral(metadata, MTP_LAYERS, (0, 1) if family.has_mtp else (0,))
    for key, other in _REPEATED.items():
        if key in own or key not in metadata:
            continue
        if other not in metadata or metadata.raw(key) != metadata.raw(other):
            raise metadata.error(key, f"must be the same as {other}, or absent")
    sections = _SECTIONS in metadata and any(metadata.listed(_SECTIONS, int))
    if sections and family.interleaved:  # those of GLM-4V are not
        raise metadata.error(_SECTIONS, "must be 0 or absent")
    return family


def check_neutral(metadata: Metadata, key: str, allowed: tuple[Any, ...]) -> None:
    """Raises ExportError for a value that no family supports.

    Args:
        metadata: of the GGUF.
        key: without the architecture's name.
        allowed: values that change nothing.
    """
    if key in metadata and (value := metadata.raw(key)) not in allowed:
        raise metadata.error(key, f"is {value}; this cannot be exported")
