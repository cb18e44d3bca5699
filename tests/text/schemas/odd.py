"""JSON of every type, and schemas whose keywords have values of every type, for hypothesis."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from specops.text.schemas import shapes

NUMBERS = (0, 1, -1, 2, 0.5, -2.5, 1e300, 1 << 31, 1 << 64, -(1 << 70), 10**400, 1e-320)
TEXTS = (
    "",
    "a",
    "#",
    "#/$defs/a",
    "^a$",
    "(",
    "(?!.*ab)x",
    "[0-9]",
    "date",
    "string",
    "é\x00\u2028",
)
texts = st.sampled_from(TEXTS) | st.text(max_size=9)
plain = st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.integers() | texts
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
KEYWORDS = sorted(shapes.KEYWORDS)


def _schema_with(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas whose keywords have values that fit, most of them, or any."""
    named = st.dictionaries(st.sampled_from("abc"), inner, max_size=2)
    own: dict[str, st.SearchStrategy[Any]] = {
        **dict.fromkeys(("properties", "patternProperties", "dependentSchemas", "$defs"), named),
        **dict.fromkeys(("anyOf", "allOf", "oneOf", "prefixItems"), st.lists(inner, max_size=2)),
        **dict.fromkeys(("not", "if", "then", "else", "items", "contains"), inner),
        **dict.fromkeys(("additionalProperties", "propertyNames"), inner),
        "type": st.sampled_from([*shapes.TYPES, "integer"]),
        "required": st.lists(st.sampled_from("abcd"), max_size=2),
        "enum": st.lists(plain, max_size=3),
        "const": plain,
        "pattern": texts,
        "$ref": st.sampled_from(("#", "#/$defs/a", "#/properties/b")),
    }
    fields = {
        keyword: st.one_of(*[own[keyword]] * 4, values) if keyword in own else values
        for keyword in (*KEYWORDS, "const", "$defs")
    }
    return st.fixed_dictionaries({}, optional=fields)


schemas = st.recursive(st.booleans(), _schema_with, max_leaves=4)
