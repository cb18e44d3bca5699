"""Kills a server that hangs, so that its supervisor can start it again.

A server that is stopped, or whose threads wait for each other, accepts connections but answers
none. Its clients wait until they give up, and a gateway can neither try another replica nor end the
streams with an error. Once the server is dead, both happen. Each `specops serve` has a watchdog, a
small process that ends with it.

Slow does not mean hung. A server that swaps still computes, or at least loads pages. The watchdog
kills it only after the deadlines (SPECOPS_REQUEST_TIMEOUT) of all its requests.

This module uses little of the standard library and nothing of the service, because it takes memory
as long as the server runs.
"""

import os
import select
import signal
import socket
import subprocess  # nosec B404
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from specops.http.server.address import reachable

_ANSWER_SECONDS = 4.0
_PAUSE_SECONDS = 4.0
# More than a probe and a pause take. If the watchdog was suspended together with the server
# (Ctrl-Z, `docker pause`), no more than this counts, and both continue.
_MAX_TURN = 10.0
_IDLE_SECONDS = 24.0  # in which the server neither answers nor computes anything
_MARGIN_SECONDS = 60.0  # of silence after the deadline of the last request
_TRACED = "t"  # the state of a process that a debugger holds


def watch(
    answers: Callable[[], bool],
    activity: Callable[[], tuple[str, ...] | None],
    ended: Callable[[], bool],
    patience: float,
    clock: Callable[[], float] = time.monotonic,
) -> str | None:
    """Wait until the server has ended or hangs.

    Args:
        answers: probes the server and returns whether it answered.
        activity: returns values that change whenever the server computes, its state first; None
            if the system does not report them.
        ended: waits a moment and returns whether the server has ended.
        patience: seconds of silence allowed to a server that computes.
        clock: returns seconds.

    Returns:
        How the server hangs, or None if it has ended.
    """
    silent = idle = 0.0  # seconds
    before: tuple[str, ...] | None = None
    last = clock()
    while not ended():
        answered = answers()
        asked = clock()
        turn, last = min(asked - last, _MAX_TURN), asked
        if answered:
            silent, idle, before = 0.0, 0.0, None
            continue
        now = activity()
        idle = idle + turn if now and now == before and now[0] != _TRACED else 0.0
        silent, before = silent + turn, now
        if idle >= _IDLE_SECONDS:
            return "it neither answers nor computes anything"
        if silent >= patience:
            return "it has answered nothing for longer than a request may take"
    return None


def answers(host: str, port: int) -> bool:
    """Return whether a server sends anything, or closes the connection, within some seconds."""
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_SECONDS) as connection:
            connection.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
            connection.recv(1)
    except (ConnectionResetError, BrokenPipeError):
        return True  # it has too many connections, and works
    except OSError:
        return False
    return True


def activity(process: int) -> tuple[str, ...] | None:
    """Return state, page faults and processor time of a process; None without procfs."""
    try:
        text = Path(f"/proc/{process}/stat").read_text("utf-8", "replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[7], fields[9], fields[11], fields[12]


@contextmanager
def watched(host: str, port: int, request_seconds: float) -> Iterator[None]:
    """Watch this process, which listens on the address or soon will, while the block runs.

    Args:
        host: the address.
        port: the port.
        request_seconds: maximum time of a request.
    """
    # In the same process group, so that Ctrl-Z suspends both. The pipe closes when this one ends.
    arguments = (os.getpid(), host, port, request_seconds + _MARGIN_SECONDS)
    command = [sys.executable, "-P", "-m", __name__, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # noqa: S603 # nosec B603
        try:
            yield
        finally:
            process.kill()


def main(arguments: list[str]) -> None:
    """Watch a server; the arguments are its process, host, port, and the seconds of patience."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends by itself, after its requests
    server, host, port = int(arguments[0]), arguments[1], int(arguments[2])
    patience = float(arguments[3])
    host = reachable(host)

    def ended() -> bool:
        return bool(select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0])

    hangs = watch(lambda: answers(host, port), lambda: activity(server), ended, patience)
    if hangs is not None:
        import logging  # noqa: PLC0415 - memory, see above

        from specops.system import logs  # noqa: PLC0415

        logs.configure("info")
        fields = {"process": server, "reason": hangs}
        logging.getLogger("specops.http.server.watchdog").critical(
            "killing the server: it hangs", extra={"fields": fields}
        )
        os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
