"""How many files one opens to change a protocol, and to add one.

A field of a protocol stands in one file, with what writes the answer. A protocol is one file and
one line in the table of protocols. So its module defines its bodies, its endpoints and its writer,
and no module of the service but the table imports it or has one of its paths.
"""

import ast
import inspect
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

import specops
from specops.http.answering.writer import Writer
from specops.http.protocol import Protocol
from specops.http.protocols import PROTOCOLS

ROOT = Path(specops.__file__).parent
TABLE = "specops.http.protocols"
FIELD_FILES, PROTOCOL_FILES = 1, 2
# /apply-template shows the prompt that a chat would have: it takes a chat's messages.
BORROWED = {("specops.http.protocols.tokens", "specops.http.protocols.openai.chat")}


@cache
def module_of(protocol: Protocol) -> ModuleType:
    """The module that defines a protocol."""
    (found,) = [
        module
        for name, module in sys.modules.items()
        if name.startswith(f"{TABLE}.") and getattr(module, "PROTOCOL", None) is protocol
    ]
    return found


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


def endpoints(protocol: Protocol) -> list[APIRoute]:
    return [route for route in protocol.router.routes if isinstance(route, APIRoute)]


def bodies(protocol: Protocol) -> set[type[BaseModel]]:
    """The bodies of requests and answers that a protocol's endpoints declare."""
    found = {field.field_info.annotation for route in endpoints(protocol)
             for field in route.dependant.body_params}  # fmt: skip
    found |= {route.response_model for route in endpoints(protocol)}
    return {item for item in found if inspect.isclass(item) and issubclass(item, BaseModel)}


@cache
def known(path: Path) -> set[str]:
    """The modules that a file imports, the names that it imports from them, and its texts."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return names


each = pytest.mark.parametrize(
    "protocol",
    list(PROTOCOLS),
    ids=lambda protocol: module_of(protocol).__name__.removeprefix(TABLE),
)


@each
def test_a_field_is_added_in_one_file(protocol: Protocol) -> None:
    """Body, endpoint and writer stand in one module."""
    own = module_of(protocol)
    opened = {body.__module__ for body in bodies(protocol)} | {own.__name__}
    # The body that only names a model, the answer that only counts tokens.
    opened -= {f"specops.http.protocols.{name}.common" for name in ("ollama", "openai")}
    assert len(opened) == FIELD_FILES
    assert {route.endpoint.__module__ for route in endpoints(protocol)} == {own.__name__}
    if any(prompt.operation != "embeddings" for prompt in protocol.prompts.values()):
        writers = [item for item in vars(own).values()
                   if inspect.isclass(item) and issubclass(item, Writer)]  # fmt: skip
        assert [item for item in writers if item.__module__ == own.__name__]


@each
def test_a_protocol_is_one_file_and_a_line(protocol: Protocol) -> None:
    """Nothing else knows the protocol's module, or one of its paths."""
    own = module_of(protocol).__name__
    marks = {own, *(route.path for route in endpoints(protocol))}
    knowing = {name_of(path) for path in ROOT.rglob("*.py") if marks & known(path)} - {own}
    knowing -= {name for name in knowing if (name, own) in BORROWED}
    knowing -= {"specops.synonyms"}  # of paths of other servers
    assert knowing == {TABLE}
    assert len({own, *knowing}) == PROTOCOL_FILES
