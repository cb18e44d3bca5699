"""The process that renders chat templates.

Templates come from strangers, with a model's weights. Jinja's sandbox keeps them away from
Python's objects, but lets them loop for days or build values of any size, and such sandboxes have
had holes before. So templates run in a separate process, which `confined_worker` confines.
`template_process` starts it, stops it when a rendering takes too long, and trusts nothing that it
sends back.

A request is:

    {"source": template, "names": {"bos_token": ..., ...}, "values": {"messages": ..., ...}}

Without values the template is only compiled.

This module imports next to nothing of the package, so that the process stays small. Its imports
include what Python and Jinja would otherwise load later, when no file can be opened any more. The
serving process imports neither this module nor Jinja.
"""

import html
import json
import pprint
import textwrap
import unicodedata
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2.constants
import jinja2.debug
from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from specops.text.confined_worker import EXCEEDED, REFUSED, TEXT, confine, serve

_MEMORY_BYTES = 128 << 20  # address space, in addition to the idle process's
_ERROR_CHARACTERS = 2000
_MAX_COMPILED = 16  # templates; a model has two at most
_LATE_IMPORTS = (html, jinja2.constants, jinja2.debug, pprint, textwrap, unicodedata)


class _GenerationBlocks(Extension):
    """`{% generation %}` marks text for training. Here the block only returns its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[Node]:
        """Replace the block by its statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _PlainNamespace(Namespace):
    """Jinja's `namespace` without names that give access to Python's objects."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # a template may set the name `self`
        self, *rest = args
        names = dict(*rest, **kwargs)
        for name in names:
            _check_name(name)
        Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"{name!r} cannot be set on a namespace")


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)  # the class itself would give templates its methods


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`tojson` as in `transformers`: Jinja's own filter escapes characters of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def environment(names: Mapping[str, str]) -> ImmutableSandboxedEnvironment:
    """Return the environment in which transformers' `apply_chat_template` compiles templates.

    Args:
        names: variables of all templates, such as `bos_token`, with their texts.
    """
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, _GenerationBlocks],
        autoescape=False,  # the result is a prompt, not HTML
    )
    made.filters["tojson"] = _to_json
    made.globals.update(
        raise_exception=_refuse,
        strftime_now=_now,
        namespace=_PlainNamespace,
        dict=_new_dict,
        **names,
    )
    return made


@lru_cache(maxsize=_MAX_COMPILED)
def _compiled(source: str, names: tuple[tuple[str, str], ...]) -> Template:
    return environment(dict(names)).from_string(source)


def answer(request: bytes) -> tuple[bytes, bytes]:
    """Carry out a request; return the answer's kind and text."""
    try:
        try:
            asked = json.loads(request)
            template = _compiled(asked["source"], tuple(asked["names"].items()))
            values = asked["values"]
            text = "" if values is None else template.render(values)
            return TEXT, text.encode("utf-8", "surrogatepass")
        except MemoryError:
            raise
        except Exception as error:  # templates can fail in every way that Python can
            return REFUSED, str(error)[:_ERROR_CHARACTERS].encode("utf-8", "replace")
    except MemoryError:  # of an error's text, too: `raise_exception` accepts values of any size
        return EXCEEDED, b""


def main(parent: int) -> None:
    """Run as a parent's process for templates, until the parent closes the socket."""
    serve(answer, confine(parent, _MEMORY_BYTES))
