"""Runs one client: `python -m tests.clients.drivers MODULE ADDRESS MODEL`.

It reads a line of JSON from stdin, with the `feature` to try, its `argument` and the name of the
`form`; it writes a line of JSON with the `result` or the `error`, and waits for the next one. So
whoever drives it can look at the server while this process, and all that the client still holds,
lives. `drivers.mjs` does the same.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from typing import Any

from tests.clients.drivers import Server
from tests.clients.forms import FORMS


def attempt(driver: Any, server: Server, asked: dict[str, Any]) -> dict[str, Any]:
    """Try one feature."""
    feature, argument = asked["feature"], asked["argument"]
    try:
        if feature == "structured":
            form, _ = FORMS[asked["form"]]
            return {"result": driver.structured(server, form, argument).model_dump(mode="json")}
        return {"result": getattr(driver, feature)(server, argument)}
    except Exception as error:  # whatever a client raises is what it says to its users
        traceback.print_exc()
        names = [f"{kind.__module__.split('.')[0]}.{kind.__name__}" for kind in type(error).mro()]
        return {"error": {"names": names[:-2], "message": str(error)}}


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
