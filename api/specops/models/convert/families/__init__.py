"""The model families that can be exported; each class names its architectures.

Every module with families is imported here, which registers them.
"""

from __future__ import annotations

from specops.models.convert.families import (  # noqa: F401 - registers their families
    gemma4,
    hybrids,
    layer_norm_decoder,
    relatives,
)
from specops.models.convert.families.family import BY_ARCHITECTURE, BY_MODEL_TYPE, Family
from specops.models.convert.model_config import ModelConfig
from specops.models.convert.refusals import refuse, what_it_is


def family_of(config: ModelConfig) -> Family:
    """The family of config.json's first architecture or, if it names none, of its `model_type`.

    Raises:
        ExportError: the family is unknown, or does not support one of the settings.
    """
    refuse(config)
    key, name, known = "architectures", config.first_text("architectures"), BY_ARCHITECTURE
    if name is None:
        key, name, known = "model_type", config.text("model_type"), BY_MODEL_TYPE
    if name not in known:
        kind = what_it_is(name)
        raise config.error(
            key,
            f"is {name}, {kind}"
            if kind
            else f"is {name}, which is not supported; supported are {', '.join(sorted(known))}",
        )
    return known[name](config)
