"""Runs the stack without Docker: the API, and Prometheus if it is installed.

With REPLICAS=3 the API runs three times, on free ports, and the gateway listens at the usual URL.
Everything listens only on this machine. The stack stops cleanly (exit 0) on Ctrl-C or SIGTERM. If
a part dies, the script prints the end of its log, stops the rest and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from specops.http.server.address import reachable
from specops.presets import CHAT

ROOT = Path(__file__).resolve().parents[1]
LOCAL = "127.0.0.1"
# Below the ports that systems assign to clients: a restarted replica needs its port again.
_PORTS = range(12_000, 32_000)
LOAD = ("LOAD_", "TARGET_URL", "LOCUST_PORT")  # for `make load`
# Prefixes of the variables that are read from .env, in addition to all that end in _PORT.
READ = ("SPECOPS_", "HF_", "OTEL_", "GATEWAY_", "REPLICAS", *LOAD)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}
SAY_SECONDS = 5  # between progress lines of a slow start
PROMETHEUS_HELP = (
    "not installed (Debian, Ubuntu: apt-get install prometheus; macOS: brew install prometheus)"
)
GRAFANA_HELP = "needs Docker: `make up` starts it where an engine works"
GRAFANA_OF_YOURS = """
              Or one of yours: add a data source of type Prometheus with the URL
              {url}, then import grafana/dashboards/*.json (Dashboards, New)"""


class StartError(Exception):
    """The stack cannot run; the message says what to do about it."""


def dotenv_value(name: str, text: str) -> str:
    """Parse a value of .env as Docker Compose does: without quotes and comments.

    Raises:
        StartError: it has a variable or a second line, which only Compose can read.
    """
    if single := re.match(r"'([^']*)'", text):
        return single[1]
    if double := re.match(r'"((?:[^"\\]|\\.)*)"', text):
        value = re.sub(r'\\([nrt"$\\])', lambda c: ESCAPES.get(c[1], c[1]), double[1])
        text = double[1].replace(r"\$", "")
    elif text[:1] in {"'", '"'}:
        raise StartError(f"{name} in .env lacks the second {text[0]} on its line")
    else:
        value = text.partition(" #")[0].rstrip()
    if "$" in text:
        raise StartError(f"{name} in .env has a $: put the value in single quotes")
    return value


def environment(env_file: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for a native run: those of `env_file`, overridden by `environ`.

    Only settings of the service, of the hub's client and of the stack are read from the file.
    """
    values: dict[str, str] = {}
    for line in env_file.read_text("utf-8").splitlines() if env_file.exists() else ():
        if found := re.match(r"\s*(?:export\s+)?(\w+)\s*[=:]\s*(.*)", line):
            name = found[1]
            if name.startswith(READ) or name.endswith("_PORT"):
                value = dotenv_value(name, found[2].rstrip())
                values[name] = os.path.expanduser(value) if name.endswith("_DIR") else value
    return {**values, **environ}


def joined(host: str, port: int) -> str:
    """`host:port` in the form for URLs."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Address:
    """The address on which a part listens, and the variable that sets its port."""

    host: str
    port: int
    variable: str

    @classmethod
    def read(cls, environ: Mapping[str, str], variable: str, default: int, host: str) -> Address:
        """The address on `host` with the port in the variable, or `default`.

        Raises:
            StartError: the variable is not a port.
        """
        text = environ.get(variable) or str(default)
        if not text.isdecimal() or not 0 < int(text) < 1 << 16:
            raise StartError(f"{variable} takes a port number, not {text!r}")
        return cls(host, int(text), variable)

    @property
    def target(self) -> str:
        """`host:port` for a client on this machine."""
        return joined(reachable(self.host), self.port)

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://{self.target}"

    @property
    def listening(self) -> str:
        """`host:port` on which the part listens."""
        return joined(self.host, self.port)

    def require_free(self) -> None:
        """Raise StartError if another process already listens here."""
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.host, self.port))
            except OSError as error:
                raise StartError(
                    f"{self.listening} cannot be used ({error.strerror}). Stop what runs "
                    f"there (`make down`), or choose another port with {self.variable}=… in .env."
                ) from None


class Part:
    """A running process of the stack.

    Args:
        name: its name in messages.
        command: the command line.
        log: its log file.
        environ: its environment variables.
    """

    def __init__(
        self, name: str, command: list[str], log: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self._command, self._log, self._environ = command, log, environ
        log.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        """Start the process in a new session, so that Ctrl-C reaches only this script."""
        with self._log.open("ab") as output:
            self.process = subprocess.Popen(  # noqa: S603
                self._command,
                cwd=ROOT,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def require_alive(self) -> None:
        """Raise StartError with the last lines of the log if the process has ended."""
        if (status := self.process.poll()) is not None:
            tail = "\n".join(
                self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
            )
            raise StartError(f"{self.name} exited with status {status}. Its last lines:\n{tail}")

    def stop(self, patience: float) -> None:
        """Send SIGTERM, and SIGKILL after `patience` seconds."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(patience)
        except subprocess.TimeoutExpired:
            print(f"{self.name} did not stop within {patience:g} s: killed", flush=True)
            self.process.kill()
            self.process.wait()


def prometheus_config(apis: list[str], gateway: str | None, metrics_key: Path) -> str:
    """prometheus.yml, or scale.yml for a gateway, with addresses and paths of this machine.

    Instances keep their names, so that their series continue if a port changes.

    Args:
        apis: addresses of the API's replicas.
        gateway: address of the gateway's metrics; None: there is no gateway.
        metrics_key: file with the key for the API's metrics.
    """
    folder = ROOT / "prometheus"
    file = folder / ("scale.yml" if gateway else "prometheus.yml")
    config = yaml.safe_load(file.read_text("utf-8"))
    config["rule_files"] = [str(folder / name) for name in config["rule_files"]]
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    names = ["api"] if gateway is None else [f"api-{n}" for n in range(1, len(apis) + 1)]
    jobs["specops"].pop("dns_sd_configs", None)
    jobs["specops"] |= _scraped(dict(zip(names, apis, strict=True)))
    jobs["specops"]["authorization"] = {"credentials_file": str(metrics_key)}
    if gateway is not None:
        jobs["gateway"] |= _scraped({"gateway": gateway})
    return yaml.safe_dump(config, sort_keys=False)


def _scraped(targets: Mapping[str, str]) -> dict[str, Any]:
    """The part of a job with the addresses to scrape, by the names of the instances."""
    return {
        "static_configs": [
            {"targets": [address], "labels": {"instance": name}}
            for name, address in targets.items()
        ]
    }


def free_addresses(count: int) -> list[Address]:
    """Loopback addresses on which no process listens now."""
    free: list[Address] = []
    with ExitStack() as stack:
        for port in random.sample(_PORTS, len(_PORTS)):
            if len(free) == count:
                break
            with suppress(OSError):
                stack.enter_context(socket.create_server((LOCAL, port)))
                free.append(Address(LOCAL, port, "REPLICAS"))
    return free


def awaited(url: str) -> str | None:
    """The progress of a part's start ("" if it reports none); None if it is ready."""
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310
            return None
    except urllib.error.HTTPError as error:
        answer = error.read()
    except OSError:
        return ""
    if b'"state"' not in answer:  # Prometheus reads its data, or no replica of the gateway is ready
        return ""
    health = json.loads(answer)
    if reason := health.get("error"):
        raise StartError(f"The model cannot be served: {reason}")
    return health["detail"] or health["state"]


def wait_ready(url: str, parts: list[Part], stopped: threading.Event) -> None:
    """Wait until `url` answers with 200 or `stopped` is set, and print the progress.

    Args:
        url: the URL.
        parts: the parts that must stay alive.
        stopped: set by a stop signal.
    """
    printed, started = "", time.monotonic()
    said = started
    while not stopped.wait(0.2):
        for part in parts:
            part.require_alive()
        if (now := awaited(url)) is None:
            return
        late = time.monotonic() - said > SAY_SECONDS
        if now not in ("", printed) or late:
            print(f"{now or f'waiting for {url}'}{f' ({said - started:.0f} s)' * late}", flush=True)
            printed, said = now, time.monotonic()


def in_browser(address: Address, environ: Mapping[str, str]) -> str:
    """The URL for a browser; in a Codespace, that of its proxy."""
    if name := environ.get("CODESPACE_NAME"):
        domain = environ.get("GITHUB_CODESPACES_PORT_FORWARDING_DOMAIN") or "app.github.dev"
        return f"https://{name}-{address.port}.{domain}"
    return address.url


def alerts_page(prometheus: str) -> str:
    """The path of the alerts page: Debian builds Prometheus with only the older pages."""
    try:
        with urllib.request.urlopen(f"{prometheus}/alerts", timeout=10):  # noqa: S310
            return "/alerts"
    except urllib.error.HTTPError:
        return "/classic/alerts"


def show_urls(
    api: str, replicas: list[str], prometheus: dict[str, str], grafana: str, state: Path
) -> None:
    """Print the table of URLs and the next commands.

    Args:
        api: URL of the API.
        replicas: addresses of the replicas, if there are several.
        prometheus: URLs of Prometheus by name, or how to install it.
        grafana: how to get Grafana.
        state: folder of the logs.
    """
    several = {"replicas": ", ".join(replicas)} if replicas else {}
    rows = {
        "API": api,
        **several,
        "its docs": f"{api}/docs",
        **prometheus,
        "Grafana": grafana,
        "logs": str(state / "*.log"),
    }
    print("\nReady.\n")
    for name, where in rows.items():
        print(f"  {name:<11} {where}")
    print("\n  make load   load test        Ctrl-C or make down   stop\n", flush=True)


def supervise(parts: list[Part], stopped: threading.Event) -> None:
    """Wait until `stopped` is set; restart the API's processes, as Compose does.

    Raises:
        StartError: another part has ended.
    """
    while not stopped.wait(0.5):
        for part in parts:
            if (
                part.name.startswith(("The API", "Replica"))
                and (status := part.process.poll()) is not None
            ):
                print(f"{part.name} exited with status {status}: restarted", flush=True)
                part.start()
            part.require_alive()


def start_api(
    api: Address, count: int, state: Path, environ: Mapping[str, str], parts: list[Part]
) -> tuple[list[Address], str | None]:
    """Start the API, or several replicas and their gateway, and add them to `parts`.

    Args:
        api: address of the API or the gateway.
        count: number of replicas.
        state: folder for logs.
        environ: environment variables of all processes.
        parts: the running parts, extended.

    Returns:
        The replicas' addresses, and the address of the gateway's metrics if there is a gateway.
    """
    serve = [str(Path(sys.executable).parent / "specops"), "serve"]
    if count == 1:
        parts.append(Part("The API", serve, state / "api.log", environ))
        return [api], None
    *replicas, figures = free_addresses(count + 1)
    command = [sys.executable, str(ROOT / "deploy" / "gateway" / "run.py"), "--state", str(state)]
    command += ["--listen", api.listening, "--figures", figures.target]
    for replica in replicas:
        command += ["--replica", replica.target]
    # The gateway is first, so that it stops first: it waits for the replicas' last answers.
    parts.append(Part("The gateway", command, state / "gateway.log", environ))
    for number, replica in enumerate(replicas, start=1):
        own = {"SPECOPS_HOST": replica.host, "SPECOPS_PORT": str(replica.port)}
        log = state / f"api-{number}.log"
        parts.append(Part(f"Replica {number}", serve, log, {**environ, **own}))
    return replicas, figures.target


def run(state: Path, environ: Mapping[str, str]) -> int:
    """Start everything, wait for a stop signal, stop everything; return the exit status."""
    api = Address.read(environ, "SPECOPS_PORT", 8000, environ.get("SPECOPS_HOST") or LOCAL)
    prometheus = Address.read(environ, "PROMETHEUS_PORT", 9090, LOCAL)
    if (count := environ.get("REPLICAS") or "1") not in map(str, range(1, 65)):
        raise StartError(f"REPLICAS takes a number from 1 to 64, not {count!r}")
    api.require_free()
    if binary := shutil.which("prometheus"):
        prometheus.require_free()
    if (environ.get("SPECOPS_MODEL") or CHAT) == CHAT and not environ.get("SPECOPS_TARGET"):
        subprocess.run([sys.executable, ROOT / "scripts" / "chat_model.py"], check=True)  # noqa: S603

    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())

    state.mkdir(parents=True, exist_ok=True)
    pid_file = state / "native.pid"
    pid_file.write_text(str(os.getpid()), "utf-8")
    parts: list[Part] = []
    try:
        replicas, gateway = start_api(api, int(count), state, environ, parts)
        if binary:
            config = state / "prometheus.yml"
            key = state / "metrics-key"
            key.touch(0o600)
            key.write_text(environ.get("SPECOPS_METRICS_KEY", ""), "utf-8")
            config.write_text(
                prometheus_config([one.target for one in replicas], gateway, key), "utf-8"
            )
            command = [binary, f"--config.file={config}", "--enable-feature=exemplar-storage"]
            command += [f"--storage.tsdb.path={state / 'prometheus'}"]
            command += ["--storage.tsdb.retention.time=15d"]
            command += [f"--web.listen-address={prometheus.target}"]
            parts.append(Part("Prometheus", command, state / "prometheus.log", os.environ))
        for one in dict.fromkeys([*replicas, api]):
            wait_ready(f"{one.url}/health", parts, stopped)
        if binary:  # Prometheus opens its port before it has read its data
            wait_ready(f"{prometheus.url}/-/ready", parts, stopped)
        if not stopped.is_set():
            several = [one.target for one in replicas] if replicas != [api] else []
            pages, grafana = {"Prometheus": PROMETHEUS_HELP}, GRAFANA_HELP
            if binary:
                url = in_browser(prometheus, environ)
                pages = {"Prometheus": url, "its alerts": url + alerts_page(prometheus.url)}
                grafana += GRAFANA_OF_YOURS.format(url=prometheus.url)
            show_urls(in_browser(api, environ), several, pages, grafana, state)
            supervise(parts, stopped)
    finally:
        patience = float(environ.get("SPECOPS_DRAIN_TIMEOUT") or 25) + 10
        for part in parts:
            part.stop(patience)
        pid_file.unlink(missing_ok=True)
    print("Stopped.", flush=True)
    return 0


def main() -> int:
    """Run the command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(os.environ.get("NATIVE_STATE") or ROOT / "var")
    parser.add_argument("--state", type=Path, default=default, help="logs and Prometheus' data")
    parser.add_argument("--print-load", action="store_true", help="print `make load`'s variables")
    arguments = parser.parse_args()
    try:
        environ = environment(ROOT / ".env", os.environ)
        if arguments.print_load:
            host = environ.get("SPECOPS_HOST") or LOCAL
            found = {n: text for n, text in environ.items() if text and n.startswith(LOAD)}
            found.setdefault("LOAD_API_KEY", environ.get("SPECOPS_API_KEYS", ""))
            if "TARGET_URL" not in found:
                found["TARGET_URL"] = Address.read(environ, "SPECOPS_PORT", 8000, host).url
            print("export", *(f"{name}={shlex.quote(text)}" for name, text in found.items()))
            return 0
        return run(arguments.state.resolve(), environ)
    except StartError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
