"""Fields that a request has and this server has not: ignored and named, or refused."""

from __future__ import annotations

import re
from collections.abc import Sequence

from fastapi import Request

from specops.config import Settings
from specops.http.errors import InvalidField
from specops.http.schemas.options import Body, unknown_fields

_MOST_NAMES = 32  # of ignored fields that a header tells
_UNPRINTABLE = re.compile(r"[^!-+\--~]")  # in a list in a header


def ignore_unknown(
    body: Body, request: Request, settings: Settings, skipped: Sequence[str] = ()
) -> None:
    """Note the fields that are ignored for `ignored_header`.

    Args:
        settings: whether unknown fields are refused instead.
        skipped: more that is ignored.

    Raises:
        InvalidField: there is an unknown field, and such are refused.
    """
    found = dict.fromkeys(unknown_fields(body))
    if settings.unknown_fields == "refuse":
        for name, harmless in found:
            if not harmless:
                field = name.partition(".")[0]
                raise InvalidField(field, f"no such field: {name[:64]}", code="unknown_parameter")
    names = dict.fromkeys((*(name for name, _ in found), *skipped))
    request.state.ignored = [_UNPRINTABLE.sub("?", name[:64]) for name in names][:_MOST_NAMES]


def ignored_header(request: Request) -> dict[str, str]:
    """The header that names what was ignored, if anything was."""
    names: list[str] = getattr(request.state, "ignored", [])
    return {"x-ignored-fields": ", ".join(names)} if names else {}
