"""More than 200 JSON schemas: every keyword that llguidance supports, alone and nested.

`schemas.json` has the parts and, for timing, whole forms.
"""

import json
from pathlib import Path
from typing import Any

Schema = dict[str, Any]


def form(**properties: Schema) -> Schema:
    """The schema of an object with exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


_FILE = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
# Functions that nest a schema in another one; `$defs` are at the top of the result.
_AROUND = {
    "alone": lambda part: part,
    "as a property": lambda part: form(kind={"const": "answer"}, value=part),
    "in a list": lambda part: {"type": "array", "items": part, "minItems": 1, "maxItems": 2},
    "by reference": lambda part: {
        **form(first={"$ref": "#/$defs/part"}, second={"$ref": "#/$defs/part"}),
        "$defs": {"part": part},
    },
    "or null": lambda part: form(value={"anyOf": [{"type": "null"}, part]}),
}
SCHEMAS: dict[str, Schema] = {
    f"{name}, {where}": around(part)
    for name, part in _FILE["parts"].items()
    for where, around in _AROUND.items()
} | {"recursive list": _FILE["recursive"]}
FORMS: dict[str, Schema] = _FILE["forms"]
