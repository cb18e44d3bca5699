"""Runs the stack without Docker: the API, and Prometheus where its binary is there.

With REPLICAS=3 there are three of the API, on free ports, and the gateway at the one's URL.
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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from specops.presets import CHAT

ROOT = Path(__file__).resolve().parents[1]
LOCAL = "127.0.0.1"
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
            if name.startswith(("SPECOPS_", "GATEWAY_", "REPLICAS")) or (
                name.endswith("_PORT") and name.isidentifier()
            ):
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
    """One running process of the stack, where its output goes, and how it is started again."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    spawn: Callable[[], subprocess.Popen[bytes]]

    @classmethod
    def start(cls, name: str, command: list[str], log: Path, environ: dict[str, str]) -> Part:
        """Start `command` in a session of its own, so that Ctrl-C reaches only this script."""

        def spawn() -> subprocess.Popen[bytes]:
            with log.open("ab") as output:
                return subprocess.Popen(  # noqa: S603
                    command,
                    cwd=ROOT,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

        log.unlink(missing_ok=True)
        return cls(name, spawn(), log, spawn)

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


def prometheus_config(apis: list[str], gateway: str | None = None) -> str:
    """prometheus/prometheus.yml for a native run: addresses for names, the rules by full path."""
    text = (ROOT / "prometheus" / "prometheus.yml").read_text()
    replaced = {"rules/": f"{ROOT}/prometheus/rules/"}
    for name, port, targets in (("api", 8000, apis), ("gateway", 9901, [gateway] * bool(gateway))):
        found = (
            f"dns_sd_configs: [{{names: [{name}], type: A, port: {port}, refresh_interval: 5s}}]"
        )
        replaced[found] = f"static_configs: [{{targets: {json.dumps(targets)}}}]"
    for inside, outside in replaced.items():
        if text.count(inside) != 1:
            raise StartError(f"prometheus/prometheus.yml names {inside} not exactly once")
        text = text.replace(inside, outside)
    return text


def start_prometheus(address: Address, config_text: str, state: Path, binary: str) -> Part:
    """Start Prometheus on a configuration; its data goes below `state`."""
    (config := state / "prometheus.yml").write_text(config_text)
    command = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={state / 'prometheus'}",
        "--storage.tsdb.retention.time=15d",
        f"--web.listen-address={address.target}",
    ]
    return Part.start("Prometheus", command, state / "prometheus.log", dict(os.environ))


def replica_count(environ: Mapping[str, str]) -> int:
    """REPLICAS, how many of the API are to run."""
    if (text := environ.get("REPLICAS") or "1") not in map(str, range(1, 65)):
        raise StartError(f"REPLICAS takes a number from 1 to 64, not {text!r}")
    return int(text)


def free_addresses(count: int) -> list[Address]:
    """Addresses on this machine alone, that nobody listens on now."""
    with ExitStack() as stack:
        probes = [stack.enter_context(socket.create_server((LOCAL, 0))) for _ in range(count)]
        return [Address(LOCAL, probe.getsockname()[1], "REPLICAS") for probe in probes]


def start_apis(apis: list[Address], state: Path, environ: Mapping[str, str]) -> list[Part]:
    """Start the API once for each address, all at the same time."""
    serve = [str(Path(sys.executable).parent / "specops"), "serve"]
    if len(apis) == 1:
        return [Part.start("The API", serve, state / "api.log", dict(environ))]
    started = []
    for number, api in enumerate(apis, start=1):
        own = {**environ, "SPECOPS_HOST": api.host, "SPECOPS_PORT": str(api.port)}
        started.append(Part.start(f"Replica {number}", serve, state / f"api-{number}.log", own))
    return started


def start_gateway(
    listen: Address, figures: Address, apis: list[Address], state: Path, environ: Mapping[str, str]
) -> Part:
    """Start the gateway before these replicas."""
    command = [sys.executable, str(ROOT / "gateway" / "run.py"), "--state", str(state)]
    command += ["--listen", f"{listen.host}:{listen.port}", "--figures", figures.target]
    for api in apis:
        command += ["--replica", api.target]
    return Part.start("The gateway", command, state / "gateway.log", dict(environ))


