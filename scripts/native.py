"""Runs the stack without Docker: the API, and Prometheus where its binary is there.

Everything listens on this machine alone. Ends cleanly (exit 0) on Ctrl-C or SIGTERM, the API
first, so that running requests finish. If a part dies by itself, its last log lines are shown,
the rest is ended and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specops.presets import CHAT

ROOT = Path(__file__).resolve().parents[1]
PROMETHEUS_HELP = (
    "not installed (Debian, Ubuntu: apt-get install prometheus; macOS: brew install prometheus)"
)


class StartError(Exception):
    """The stack cannot run; the message says what to do about it."""


def environment(env_file: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` over the settings in `env_file`, read as Compose reads them: `NAME=value` lines.

    Of the file only what concerns a native run: the service's settings and the ports.
    """
    values: dict[str, str] = {}
    if env_file.exists():
        for line in env_file.read_text().splitlines():
            name, _, value = line.strip().partition("=")
            if name.startswith("SPECOPS_") or (name.endswith("_PORT") and name.isidentifier()):
                value = value.strip().strip("\"'")
                values[name] = os.path.expanduser(value) if name.endswith("_DIR") else value
    return {**values, **environ}


@dataclass(frozen=True)
class Address:
    """Where a part listens; `knob` is the variable that moves it."""

    host: str
    port: int
    knob: str

    @classmethod
    def read(cls, environ: Mapping[str, str], knob: str, default: int, host: str) -> Address:
        """The port named by the variable `knob`, or `default`."""
        text = environ.get(knob) or str(default)
        if not text.isdecimal() or not 0 < int(text) < 1 << 16:
            raise StartError(f"{knob} takes a port number, not {text!r}")
        return cls(host, int(text), knob)

    @property
    def target(self) -> str:
        """`host:port` as a client on this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)  # noqa: S104
        return f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{self.target}"

    def require_free(self) -> None:
        """Raise StartError where something listens already."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise StartError(
                    f"{self.host}:{self.port} cannot be used ({error.strerror}). End what runs "
                    f"there (`make down`), or choose another port with {self.knob}=… in .env."
                ) from None


@dataclass
class Part:
    """One running process of the stack and where its output goes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    @classmethod
    def start(cls, name: str, command: list[str], log: Path, environ: dict[str, str]) -> Part:
        """Start `command` in a session of its own, so that Ctrl-C reaches only this script."""
        with log.open("wb") as output:
            process = subprocess.Popen(  # noqa: S603
                command,
                cwd=ROOT,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(name, process, log)

    def require_alive(self) -> None:
        """Raise StartError with the last lines of the log if the process has ended."""
        status = self.process.poll()
        if status is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-15:])
            raise StartError(f"{self.name} ended with status {status}. Its last words:\n{tail}")

    def stop(self, patience: float) -> None:
        """SIGTERM, then SIGKILL after `patience` seconds."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not end in {patience:g} s: killed", flush=True)
            self.process.kill()
            self.process.wait()


def prometheus_config(api: str) -> str:
    """prometheus/prometheus.yml for a native run: `api` as target, the rules by full path."""
    text = (ROOT / "prometheus" / "prometheus.yml").read_text()
    for inside, outside in (("api:8000", api), ("rules/", f"{ROOT}/prometheus/rules/")):
        if text.count(inside) != 1:
            raise StartError(f"prometheus/prometheus.yml names {inside} not exactly once")
        text = text.replace(inside, outside)
    return text


def start_prometheus(address: Address, api: Address, state: Path, binary: str) -> Part:
    """Start Prometheus on a configuration made for `api`; its data goes below `state`."""
    config = state / "prometheus.yml"
    config.write_text(prometheus_config(api.target))
    command = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={state / 'prometheus'}",
        "--storage.tsdb.retention.time=15d",
        f"--web.listen-address={address.target}",
    ]
    return Part.start("Prometheus", command, state / "prometheus.log", dict(os.environ))


