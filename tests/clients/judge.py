"""Whether what a client reported is what its users expect."""

import math
from typing import Any

from pydantic import ValidationError

from tests.clients.forms import ANSWER, FORMS, TEXTS
from tests.clients.table import ANSWERED, Client


def problem(client: Client, feature: str, outcome: dict[str, Any]) -> str | None:
    """Return what is wrong with a feature's outcome; None if nothing is."""
    error, lack = outcome.get("error"), client.lacks.get(feature)
    if lack is not None:
        if error is None:
            return f"it works, and table.py says that it does not: {lack.why}"
        return None if lack.error in error["message"] else _said(error)
    if feature == "too_long" and client.too_long != ANSWERED:
        if error is None:
            return f"an answer, not {client.too_long}"
        fits = client.too_long in error["names"] and client.says in error["message"]
        return None if fits else f"not {client.too_long} ({client.says!r}): {_said(error)}"
    if error is not None:
        return _said(error)
    return _unexpected(feature, outcome["result"])


def _said(error: dict[str, Any]) -> str:
    name = error["names"][0] if error["names"] else "error"
    return f"{name}: {' '.join(error['message'].split())[:300]}"


def _unexpected(feature: str, result: Any) -> str | None:
    fits: bool | str | None
    if feature in FORMS:
        try:
            FORMS[feature][0].model_validate(result)
        except ValidationError as error:
            return str(error)
        fits = True
    elif feature == "tools":
        calls = result["calls"]
        once = all(call not in calls[:index] for index, call in enumerate(calls))
        fits = calls and once and all(map(_asks_for_weather, calls)) and result["answer"]
    elif feature == "embeddings":
        norms = [math.hypot(*vector) for vector in result]
        fits = len(norms) == len(TEXTS) and all(abs(norm - 1) < 1e-3 for norm in norms)
    elif feature == "cancel":
        fits = True  # the server has to say
    else:
        pieces = [piece for piece in result if piece] if feature == "stream" else [result]
        fits = ANSWER in "".join(pieces)
        fits = fits and len(pieces) > (feature == "stream")
    return None if fits else repr(result)[:300]


def _asks_for_weather(call: dict[str, Any]) -> bool:
    city = call["arguments"].get("city")
    return call["name"] == "get_weather" and isinstance(city, str) and city != ""
