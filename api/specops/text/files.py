"""Names of the files, next to a model's weights, that define its tokenizer and chat template."""

from typing import Any

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
BYTE_PAIRS = ("vocab.json", "merges.txt")  # older than tokenizer.json
SENTENCEPIECE = "tokenizer.model"  # as well
TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"  # by image processors, under the key `chat_template`
TOOLS_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # as transformers 5 writes it
SYSTEM = "system.txt"  # ours: the system message of conversations without one
# In tokenizer_config.json, the names of a model's templates if it has several.
DEFAULT, TOOL_USE = "default", "tool_use"


def named_template(name: str, source: str) -> dict[str, Any]:
    """Return the entry of tokenizer_config.json for one of several templates."""
    return {"name": name, "template": source}
