"""Runs one client: `python -m tests.clients.drivers MODULE ADDRESS MODEL`.

It reads a line of JSON from stdin, with the `feature` to try, its `argument` and the name of the
`form`; it writes a line of JSON with the `result` or the `error`, and waits for the next one. So
whoever drives it can look at the server while this process, and all that the client still holds,
lives. `drivers.mjs` does the same.
"""

import asyncio
import importlib
import json
import os
import sys
import traceback
from collections.abc import AsyncIterator, Iterator
from typing import Any

from tests.clients.drivers import FUNCTIONS, LONG, SHORT, Server
from tests.clients.forms import FORMS


def attempt(driver: Any, server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    """Try one feature."""
    feature, argument = asked["feature"], asked["argument"]
    try:
        if feature == "structured":
            form, _ = FORMS[asked["form"]]
            return {"result": driver.structured(server, form, argument).model_dump(mode="json")}
        function = getattr(driver, FUNCTIONS.get(feature, feature))
        match feature:
            case "chat":
                argument = [{"role": "user", "content": argument}]
            case "stream" | "cancel":
                whole = feature == "stream"
                pieces = function(server, argument, SHORT if whole else LONG)
                return {"result": read(pieces, whole=whole)}
        return {"result": function(server, argument)}
    except Exception as error:  # whatever a client raises is what it says to its users
        traceback.print_exc()
        names = [f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).mro()]
        return {"error": {"names": names[:-2], "message": str(error)}}


def read(pieces: Iterator[str] | AsyncIterator[str], *, whole: bool) -> list[str]:
    """Return the pieces of an answer, or the first that says something: then the client leaves."""
    if isinstance(pieces, AsyncIterator):
        return asyncio.run(_read(pieces, whole=whole))
    found = list(pieces) if whole else [next(filter(None, pieces))]
    pieces.close()  # type: ignore[attr-defined] - generators all
    return found


async def _read(pieces: AsyncIterator[str], *, whole: bool) -> list[str]:
    found = [piece async for piece in pieces] if whole else [await anext(pieces)]
    await pieces.aclose()  # type: ignore[attr-defined]
    return found


def main() -> None:
    """Answer line by line."""
    module, address, model = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # some clients print
    driver = importlib.import_module(f"{__package__}.{module}")
    for line in sys.stdin:
        outcome = attempt(driver, Server(address, model), json.loads(line))
        print(json.dumps(outcome), file=answers, flush=True)


if __name__ == "__main__":
    main()