def api_awaited(api: Address) -> str | None:
    """What the API still does before it serves, "" where it does not listen yet; None: ready."""
    try:
        with urllib.request.urlopen(f"{api.url}/health", timeout=2):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        health = json.loads(error.read())
        if "state" not in health:  # it is the gateway's answer: no replica is ready
            return ""
        if health["error"]:
            raise StartError(f"The model cannot be served: {health['error']}") from None
        return f"{health['state']} {health['detail'] or ''}".strip()
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


def show_urls(api: Address, replicas: list[Address], prometheus: str, state: Path) -> None:
    """Print the table of URLs and what to do next."""
    several = {"replicas": ", ".join(one.target for one in replicas)} if replicas != [api] else {}
    rows = {
        "API": api.url,
        **several,
        "its docs": f"{api.url}/docs",
        "Prometheus": prometheus,
        "Grafana": "needs Docker: `make up` starts it where an engine answers",
        "logs": str(state / "*.log"),
    }
    print("\nReady.\n")
    for name, where in rows.items():
        print(f"  {name:<11} {where}")
    print("\n  make load   loads it        Ctrl-C or make down   ends it\n", flush=True)


def supervise(parts: list[Part], stopped: threading.Event) -> None:
    """Return when `stopped` is set; raise StartError when a part ends before that.

    One replica of several is started again instead, as Compose does it.
    """
    while not stopped.wait(0.5):
        for part in parts:
            if part.name.startswith("Replica") and (status := part.process.poll()) is not None:
                print(f"{part.name} ended with status {status}: started again", flush=True)
                part.process = part.spawn()
            part.require_alive()


def run(state: Path, environ: dict[str, str]) -> int:
    """Start everything, wait for the end, end everything. Returns the exit status."""
    host = environ.get("SPECOPS_HOST") or LOCAL
    api = Address.read(environ, "SPECOPS_PORT", 8000, host)
    prometheus = Address.read(environ, "PROMETHEUS_PORT", 9090, LOCAL)
    count = replica_count(environ)
    binary = shutil.which("prometheus")
    api.require_free()
    if binary:
        prometheus.require_free()
    if (environ.get("SPECOPS_MODEL") or CHAT) == CHAT and not environ.get("SPECOPS_TARGET"):
        subprocess.run([sys.executable, ROOT / "scripts" / "chat_model.py"], check=True)  # noqa: S603
    *replicas, figures = free_addresses(count + 1)
    replicas = replicas if count > 1 else [api]

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())

    state.mkdir(parents=True, exist_ok=True)
    pid_file = state / "native.pid"
    pid_file.write_text(str(os.getpid()))
    parts: list[Part] = []
    try:
        parts += start_apis(replicas, state, environ)
        if count > 1:
            parts.append(start_gateway(api, figures, replicas, state, environ))
        if binary:
            gateway = figures.target if count > 1 else None
            config = prometheus_config([one.target for one in replicas], gateway)
            parts.append(start_prometheus(prometheus, config, state, binary))
        for one in dict.fromkeys([*replicas, api]):
            wait_ready(partial(api_awaited, one), parts, stopped)
        if binary:
            wait_ready(partial(prometheus_awaited, prometheus), parts, stopped)
        if not stopped.is_set():
            show_urls(api, replicas, prometheus.url if binary else PROMETHEUS_HELP, state)
            supervise(parts, stopped)
    finally:
        patience = float(environ.get("SPECOPS_DRAIN_TIMEOUT") or 25) + 10
        # The gateway first: it waits for the answers that the replicas still give.
        for part in sorted(parts, key=lambda part: part.name != "The gateway"):
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
            host = environ.get("SPECOPS_HOST") or LOCAL
            print(Address.read(environ, "SPECOPS_PORT", 8000, host).url)
            return 0
        return run(arguments.state.resolve(), environ)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
