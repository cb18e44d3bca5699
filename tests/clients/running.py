"""A client's driver in a process of its own, which tries one feature at a time."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.clients import environments
from tests.clients.forms import FORMS, LONG_ANSWER, QUESTION, TEXTS, TOO_LONG, WEATHER_QUESTION
from tests.clients.table import Client

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120.0  # seconds for one feature
ARGUMENTS: dict[str, Any] = {
    "chat": QUESTION,
    "stream": QUESTION,
    "tools": WEATHER_QUESTION,
    "embeddings": TEXTS,
    "too_long": TOO_LONG,
    "cancel": LONG_ANSWER,
}


class Driver:
    """What asks the client."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, feature: str) -> dict[str, Any]:
        """Try a feature; return its `result`, or the `error` with its `names` and `message`."""
        asked: dict[str, Any] = {"feature": feature, "argument": ARGUMENTS.get(feature)}
        if feature in FORMS:
            asked = {"feature": "structured", "form": feature, "argument": FORMS[feature][1]}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        clock = threading.Timer(PATIENCE, self._process.kill)
        clock.start()
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            clock.cancel()
        if not line:
            return {"error": {"names": [], "message": "the driver's process ended; see its log"}}
        outcome: dict[str, Any] = json.loads(line)
        return outcome


@contextmanager
def driver(client: Client, address: str, log: Path) -> Iterator[Driver]:
    """Start a client's driver; end it at the end of the block."""
    if client.kind == "npm":
        command: list[Any] = ["node", environments.npm() / "drivers.mjs"]
    else:
        command = [environments.python("python"), "-m", "tests.clients.drivers"]
    # Without what would lead a client elsewhere, or have it look for updates.
    kept = ("PATH", "HOME", "LANG", "TMPDIR")
    variables = {name: os.environ[name] for name in kept if name in os.environ}
    variables |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DO_NOT_TRACK": "1"}
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*command, client.driver, address, client.model],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        try:
            yield Driver(process)
        finally:
            process.kill()
