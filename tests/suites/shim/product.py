"""Starts `specops serve` for the tests of another server.

SUITE_PYTHON is the Python that has it, SUITE_WORK the folder for logs and the service's cache.
"""

import atexit
import itertools
import os
import socket
import subprocess
import time
from pathlib import Path

import requests

WORK, MODELS = Path(os.environ["SUITE_WORK"]), Path(os.environ["SUITE_MODELS"])
PYTHON = os.environ["SUITE_PYTHON"]
_OTHERS = ("SPECOPS_", "SUITE_", "PYTHON")  # variables of this process that are none of its
_numbers = itertools.count(1)


def start(settings, log=None):
    """Return the port and the process of a service with these SPECOPS_ variables."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if not name.startswith(_OTHERS)}
    env |= {"SPECOPS_CACHE_DIR": str(MODELS / "cache"), "SPECOPS_DRAIN_TIMEOUT": "1"}
    env |= {"SPECOPS_PORT": str(port), **settings}
    log = Path(log or WORK / "logs" / f"{next(_numbers)}.log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [PYTHON, "-m", "specops", "serve"], env=env, stdout=output, stderr=output
        )
    atexit.register(end, process)
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            if requests.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                return port, process
        except requests.RequestException:
            pass  # not yet
        time.sleep(0.05)
    end(process)
    raise RuntimeError(f"the service did not start: {log.read_text()[-800:]}")


def end(process):
    """End a service."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(8)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
