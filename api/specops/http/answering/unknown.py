"""Unknown fields of a request: this server ignores and names them, or refuses them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from specops.http.errors import InvalidField
from specops.http.schemas.body import Body, unknown_fields
from specops.http.state import Context
from specops.text.grammar import LeftOut

_MOST_NAMES = 32  # in the header
_MOST_PATH = 160  # characters of a path in a JSON schema, whose end says most
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # and the comma, which separates the names


def ignore_unknown(ctx: Context, body: Body, skipped: Sequence[str] = ()) -> None:
    """Note the ignored fields for `ignored_header`; the settings may refuse unknown ones.

    Args:
        skipped: names of other ignored parts of the body.

    Raises:
        InvalidField: there is an unknown field, and the settings refuse it.
    """
    names: dict[str, None] = {}
    refuses = ctx.settings.unknown_fields == "refuse"
    for name, harmless in unknown_fields(body):
        if refuses and not harmless:
            field = name.partition(".")[0]
            raise InvalidField(field, f"no such field: {name[:64]}", code="unknown_parameter")
        names[name[:64]] = None
        if len(names) == _MOST_NAMES and not refuses:
            break
    names |= dict.fromkeys(name[:64] for name in skipped[:_MOST_NAMES])
    ctx.ignored = [_UNPRINTABLE.sub("?", name) for name in names][:_MOST_NAMES]


def ignore_keywords(ctx: Context, left_out: Sequence[LeftOut], field: str | None) -> None:
    """Note the keywords of JSON schemas that the answer need not follow for `ignored_header`.

    Args:
        field: the field that constrains the answer's text.
    """
    names = [_keyword(item, field or "") for item in left_out]
    ctx.ignored = [*ctx.ignored, *names][:_MOST_NAMES]


def _keyword(item: LeftOut, field: str) -> str:
    name = field if item.tool is None else f"tools.{item.tool}"
    path = item.path if len(item.path) <= _MOST_PATH else "/..." + item.path[-_MOST_PATH:]
    return _UNPRINTABLE.sub("?", f"{name}#{path}")


def ignored_header(ctx: Context) -> dict[str, str]:
    """Return the header that names the ignored parts of the body, if there are any."""
    return {"x-ignored-fields": ", ".join(ctx.ignored)} if ctx.ignored else {}
