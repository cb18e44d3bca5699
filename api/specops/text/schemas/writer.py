"""Rewrites a JSON schema into one that llguidance enforces; the rest is left out and reported.

Two things change. An object that lists `properties`, without saying which others are allowed, gets
no others: a small model would invent them forever. And keywords unknown to the library are
expressed by others where possible: `if` as `anyOf`, `propertyNames` as `patternProperties`, and so
on.

Objects are closed where a schema describes a whole value. There, everything joined to the schema
counts together: the parts of `allOf` and targets of `$ref` are written in place, open, and the
whole gets `additionalProperties: false` and a list of all their names. A reference stays only if it
is a value's whole schema: the library cannot follow other circular references.
"""

import itertools
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specops.text.schemas import patterns
from specops.text.schemas.complement import ANNOTATIONS, complement
from specops.text.schemas.facts import OPEN, REFERENCES, Facts, SchemaAnalyzer
from specops.text.schemas.references import Document, Schema, SchemaError, escaped
from specops.text.schemas.shapes import is_text, whole
from specops.text.schemas.trial import enforced

# Combinations of the parts of one schema; the library writes out each of them.
_MAX_WAYS = 64
_MAX_WRITTEN = 50_000  # schemas and names of closed objects; the library accepts no more
_MAX_EXCLUSIONS = 8  # branches of `oneOf` that exclude each other by complements
_MAX_AGAINST = 4  # ways not to follow one of them
_MAX_RESOLVED = 30  # references within a schema whose complement is written
_MAX_CONTAINED = 8
_MAX_PERMUTED = 5  # values whose arrays without repetition are written out: 326 arrays
_MAX_CHARACTERS = 1_000  # of these values
_MAX_EXACT = 1 << 53
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_OBJECT_COUNTS = ("minProperties", "maxProperties")
# Keywords whose values may be long.
_INNER = frozenset(
    {"properties", "items", "anyOf", "oneOf", "allOf", "additionalProperties", "enum"}
)
Names = Iterable[str]


@dataclass(frozen=True, slots=True)
class Rewritten:
    """A schema that the library supports.

    Attributes:
        schema: the schema.
        ignored: JSON pointers of the client's keywords that it does not enforce.
        origins: by definition: JSON pointer of the client's schema that it comes from.
    """

    schema: Schema
    ignored: tuple[str, ...]
    origins: Mapping[str, str]


def rewrite(schema: Any, *, strict: bool = False, plain: bool = False) -> Rewritten:
    """Rewrite a schema.

    Args:
        schema: the schema, as read from JSON.
        strict: refuse what cannot be enforced.
        plain: leave out what requires combinations of schemas.

    Raises:
        SchemaError: the schema is wrong or too large, or `strict` and a keyword is not enforced.
    """
    writer = _Writer(schema, strict=strict, plain=plain)
    try:
        written = writer.write()
    except RecursionError:
        raise SchemaError("", "it refers to itself too deeply") from None
    return Rewritten(written, tuple(writer.ignored), writer.origins)


