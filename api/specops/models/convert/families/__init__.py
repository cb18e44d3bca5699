"""The model families that can be exported; each class names its architectures.

Every module here is imported, which registers its families.
"""

from importlib import import_module
from pkgutil import iter_modules

from specops.models.convert.families.family import BY_ARCHITECTURE, BY_MODEL_TYPE, Family
from specops.models.convert.model_config import ModelConfig
from specops.models.convert.refusals import not_supported, refuse

for module in iter_modules(__path__, f"{__name__}."):
    import_module(module.name)


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
        raise config.error(key, not_supported(name, known))
    return known[name](config)
