"""Collects what a schema says, including everything joined to it.

`allOf` and `$ref` join schemas: a schema's properties are its own and theirs. `anyOf` and similar
keywords offer branches, which may list more.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specops.text.schemas import shapes
from specops.text.schemas.references import Document, Schema, SchemaError
from specops.text.schemas.trial import are_disjoint

REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
# With these, the schema itself says which other properties are allowed.
OPEN = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_BRANCHES = ("anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas", "dependencies")
_KINDS = {
    "object": {"properties", "required", "minProperties", "maxProperties", "propertyNames", *OPEN},
    "array": {"items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"},
    "string": {"pattern", "minLength", "maxLength"},
    "number": {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"},
}
# Maximum number of schemas to visit. A large document has a few thousand, at a microsecond each.
_MAX_STEPS = 100_000
_MAX_PAIRS = 2_000  # of branches to compare
_DEEPEST = 4  # levels of nested properties to compare


@dataclass(slots=True)
class Facts:
    """What a schema and the schemas joined to it say.

    Attributes:
        names: properties' names in order, with the schemas that describe them.
        required: names that every object has.
        listed: whether there are `properties`.
        open: whether the schema itself says which other properties are allowed.
        shut: whether `additionalProperties` is false.
        branch_names: other names, listed by branches.
        branched: whether a branch lists properties.
        types: the allowed types; None: all.
        values: the allowed values; None: all.
        typed: whether a type, or values, occur anywhere.
        kinds: types to which the other keywords apply.
        texts: rules for texts, as schemas.
    """

    names: dict[str, list[Any]] = field(default_factory=dict)
    required: dict[str, None] = field(default_factory=dict)
    listed: bool = False
    open: bool = False
    shut: bool = False
    branch_names: dict[str, None] = field(default_factory=dict)
    branched: bool = False
    types: set[str] | None = None
    values: list[Any] | None = None
    typed: bool = False
    kinds: set[str] = field(default_factory=set)
    texts: list[Schema] = field(default_factory=list)


class SchemaAnalyzer:
    """Finds the facts about a document's schemas, with limited work."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._known: dict[int, tuple[Any, Facts]] = {}
        self._steps = self._pairs = 0

    def step(self, path: str = "") -> None:
        """Count a unit of work.

        Raises:
            SchemaError: the limit is exceeded.
        """
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise SchemaError(path, "it refers to itself in too many ways")

    def check(self, node: Schema) -> None:
        """Refuse an invalid schema; see `shapes.check`."""
        shapes.check(node, self._document.pointer(node))

    def target(self, node: Schema) -> Any:
        """Return the target of a schema's reference."""
        self.check(node)
        reference = next(node[name] for name in REFERENCES if name in node)
        return self._document.resolve(reference, node)

    def of(self, node: Any) -> Facts:
        """Return the facts about a schema."""
        if (known := self._known.get(id(node))) is None:
            facts = Facts()
            self._join(node, facts, set())
            # Keep the node, so that no other object gets its id.
            known = self._known[id(node)] = (node, facts)
        return known[1]

    def _join(self, node: Any, facts: Facts, seen: set[int]) -> None:
        for part in self._joined(node, seen):
            self._own(part, facts)
            for branch in _branches(part):
                self._branch(branch, facts, seen)

    def _joined(self, node: Any, seen: set[int]) -> Iterator[Schema]:
        """Yield a schema and those that `allOf` and references join to it, each once."""
        waiting = [node]
        while waiting:
            node = waiting.pop(0)
            if not isinstance(node, dict) or id(node) in seen:
                continue
            seen.add(id(node))
            self.step()
            self.check(node)
            yield node
            if any(name in node for name in REFERENCES):
                waiting.append(self.target(node))
            if isinstance(members := node.get("allOf"), list):
                waiting += members

    def _own(self, node: Schema, facts: Facts) -> None:
        if isinstance(properties := node.get("properties"), dict):
            facts.listed = True
            for name, schema in properties.items():
                facts.names.setdefault(name, []).append(schema)
        required = node.get("required")
        if isinstance(required, list):
            for name in required:
                facts.names.setdefault(name, [])
                facts.required[name] = None
        facts.open |= any(name in node for name in OPEN)
        facts.shut |= node.get("additionalProperties") is False
        for dependencies in ("dependentRequired", "dependencies"):
            if isinstance(needed := node.get(dependencies), dict):
                for names in needed.values():
                    facts.branch_names |= dict.fromkeys(names if isinstance(names, list) else ())
        types = node.get("type")
        types = {types} if isinstance(types, str) else types
        if isinstance(types, list | set) and "any" not in types:
            own = {"number" if kind == "integer" else str(kind) for kind in types}
            facts.types = own if facts.types is None else facts.types & own
        values = [node["const"]] if "const" in node else node.get("enum")
        if isinstance(values, list):
            facts.values = values
        facts.texts += [
            {name: node[name]} for name in ("pattern", "format") if isinstance(node.get(name), str)
        ]
        if facts.values is not None:
            facts.texts.append({"enum": facts.values})
        facts.typed |= types is not None or values is not None
        for kind, keywords in _KINDS.items():
            if not keywords.isdisjoint(node):
                facts.kinds.add(kind)

    def _branch(self, node: Any, facts: Facts, seen: set[int]) -> None:
        branch = Facts()
        self._join(node, branch, seen)
        facts.branch_names |= dict.fromkeys(branch.names) | branch.branch_names
        facts.branched |= branch.listed or branch.branched
        facts.typed |= branch.typed
        facts.kinds |= branch.kinds

    def exclusive(self, first: Any, second: Any, names: Iterable[str] | None) -> bool:
        """Whether no value written for one schema also follows the other.

        Args:
            first: a schema.
            second: another one.
            names: properties that both may have in addition to their own; None: all.
        """
        if self.disjoint(first, second):
            return True
        if names is None:
            return False
        ours, theirs = self.of(first), self.of(second)
        return _lacks(ours, theirs, names) and _lacks(theirs, ours, names)

    def disjoint(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Whether no value can follow both schemas, as far as that is easy to tell.

        Args:
            first: a schema.
            second: another one.
            depth: how deep both lie within the first pair.
        """
        self._pairs += 1
        if self._pairs > _MAX_PAIRS or depth > _DEEPEST:
            return False
        ours, theirs = self.of(first), self.of(second)
        types = _types(ours) & _types(theirs)
        if first is False or second is False or not types:
            return True
        if ours.values is not None and theirs.values is not None:
            return set(map(_key, ours.values)).isdisjoint(map(_key, theirs.values))
        if types == {"string"} and ours.texts and theirs.texts:
            return are_disjoint([*ours.texts, *theirs.texts])
        return any(
            all(self.disjoint(option, other, depth + 1) for option in options)
            for one, other in ((first, second), (second, first))
            for options in _options(one)
        ) or (types == {"object"} and self._differ(ours, theirs, depth))

    def _differ(self, ours: Facts, theirs: Facts, depth: int) -> bool:
        """Whether a property that either object requires has disjoint schemas in both."""
        return any(
            self.disjoint(mine, others, depth + 1)
            for name in ours.required.keys() | theirs.required.keys()
            for mine in ours.names.get(name, ())
            for others in theirs.names.get(name, ())
        )


def _lacks(closed: Facts, other: Facts, names: Iterable[str]) -> bool:
    """Whether the objects of a closed schema lack a property that the other schema requires."""
    shut = closed.shut or (closed.listed and not closed.open)
    objects = closed.types == {"object"} or (closed.types is None and closed.kinds == {"object"})
    known = {*closed.names, *closed.branch_names, *names}
    return shut and objects and not other.required.keys() <= known


def _branches(node: Schema) -> Iterator[Any]:
    for name in _BRANCHES:
        value = node.get(name)
        if isinstance(value, list):
            yield from value
        elif isinstance(value, dict):
            if name.startswith("depend"):
                yield from (inner for inner in value.values() if isinstance(inner, dict))
            else:
                yield value


def _options(node: Any) -> Iterator[list[Any]]:
    for name in ("anyOf", "oneOf"):
        if isinstance(node, dict) and isinstance(node.get(name), list):
            yield node[name]


_NAMES = {
    type(None): "null",
    bool: "boolean",
    int: "number",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}


def _types(facts: Facts) -> set[str]:
    if facts.values is not None:
        return {_NAMES[type(value)] for value in facts.values}
    return set(shapes.TYPES) if facts.types is None else facts.types


def _key(value: Any) -> str:
    """Return a key that is the same for equal JSON values: 1 equals 1.0, but not True."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value, sort_keys=True)
