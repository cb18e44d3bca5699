"""Kills a server that hangs, so that its supervisor can start it again.

A server that is stopped, or whose threads wait for each other, accepts connections and answers
none. Its clients wait until they give up, and a gateway can neither ask another replica nor end the
streams with an error. Once the server is dead, both happen. The watchdog is a small process beside
each `specops serve`, and ends with it.

Slow does not mean hung. A server that swaps still computes, or at least loads pages. The watchdog
kills it only when all of its requests have passed their deadline.

This module uses little of the standard library and nothing else: it takes memory as long as the
server runs.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess  # nosec B404
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_ANSWER_SECONDS = 4.0
_PAUSE_SECONDS = 4.0
# Counts of questions in a row without an answer, not seconds: if the watchdog was suspended
# together with the server (Ctrl-Z, `docker pause`), both just go on.
_UNANSWERED_IDLE = 3  # about 30 s in which the server computed nothing
_UNANSWERED = 45  # 6 min: longer than a request may take (SPECOPS_REQUEST_TIMEOUT, 300 s)
_TRACED = "t"  # the state of a process that a debugger holds


def watch(
    answers: Callable[[], bool],
    activity: Callable[[], tuple[str, ...] | None],
    ended: Callable[[], bool],
) -> str | None:
    """Wait until the server has ended or hangs.

    Args:
        answers: asks the server and returns whether it answered.
        activity: returns values that change whenever the server computes, its state first; None
            if the system does not report them.
        ended: waits a moment and returns whether the server has ended.

    Returns:
        In which way the server hangs, or None if it has ended.
    """
    unanswered = idle = 0
    before: tuple[str, ...] | None = None
    while not ended():
        if answers():
            unanswered, idle, before = 0, 0, None
            continue
        now = activity()
        idle = idle + 1 if now and now == before and now[0] != _TRACED else 0
        unanswered, before = unanswered + 1, now
        if idle >= _UNANSWERED_IDLE:
            return "it answers nothing and computes nothing"
        if unanswered >= _UNANSWERED:
            return "it has answered nothing for longer than a request may take"
    return None


def answers(host: str, port: int) -> bool:
    """Return whether a server sends anything within some seconds."""
    try:
        with socket.create_connection((host, port), timeout=_ANSWER_SECONDS) as connection:
            connection.sendall(b"GET /health/live HTTP/1.0\r\n\r\n")
            connection.recv(1)
    except OSError:
        return False
    return True


def activity(process: int) -> tuple[str, ...] | None:
    """Return state, page faults and processor time of a process; None without procfs."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[7], fields[9], fields[11], fields[12]


@contextmanager
def watched(host: str, port: int) -> Iterator[None]:
    """Watch this process, which listens at the address or will, while the block runs."""
    # The same process group, so that Ctrl-Z suspends both. The pipe closes when this process ends.
    command = [sys.executable, "-P", "-m", __name__, str(os.getpid()), host, str(port)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:  # noqa: S603 # nosec B603
        try:
            yield
        finally:
            process.kill()


def main(arguments: list[str]) -> None:
    """Watch a server; the arguments are its process, host and port."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server ends by itself, after its requests
    server, host, port = int(arguments[0]), arguments[1], int(arguments[2])
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 # nosec B104

    def ended() -> bool:
        return bool(select.select([sys.stdin], [], [], _PAUSE_SECONDS)[0])

    hangs = watch(lambda: answers(host, port), lambda: activity(server), ended)
    if hangs is not None:
        import logging  # noqa: PLC0415 - memory, see above

        from specops.system import logs  # noqa: PLC0415

        logs.configure("info")
        fields = {"process": server, "reason": hangs}
        logging.getLogger("specops.http.watchdog").critical(
            "the server hangs: it is killed", extra={"fields": fields}
        )
        os.kill(server, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
