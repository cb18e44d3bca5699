"""JSON of every type, and schemas whose keywords have values of every type, for hypothesis."""

from functools import partial
from typing import Any

from hypothesis import strategies as st

from specops.text.schemas import shapes
from specops.text.schemas.references import SchemaError

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


def some_of(fields: dict[str, st.SearchStrategy[Any]], most: int) -> st.SearchStrategy[Any]:
    """Objects with some of these fields, at most so many."""
    return st.lists(st.sampled_from(sorted(fields)), max_size=most, unique=True).flatmap(
        lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
    )


def _schema_with(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Schemas whose keywords have values that may fit, and others."""
    within = inner | st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner)
    own: dict[str, st.SearchStrategy[Any]] = {
        "type": st.sampled_from([*shapes.TYPES, "integer"]),
        "required": st.lists(st.sampled_from("abcd"), max_size=2),
        "enum": st.lists(plain, max_size=3),
        "$ref": st.sampled_from(("#", "#/$defs/a", "#/properties/b")),
    }
    fields = {}
    for keyword in (*KEYWORDS, "const", "$defs"):
        fits = own.get(keyword, (within | values).filter(partial(_fits, keyword)))
        fields[keyword] = st.one_of(fits, fits, fits, values)
    return some_of(fields, 4)


def _fits(keyword: str, value: Any) -> bool:
    try:
        shapes.check({keyword: value}, "")
    except SchemaError:
        return False
    return True


schemas = st.recursive(st.booleans(), _schema_with, max_leaves=4)