class _Writer:
    """Writes one schema."""

    def __init__(self, root: Any, *, strict: bool, plain: bool) -> None:
        self._document = Document(root)
        self._facts = SchemaAnalyzer(self._document)
        self._strict = strict
        self._most_ways = 1 if plain else _MAX_WAYS
        self._written = 0
        self.ignored: dict[str, None] = {}
        self.origins: dict[str, str] = {}
        self._defined: dict[str, Any] = {}
        self._names: dict[int, tuple[Schema, str]] = {}
        self._waiting: list[tuple[Schema, str]] = []
        # Of the current value: combinations of its parts, and the references' targets that are
        # already among them.
        self._ways = 1
        self._joined: set[int] = set()
        self._in_place = 0  # enclosing targets of references
        self._keywords: dict[str, Callable[[Schema, str, str, Schema], None]] = {
            "type": self._type,
            "const": self._as_it_is,
            "enum": self._as_it_is,
            "required": self._required,
            "properties": self._properties,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._inner,
            "propertyNames": self._property_names,
            "items": self._items,
            "additionalItems": self._inner,
            "prefixItems": self._items,
            "unevaluatedItems": self._unevaluated_items,
            "uniqueItems": self._unique_items,
            "contains": self._contains,
            "allOf": self._all_of,
            "anyOf": self._any_of,
            "oneOf": self._any_of,
            "not": self._not,
            "if": self._if,
            "dependentRequired": self._dependencies,
            "dependentSchemas": self._dependencies,
            "dependencies": self._dependencies,
            **dict.fromkeys(REFERENCES, self._reference),
            **dict.fromkeys(_BOUNDS, self._bound),
            **dict.fromkeys(_COUNTS, self._count),
        }

    def write(self) -> Any:
        """Return the schema with all its definitions."""
        root = self._document.root
        written = self._value(root, "")
        if written is False:
            raise SchemaError("", "it allows nothing")
        while self._waiting:
            node, name = self._waiting.pop()
            self._defined[name] = self._value(node, self.origins[name])
        if written is True:
            return {}
        if isinstance(layout := root.get("x-guidance"), dict):
            written = {"x-guidance": layout, **written}
        return {**written, "$defs": self._defined} if self._defined else written

    def _leave_out(self, path: str, reason: str = "it cannot be enforced") -> None:
        if self._strict:
            keyword = path.rpartition("/")[2]
            raise SchemaError(path, f"`{keyword}` with `strict`: {reason}")
        self.ignored[path] = None

    def _value(
        self,
        node: Any,
        at: str,
        outer: Names | None = None,
        *,
        branch: bool = False,
        joined: bool = False,
    ) -> Any:
        """Write the schema of a value.

        Args:
            node: the schema.
            at: its JSON pointer.
            outer: names of properties described outside this branch; None: this is no branch of
                an object that lists properties.
            branch: whether this is one of several forms of a value.
            joined: whether other keywords also apply to each form.
        """
        if isinstance(node, bool):
            return node
        self._check(node, at)
        alone = _only_reference(node)
        if outer is None and alone is not None and not joined:
            target = self._facts.target(alone)
            return target if isinstance(target, bool) else self._defined_at(target)
        if self._in_place and not branch and not _INNER.isdisjoint(node):
            return self._defined_at(node, at)  # or it would be written for each reference
        facts = self._facts.of(node)
        state = self._ways, self._joined, self._in_place
        self._ways, self._joined = (1, set()) if not branch else (1, set(self._joined))
        names = dict.fromkeys((*(outer or ()), *facts.names))
        closes = (outer is not None or facts.listed) and not facts.open
        groups = [name for name in ("anyOf", "oneOf") if name in node]
        rest = self._unevaluated(node, facts, at, grouped=bool(groups))
        if len(groups) == 1 and not (facts.open and rest is None):
            # Each form is closed by itself, with the names from outside the forms.
            names |= dict.fromkeys(self._branched_elsewhere(node))
            has_names = closes or rest is not None
            written = self._part(node, at, names if has_names else None, forms=True)
        elif rest is not None or closes:
            names |= facts.branch_names
            self._grow(len(names), at)
            written = _closed(self._part(node, at), names, False if rest is None else rest)
        else:
            written = self._part(node, at)
        self._count_properties(node, facts, at, written, names)
        self._ways, self._joined, self._in_place = state
        if not facts.typed and facts.kinds and not branch:
            written = {"type": sorted(facts.kinds), **written}
        return written

    def _branched_elsewhere(self, node: Schema) -> Names:
        """Return the names that a schema lists in branches other than its forms."""
        others = [node[keyword] for keyword in ("if", "then", "else", "not") if keyword in node]
        listed: dict[str, None] = {}
        for keyword in ("dependentSchemas", "dependencies", "dependentRequired"):
            for needed in _values(node.get(keyword)):
                if isinstance(needed, list):
                    listed |= dict.fromkeys(filter(is_text, needed))
                else:
                    others.append(needed)
        for other in others:
            facts = self._facts.of(other)
            listed |= dict.fromkeys(facts.names) | facts.branch_names
        joined = [*_values(node.get("allOf"))]
        joined += [self._facts.target(node)] if any(name in node for name in REFERENCES) else []
        for part in joined:
            listed |= self._facts.of(part).branch_names
        return listed

    def _unevaluated(self, node: Schema, facts: Facts, at: str, *, grouped: bool) -> Any:
        """Return the schema of other properties by `unevaluatedProperties`; None: none."""
        value = node.get("unevaluatedProperties", True)
        if value is True or value == {}:
            return None
        at = f"{at}/unevaluatedProperties"
        others = any(name in node for name in OPEN[:2])
        if others or (facts.branched and not (grouped and value is False)):
            self._leave_out(at)
        # The closed object also allows all branches' names.
        return None if others or value is not False else False

    def _count_properties(
        self, node: Schema, facts: Facts, at: str, written: Schema, names: Mapping[str, None]
    ) -> None:
        """Write `minProperties` and `maxProperties`, which the library supports for few objects."""
        low, high = (whole(node.get(name)) for name in _OBJECT_COUNTS)
        low, least = low or 0, len(facts.required)
        closed = written.get("additionalProperties") is False and "patternProperties" not in written
        optional = [name for name in names if name not in facts.required]
        low = 0 if low <= least else low
        high = None if closed and high is not None and high >= len(names) else high
        kept = {"minProperties": low or None, "maxProperties": high}
        kept = {name: value for name, value in kept.items() if value is not None}
        if not kept:
            return
        few = closed and low - least <= 1 and (high is None or high - least == 1)
        if few or (not optional and not facts.branched):
            written.update(kept)
            return
        more = low - least
        if closed and high is None and math.comb(len(optional), more) <= self._most_ways:
            sets = itertools.combinations(optional, more)
            options = [{"required": list(chosen)} for chosen in sets]
            written.setdefault("allOf", []).append({"anyOf": options} if options else False)
            return
        for name in kept:
            self._leave_out(f"{at}/{name}")

    def _check(self, node: Any, at: str) -> None:
        self._facts.step(at)
        self._grow(1, at)
        if not isinstance(node, dict):
            raise SchemaError(at, "a schema is an object, true or false")

    def _grow(self, count: int, at: str) -> None:
        self._written += count
        if self._written > _MAX_WRITTEN:
            raise SchemaError(at, "it is too large once it is expanded")

    def _part(self, node: Any, at: str, names: Names | None = None, *, forms: bool = False) -> Any:
        """Write a schema that is joined to others, or one value's keywords.

        Args:
            node: the schema.
            at: its JSON pointer.
            names: properties described outside its branches.
            forms: whether its branches are forms of a whole value.
        """
        if isinstance(node, bool):
            return node
        self._check(node, at)
        written: Schema = {}
        # `propertyNames` comes last: it changes what other keywords have written.
        said = {"type"} if forms and self._only_forms(node) else set()
        for keyword in sorted(node, key=lambda keyword: keyword == "propertyNames"):
            if keyword in said:
                continue
            if keyword in ("anyOf", "oneOf") and forms:
                self._forms(node, keyword, at, written, names)
            elif keyword not in ANNOTATIONS and (write := self._keywords.get(keyword)):
                write(node, keyword, f"{at}/{escaped(keyword)}", written)
        self._text(node, at, written)
        if "patternProperties" in written:
            _say_once(written)
        return written

    def _join(self, written: Schema, more: Any) -> None:
        written.setdefault("allOf", []).append(more)

    def _as_it_is(self, node: Schema, keyword: str, _: str, written: Schema) -> None:
        written[keyword] = node[keyword]

    def _type(self, node: Schema, keyword: str, _: str, written: Schema) -> None:
        if "any" not in node[keyword]:  # as draft 3 had it
            written[keyword] = node[keyword]

    def _required(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        names = node[keyword]
        if isinstance(names, bool):  # as in draft 3, in a property's schema
            if names:
                self._leave_out(at)
            return
        known = node.get("properties", {})
        if node.get("additionalProperties") is False and "patternProperties" not in node:
            if unknown := [name for name in names if name not in known]:
                self._leave_out(at, f"{unknown[0][:64]!r} is none of the properties, which are all")
            names = [name for name in names if name in known]
        written[keyword] = names

    def _bound(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        value = node[keyword]
        doubtful = keyword == "multipleOf" or abs(value) > _MAX_EXACT
        if doubtful and not enforced({"type": "number", keyword: value}):
            self._leave_out(at)
        else:
            written[keyword] = value

    def _count(self, node: Schema, keyword: str, _: str, written: Schema) -> None:
        written[keyword] = whole(node[keyword])

    def _properties(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        written["properties"] = {
            name: self._value(schema, f"{at}/{escaped(name)}")
            for name, schema in node[keyword].items()
        }

    def _inner(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        if at not in self.ignored:
            written[keyword] = self._value(node[keyword], at)

    def _items(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        items = node[keyword]
        if isinstance(items, list):
            written[keyword] = [
                self._value(item, f"{at}/{index}") for index, item in enumerate(items)
            ]
        else:
            written[keyword] = self._value(items, at)

    def _pattern_properties(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        by_pattern = {
            pattern: self._value(schema, f"{at}/{escaped(pattern)}")
            for pattern, schema in node[keyword].items()
        }
        together = enforced({"type": "object", keyword: dict.fromkeys(by_pattern, True)})
        if not together and len({json.dumps(schema) for schema in by_pattern.values()}) == 1:
            joined = "|".join(f"(?:{pattern})" for pattern in by_pattern)
            by_pattern = {joined: next(iter(by_pattern.values()))}
        together = enforced({"type": "object", keyword: dict.fromkeys(by_pattern, True)})
        if together and not (self._most_ways == 1 and _circular(node, by_pattern)):
            written[keyword] = by_pattern
            return
        self._leave_out(at)
        # Which properties are additional depends on the patterns.
        if "additionalProperties" in node and node["additionalProperties"] is not True:
            self._leave_out(f"{at.rpartition('/')[0]}/additionalProperties")
        written["additionalProperties"] = True

    def _property_names(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        """Write the names that an object may have, as a pattern or a list."""
        names = node[keyword]
        if names is True:
            return
        if "patternProperties" in node or names is False:
            self._leave_out(at)
            return
        rest = written.get("additionalProperties", True)
        own = written.get("properties") or {}
        known = self._facts.of(names).values
        if known is not None:
            listed = [name for name in known if isinstance(name, str)]
            refused = {name: False for name in node.get("properties") or () if name not in listed}
            written["properties"] = {**dict.fromkeys(listed, rest), **own, **refused}
            written["additionalProperties"] = False
            return
        pattern = self._pattern_of_names(names, at)
        if pattern is None:
            return
        if enforced({"type": "object", "patternProperties": {pattern: True}}):
            written["patternProperties"] = {pattern: rest}
            written["additionalProperties"] = False
        else:
            self._leave_out(at)

    def _pattern_of_names(self, names: Schema, at: str) -> str | None:
        """Return the expression that a property's name must match; None: any name."""
        rules = {
            keyword: value
            for keyword, value in names.items()
            if keyword not in ANNOTATIONS and keyword != "type"
        }
        low, high = (whole(rules.pop(name, None)) for name in ("minLength", "maxLength"))
        expressions = []
        if low or high is not None:
            expressions.append(f"^(?s:.{{{low or 0},{'' if high is None else high}}})$")
        if (pattern := rules.pop("pattern", None)) is not None:
            expressions += patterns.split_lookahead(pattern) or []
        if (form := rules.get("format")) in patterns.FORMAT_PATTERNS:
            expressions.append(patterns.FORMAT_PATTERNS[rules.pop("format")])
        elif form in patterns.FREE_FORMATS:
            rules.pop("format")
        if rules or len(expressions) > 1 or (pattern is not None and not expressions):
            self._leave_out(at)
        return expressions[-1] if expressions else None

    def _unevaluated_items(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        value = node[keyword]
        if value is True or "items" in node or "additionalItems" in node:
            return
        if any(name in node for name in ("allOf", "anyOf", "oneOf", "if", "contains", *REFERENCES)):
            self._leave_out(at)
            return
        written["items"] = self._value(value, at)

    def _unique_items(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        low, high = (whole(node.get(name)) for name in ("minItems", "maxItems"))
        if node[keyword] is not True or (high is not None and high <= 1):
            return
        values = self._few_values(node.get("items"))
        if values is None or node.get("type") != "array" or "prefixItems" in node:
            self._leave_out(at)
            return
        most = len(values) if high is None else min(high, len(values))
        sizes = range(low or 0, most + 1)
        lists = [list(chosen) for n in sizes for chosen in itertools.permutations(values, n)]
        self._join(written, {"enum": lists})

    def _few_values(self, items: Any) -> list[Any] | None:
        """Return the values that an array's items may have; None if there are many."""
        if not isinstance(items, dict):
            return None
        facts = self._facts.of(items)
        values = [True, False] if facts.types == {"boolean"} else facts.values
        if values is None or len(values) > _MAX_PERMUTED:
            return None
        if len(json.dumps(values)) > _MAX_CHARACTERS:
            return None
        return list({json.dumps(value): value for value in values}.values())

    def _contains(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        """Write `contains` as items with which the array begins."""
        least = whole(node.get("minContains", 1))
        if least == 0 and "maxContains" not in node:
            return
        listed = "prefixItems" in node or isinstance(node.get("items"), list)
        if listed or least is None or least > _MAX_CONTAINED or "maxContains" in node:
            self._leave_out(at)
            return
        item = self._value(node[keyword], at)
        self._join(written, {"prefixItems": [item] * least, "minItems": least})

    def _reference(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        del keyword, at
        target = self._facts.target(node)
        if isinstance(target, bool):
            self._join(written, target)
        elif id(target) not in self._joined:
            self._joined.add(id(target))
            self._in_place += 1
            self._join(written, self._part(target, self._document.pointer(target)))
            self._in_place -= 1

    def _defined_at(self, node: Schema, at: str | None = None) -> Schema:
        """Return a reference to the definition of a value's schema."""
        if (known := self._names.get(id(node))) is None:
            # Keep the node, so that no other object gets its id.
            known = self._names[id(node)] = (node, str(len(self._names)))
            self.origins[known[1]] = self._document.pointer(node) if at is None else at
            self._waiting.append(known)
        return {"$ref": f"#/$defs/{known[1]}"}

    def _all_of(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        for index, member in enumerate(node[keyword]):
            self._join(written, self._part(member, f"{at}/{index}"))

    def _any_of(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        options, joined = [], self._joined
        for index, option in self._options(node, keyword, at, None):
            self._joined = set(joined)
            options.append(self._part(option, f"{at}/{index}"))
        self._joined = joined
        self._offer(written, options)

    def _forms(
        self, node: Schema, keyword: str, at: str, written: Schema, names: Names | None
    ) -> None:
        at = f"{at}/{keyword}"
        joined = bool(node.keys() - ANNOTATIONS - {keyword}) and not self._only_forms(node)
        options = [
            self._value(option, f"{at}/{index}", names, branch=True, joined=joined)
            for index, option in self._options(node, keyword, at, names or ())
        ]
        self._offer(written, options)

    def _only_forms(self, node: Schema) -> bool:
        """Whether a schema has nothing but its forms, and a type that each form implies."""
        words = node.keys() - ANNOTATIONS - {"type"}
        keyword = next(iter(words))
        if len(words) > 1 or keyword not in ("anyOf", "oneOf") or "type" not in node:
            return False
        own = self._facts.of({"type": node["type"]}).types or set()
        theirs = map(self._types_of_form, node[keyword])
        return all(types and types <= own for types in theirs)

    def _types_of_form(self, option: Any) -> set[str] | None:
        """Return the types in a form's rewritten schema."""
        facts = self._facts.of(option)
        # A definition without a type gets the type of its keywords.
        defined = isinstance(option, dict) and _only_reference(option) is not None
        return facts.kinds if defined and not facts.typed else facts.types

    def _offer(self, written: Schema, options: list[Any]) -> None:
        if "anyOf" in written:
            self._join(written, {"anyOf": options})
        else:
            written["anyOf"] = options

    def _options(
        self, node: Schema, keyword: str, at: str, names: Names | None
    ) -> list[tuple[int, Any]]:
        """Return a schema's branches; those of `oneOf` exclude each other if possible.

        Args:
            node: the schema.
            keyword: `anyOf` or `oneOf`.
            at: the keyword's JSON pointer.
            names: properties that objects of all branches may have; None: any.
        """
        options = node[keyword]
        if keyword == "anyOf":
            return list(enumerate(options))
        pairs = [
            (one, other)
            for one, other in itertools.combinations(range(len(options)), 2)
            if not self._facts.exclusive(options[one], options[other], names)
        ]
        if not pairs:
            return list(enumerate(options))
        few = len(options) <= _MAX_EXCLUSIONS and self._most_ways > 1
        excluding = [[options[index]] for index in range(len(options))]
        for one, other in pairs:
            for kept, left in ((one, other), (other, one)):
                against = self._negated(options[left]) if few else None
                if against is None or _ways(against) > _MAX_AGAINST:
                    self._leave_out(at)
                    return list(enumerate(options))
                excluding[kept].append(against)
        return [
            (index, parts[0] if len(parts) == 1 else {"allOf": parts})
            for index, parts in enumerate(excluding)
        ]

    def _not(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        self._alternatives(written, self._negated(node[keyword]), at)

    def _if(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        condition, then, other = node[keyword], node.get("then", True), node.get("else", True)
        if then is True and other is True:
            return
        against = self._negated(condition)
        if against is None and then is not True:
            self._leave_out(at)
            return
        first = then if other is True else {"allOf": [condition, then]}
        if other is True:
            forms: Any = {"anyOf": [against, first]}
        elif then is True:
            forms = {"anyOf": [condition, other]}
        else:
            forms = {"anyOf": [first, {"allOf": [against, other]}]}
        self._alternatives(written, forms, at)

    def _dependencies(self, node: Schema, keyword: str, at: str, written: Schema) -> None:
        for name, needed in node[keyword].items():
            names = [needed] if isinstance(needed, str) else needed  # as draft 3 had it
            then = {"required": names} if isinstance(names, list) else needed
            lacking = {"properties": {name: False}}
            self._alternatives(written, {"anyOf": [lacking, then]}, at)

    def _negated(self, schema: Any) -> Any:
        """Return a schema of all other values; None: it cannot be expressed, or is too large."""
        resolved = itertools.count(1)

        def resolve(node: Schema) -> Any:
            self._facts.check(node)
            if "$ref" not in node:
                return node
            if next(resolved) > _MAX_RESOLVED:
                raise OverflowError
            return self._facts.target(node)

        try:
            return complement(schema, resolve)
        except OverflowError:
            return None

    def _alternatives(self, written: Schema, schema: Any, at: str) -> None:
        """Join a schema that this class made; leave the keyword out if the schema is None."""
        ways = 0 if schema is None else _ways(schema)
        if schema is None or self._ways * ways > self._most_ways:
            self._leave_out(at)
            return
        self._ways *= max(1, ways)
        self._join(written, self._part(schema, at))

    def _text(self, node: Schema, at: str, written: Schema) -> None:
        """Write the rules for a text: `pattern` and `format`."""
        types = node.get("type", "string")
        if not isinstance(types, str | list) or "string" not in types:
            return
        required = self._pattern(node, at)
        if not (required and node.get("format") in patterns.SAID_BY_PATTERN):
            required += self._format(node, at, written)
        if not required:
            return
        parts = [{"pattern": pattern} for pattern in required]
        whole: Schema = {"type": "string", "allOf": parts}
        # The library cannot handle some expressions together.
        for name in ("format", "minLength", "maxLength"):
            if name not in written:
                continue
            if enforced(whole | {name: written[name]}):
                whole[name] = written[name]
            else:
                self._leave_out(f"{at}/{name}")
                del written[name]
        if len(parts) == 1:
            written["pattern"] = required[0]
        else:
            for part in parts:
                self._join(written, part)

    def _pattern(self, node: Schema, at: str) -> list[str]:
        """Return the expressions that a text must match because of `pattern`."""
        if "pattern" not in node:
            return []
        pieces = patterns.split_lookahead(node["pattern"])
        if pieces is None or not all(
            enforced({"type": "string", "pattern": piece}) for piece in pieces
        ):
            self._leave_out(f"{at}/pattern")
            return []
        return pieces

    def _format(self, node: Schema, at: str, written: Schema) -> list[str]:
        """Write `format`, or return the expressions that a text must match because of it."""
        form = node.get("format")
        form = patterns.NARROWED_FORMATS.get(form or "", form)
        if form in patterns.FORMAT_PATTERNS:
            return [patterns.FORMAT_PATTERNS[form]]
        if form in patterns.ENFORCED_FORMATS:
            written["format"] = form
        elif form is not None and form not in patterns.FREE_FORMATS:
            self._leave_out(f"{at}/format")
        return []


def _closed(written: Schema, names: Names, rest: Any) -> Schema:
    """Return an object's schema with these properties, and `rest` as the schema of others."""
    listed = {**(written.get("properties") or {})}
    for name in names:
        listed.setdefault(name, True)
    return {**written, "properties": listed, "additionalProperties": rest}


def _circular(node: Schema, by_pattern: Mapping[str, Any]) -> bool:
    """Whether listed properties must also follow references in `patternProperties`.

    The library joins these schemas, and fails if a reference leads back to the object.
    """
    listed = node.get("properties")
    for pattern, schema in by_pattern.items():
        if "$ref" not in json.dumps(schema) or not isinstance(listed, dict):
            continue
        others = [name for name in listed if listed[name] != node["patternProperties"].get(pattern)]
        try:
            if any(re.search(pattern, name) for name in others):
                return True
        except re.error:
            return True
    return False


def _say_once(written: Schema) -> None:
    """Make a listed property's schema `true` if a pattern of its name has the same schema."""
    listed = written.get("properties") or {}
    for pattern, rest in written["patternProperties"].items():
        same = [name for name, schema in listed.items() if schema == rest]
        try:
            known = [name for name in same if re.search(pattern, name)]
        except re.error:  # valid in another dialect
            continue
        written["properties"] = listed = listed | dict.fromkeys(known, True)


def _only_reference(node: Schema) -> Schema | None:
    """Return a schema's reference if it has nothing else; it may be within `allOf`."""
    words = [keyword for keyword in node if keyword not in ANNOTATIONS]
    if len(words) != 1:
        return None
    if words[0] in REFERENCES:
        return node
    members = node["allOf"] if words[0] == "allOf" else None
    if isinstance(members, list) and len(members) == 1 and isinstance(members[0], dict):
        return _only_reference(members[0])
    return None


def _ways(schema: Any) -> int:
    """Return how many combinations of branches a schema has."""
    if not isinstance(schema, dict):
        return 1
    ways = 1
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            ways *= sum(map(_ways, options))
    for member in _values(schema.get("allOf")):
        ways *= _ways(member)
    return ways


def _values(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
