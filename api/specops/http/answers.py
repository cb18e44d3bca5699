"""An answer in one piece; one that comes in pieces is `sse.EventStream`."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import Response
from pydantic import BaseModel


def json_answer(
    content: BaseModel, headers: Mapping[str, str], *, exclude_none: bool = False
) -> Response:
    """Return a body of a schema as JSON."""
    text = content.model_dump_json(exclude_none=exclude_none)
    return Response(text, headers=dict(headers), media_type="application/json")
