"""Resolves a JSON schema's references to parts of the same document.

Identifiers (`$id`, in old drafts `id`), anchors and JSON pointers work as in RFC 6901 and JSON
Schema 2020-12. Nothing is ever fetched.
"""

from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

Schema = dict[str, Any]
# Keywords whose values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "example", "examples"})
# Keywords whose values are schemas by name; the names are not keywords.
_BY_NAME = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependencies", "dependentSchemas"}
)
_ANCHORS = ("$anchor", "$dynamicAnchor")


class SchemaError(ValueError):
    """A schema has an error, or a keyword that cannot be enforced although it must be.

    Attributes:
        path: JSON pointer of the keyword.
        reason: why it cannot be used.
    """

    def __init__(self, path: str, reason: str) -> None:
        self.path, self.reason = path, reason
        super().__init__(f"{path or 'the schema'}: {reason}")


class Document:
    """A schema, with the pointer to each of its objects."""

    def __init__(self, root: Any) -> None:
        self.root = root
        self._pointers: dict[int, str] = {}
        self._bases: dict[int, str] = {}
        self._resources: dict[str, Any] = {"": root}
        self._anchors: dict[tuple[str, str], Schema] = {}
        self._index(root, "", "")

    def _index(self, node: Any, pointer: str, base: str, *, by_name: bool = False) -> None:
        if isinstance(node, list):
            for index, item in enumerate(node):
                self._index(item, f"{pointer}/{index}", base)
        if not isinstance(node, dict):
            return
        self._pointers[id(node)] = pointer
        if not by_name:
            base = self._identified(node, base)
        self._bases[id(node)] = base
        for name, value in node.items():
            if by_name or name not in _DATA:
                inner = not by_name and name in _BY_NAME
                self._index(value, f"{pointer}/{escaped(name)}", base, by_name=inner)

    def _identified(self, node: Schema, base: str) -> str:
        """Note the names that a schema gives itself; returns its base URI."""
        for name in ("$id", "id"):
            if isinstance(own := node.get(name), str):
                uri, anchor = urldefrag(_joined(base, own))
                if anchor:  # in drafts up to 7
                    self._anchors.setdefault((uri, anchor), node)
                else:
                    self._resources.setdefault(uri, node)
                    base = uri
                break
        for name in _ANCHORS:
            if isinstance(own := node.get(name), str):
                self._anchors.setdefault((base, own), node)
        return base

    def pointer(self, node: Schema) -> str:
        """Return the JSON pointer of one of the document's objects; empty for any other one."""
        return self._pointers.get(id(node), "")

    def resolve(self, reference: object, node: Schema) -> Any:
        """Return the target of a reference in `node`.

        Raises:
            SchemaError: the target is outside the document, or does not exist.
        """
        at = self.pointer(node)
        if not isinstance(reference, str):
            raise SchemaError(f"{at}/$ref", "it is not a string")
        base = self._bases[id(node)]
        if reference.startswith("/") and _joined(base, reference) not in self._resources:
            reference = f"#{reference}"  # as LiteLLM writes it for Anthropic's protocol
        uri, fragment = urldefrag(_joined(base, reference))
        if reference.startswith("#") and uri not in self._resources:
            uri = ""
        resource = self._resources.get(uri)
        if resource is None:
            raise SchemaError(f"{at}/$ref", "it is outside this schema, and is not fetched")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            target = self._anchors.get((uri, fragment), self._anchors.get(("", fragment)))
        else:
            target = _walked(resource, fragment)
        if not isinstance(target, dict | bool):
            raise SchemaError(f"{at}/$ref", f"{reference[:128]} does not exist")
        if isinstance(target, dict) and id(target) not in self._pointers:
            raise SchemaError(f"{at}/$ref", f"{reference[:128]} is not a schema")
        return target


def _joined(base: str, reference: str) -> str:
    try:
        return urljoin(base, reference)
    except ValueError:  # half an IPv6 address, for example
        return reference


def _walked(node: Any, pointer: str) -> Any:
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict):
            node = node.get(name)
        elif isinstance(node, list) and name.isdecimal() and int(name[:9]) < len(node):
            node = node[int(name[:9])]
        else:
            return None
    return node


def escaped(name: str) -> str:
    """Return a name as a part of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")
