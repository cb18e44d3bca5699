"""Asks a running service for its model's state, for Docker's healthcheck and for `make up`.

Exit status 0 means ready; 1 means failed, draining or silent, and the reason is printed. While the
model is being prepared, this waits and says nothing: Docker counts a running healthcheck neither as
passed nor as failed. So a container stays `starting` through a download of any length, and turns
unhealthy seconds after its model failed; with a start period, only after that period.

It asks the service's address, by SPECOPS_HOST and SPECOPS_PORT. It uses only the standard library
and nothing of the service, because it runs every few seconds on the cores that compute.
"""

import argparse
import http.client
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from specops.http.server.address import reachable

_ON_ITS_WAY = ("starting", "downloading", "converting", "loading")
_REQUEST_SECONDS = 4.0
_PAUSE_SECONDS = 1.0
_SILENCE_SECONDS = 20.0  # without an answer, while Python starts or all cores compute
_STALL_SECONDS = 900.0  # without a change


def check(
    ask: Callable[[], dict[str, Any] | None],
    report: Callable[[str], None],
    *,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> str | None:
    """Wait while the model is being prepared.

    Args:
        ask: returns the answer of `/health`; None without an answer.
        report: called with the model's state, whenever it changes.
        clock: returns the time in seconds.
        pause: waits for a number of seconds.

    Returns:
        None once the model is ready, otherwise why it will not be ready soon.
    """
    reported, since, heard = "", clock(), clock()
    while True:
        health, now = ask(), clock()
        if health is None:
            if now - heard >= _SILENCE_SECONDS:
                return f"/health has not answered for {_SILENCE_SECONDS:g} s"
        else:
            heard = now
            state = str(health.get("state"))
            if state not in _ON_ITS_WAY:
                return None if state == "ready" else f"{state}: {health.get('error') or '-'}"
            if (doing := f"{state} {health.get('detail') or ''}".strip()) != reported:
                reported, since = doing, now
                report(reported)
            elif now - since >= _STALL_SECONDS:
                return f"nothing new for {_STALL_SECONDS:g} s: {reported}"
        pause(_PAUSE_SECONDS)


def ask_health(host: str, port: int) -> dict[str, Any] | None:
    """Return the answer of `/health`, with any status; None without a usable answer."""
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_SECONDS)
    try:
        connection.request("GET", "/health")
        body = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return body if isinstance(body, dict) else None


def main(arguments: list[str] | None = None) -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="python -m specops.http.server.healthcheck", description=__doc__
    )
    port = int(os.environ.get("SPECOPS_PORT") or 8000)
    host = os.environ.get("SPECOPS_HOST") or "127.0.0.1"
    parser.add_argument("--host", default=host, help="the service's address (%(default)s)")
    parser.add_argument("--port", type=int, default=port, help="its port (%(default)s)")
    parser.add_argument("--progress", action="store_true", help="print the model's states")
    options = parser.parse_args(arguments)

    def report(doing: str) -> None:
        if options.progress:
            print(doing, flush=True)

    host = reachable(options.host)
    problem = check(lambda: ask_health(host, options.port), report)
    if problem is not None:
        print(problem, file=sys.stderr)
    return 0 if problem is None else 1


if __name__ == "__main__":
    sys.exit(main())
