"""Parts of a request that this server ignores and names, or refuses."""

from __future__ import annotations

import re
from collections.abc import Iterable

from specops.http.answering.body import Body, unknown_fields
from specops.http.errors import InvalidField
from specops.http.state import Context
from specops.text.grammar_source import IgnoredKeyword

_MAX_NAMES = 32  # in the header
_MAX_NAME = 64  # characters of a name
_MAX_PATH = 160  # characters of a path in a JSON schema, whose end says most
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # and the comma, which separates the names


def ignore_unknown(ctx: Context, body: Body, ignored: Iterable[str] = ()) -> None:
    """Note a body's unknown fields for `answer_headers`; the settings may refuse them.

    Args:
        ctx: of the HTTP request.
        body: the checked body.
        ignored: names of other ignored parts of the body.

    Raises:
        InvalidField: there is an unknown field, and the settings refuse it.
    """
    refuses = ctx.settings.unknown_fields == "refuse"
    names: dict[str, None] = {}
    for name, harmless in unknown_fields(body):
        short = name[:_MAX_NAME]
        if refuses and not harmless:
            field = name.partition(".")[0]
            raise InvalidField(field, f"no such field: {short}", code="unknown_parameter")
        names[short] = None
        if len(names) == _MAX_NAMES and not refuses:
            break
    ignore(ctx, (*names, *ignored))


def ignore(ctx: Context, names: Iterable[str]) -> None:
    """Note ignored parts of the body for `answer_headers`."""
    _note(ctx, (name[:_MAX_NAME] for name in names))


def ignore_keywords(ctx: Context, ignored: Iterable[IgnoredKeyword], field: str | None) -> None:
    """Note the keywords of JSON schemas that the answer need not follow.

    Args:
        ctx: of the HTTP request.
        ignored: the keywords.
        field: the field that constrains the answer's text.
    """
    _note(ctx, (_keyword(item, field or "") for item in ignored))


def answer_headers(ctx: Context) -> dict[str, str]:
    """Return the headers that name the model, and the ignored parts of the body."""
    served = {"x-served-model": ctx.served} if ctx.served.isascii() and ctx.served else {}
    return served | ({"x-ignored-fields": ", ".join(ctx.ignored)} if ctx.ignored else {})


def _note(ctx: Context, names: Iterable[str]) -> None:
    noted = dict.fromkeys(ctx.ignored)
    for name in names:
        if len(noted) == _MAX_NAMES:
            break
        noted[_UNPRINTABLE.sub("?", name) or "?"] = None  # h11 sends no empty last one
    ctx.ignored = list(noted)


def _keyword(item: IgnoredKeyword, field: str) -> str:
    name = field if item.tool is None else f"tools.{item.tool}"
    path = item.path if len(item.path) <= _MAX_PATH else "/..." + item.path[-_MAX_PATH:]
    return f"{name}#{path}"