def api_awaited(api: Address) -> str | None:
    """What the API still does before it serves, "" where it does not listen yet; None: ready."""
    try:
        with urllib.request.urlopen(f"{api.url}/health", timeout=2):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        health = json.loads(error.read())
        if health["error"]:
            raise StartError(f"The model cannot be served: {health['error']}") from None
        return f"{health['state']}: {health['detail']}"
    except OSError:
        return ""


def prometheus_awaited(prometheus: Address) -> str | None:
    """As `api_awaited`: its port opens, and refuses queries, before its data is read."""
    try:
        with urllib.request.urlopen(f"{prometheus.url}/-/ready", timeout=2):  # noqa: S310
            return None
    except OSError:
        return ""


def wait_ready(
    awaited: Callable[[], str | None], parts: list[Part], stopped: threading.Event
) -> None:
    """Return when nothing is `awaited` any more, or when `stopped` is set; say what is."""
    said = ""
    while not stopped.wait(0.2):
        for part in parts:
            part.require_alive()
        now = awaited()
        if now is None:
            return
        if now and now != said:
            print(now, flush=True)
            said = now


def show_urls(api: Address, prometheus: Address | None, state: Path) -> None:
    """Print the table of URLs and what to do next."""
    rows = {
        "API": api.url,
        "its docs": f"{api.url}/docs",
        "Prometheus": prometheus.url if prometheus else PROMETHEUS_HELP,
        "Grafana": "needs Docker: `make up` starts it where an engine answers",
        "logs": str(state / "*.log"),
    }
    print("\nReady.\n")
    for name, where in rows.items():
        print(f"  {name:<11} {where}")
    print("\n  make load   loads it        Ctrl-C or make down   ends it\n", flush=True)


def supervise(parts: list[Part], stopped: threading.Event) -> None:
    """Return when `stopped` is set; raise StartError when a part ends before that."""
    while not stopped.wait(0.5):
        for part in parts:
            part.require_alive()


def run(state: Path, environ: dict[str, str]) -> int:
    """Start everything, wait for the end, end everything. Returns the exit status."""
    host = environ.get("SPECOPS_HOST") or "127.0.0.1"
    api = Address.read(environ, "SPECOPS_PORT", 8000, host)
    prometheus = Address.read(environ, "PROMETHEUS_PORT", 9090, "127.0.0.1")
    binary = shutil.which("prometheus")
    api.require_free()
    if binary:
        prometheus.require_free()
    if (environ.get("SPECOPS_MODEL") or CHAT) == CHAT and not environ.get("SPECOPS_TARGET"):
        subprocess.run([sys.executable, ROOT / "scripts" / "chat_model.py"], check=True)  # noqa: S603

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())

    state.mkdir(parents=True, exist_ok=True)
    pid_file = state / "native.pid"
    pid_file.write_text(str(os.getpid()))
    parts: list[Part] = []
    try:
        serve = [str(Path(sys.executable).parent / "specops"), "serve"]
        parts.append(Part.start("The API", serve, state / "api.log", environ))
        if binary:
            parts.append(start_prometheus(prometheus, api, state, binary))
        wait_ready(partial(api_awaited, api), parts, stopped)
        if binary:
            wait_ready(partial(prometheus_awaited, prometheus), parts, stopped)
        if not stopped.is_set():
            show_urls(api, prometheus if binary else None, state)
            supervise(parts, stopped)
    finally:
        patience = float(environ.get("SPECOPS_DRAIN_TIMEOUT") or 25) + 10
        for part in parts:
            part.stop(patience)
        pid_file.unlink(missing_ok=True)
    print("Ended.", flush=True)
    return 0


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("NATIVE_STATE") or ROOT / "var")
    parser.add_argument("--state", type=Path, default=default, help="logs and Prometheus' data")
    parser.add_argument("--print-url", action="store_true", help="print the API's URL and leave")
    arguments = parser.parse_args()
    environ = environment(ROOT / ".env", os.environ)
    try:
        if arguments.print_url:
            host = environ.get("SPECOPS_HOST") or "127.0.0.1"
            print(Address.read(environ, "SPECOPS_PORT", 8000, host).url)
            return 0
        return run(arguments.state.resolve(), environ)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
