"""Records the service idle, loaded, overloaded and dead, and draws every dashboard in each state.

    python grafana/draw/states.py [--minutes 5] [--output FOLDER] [--again] [DASHBOARD...]

Runs the service (the demo pair, or SPECOPS_MODEL) with a Prometheus of its own on free ports:
nothing asks it, Locust loads it, Locust asks for far more than it can do, and in the middle of a
load its process is killed. Each state takes `--minutes`; the pictures in docs/ are those of `load
and overload` together. FOLDER keeps what Prometheus recorded: `--again` draws it anew, with the
dashboards as they are now. Faults and exit status as draw.py's.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file

import draw
from scripts import native
from scripts.browser import BrowserError

ROOT = draw.ROOT
LOCUST = ("-f", "loadtest/locustfile.py", "--headless", "--only-summary", "--stop-timeout", "5")
Times = dict[str, tuple[float, float]]  # state → Unix times of its picture
SOON = 15  # seconds after which a dead service must be seen on every page
UNTIL_RESTED = 30  # seconds between states: more than the window of a rate


@contextmanager
def ended(part: native.Part) -> Iterator[native.Part]:
    """The part of the stack, which is stopped at the end."""
    try:
        yield part
    finally:
        part.stop(30)


@contextmanager
def recorded(folder: Path, api: native.Address | None) -> Iterator[str]:
    """A Prometheus on the data in this folder, which scrapes the API, if any; yields its URL."""
    binary = shutil.which("prometheus")
    if binary is None:
        raise draw.DrawError(f"Prometheus is {native.PROMETHEUS_HELP}")
    (address,) = native.free_addresses(1)
    config = folder / "prometheus.yml"
    key = folder / "metrics-key"
    key.write_text("", encoding="utf-8")  # /metrics is open
    text = native.prometheus_config([api.target], None, key) if api else "{}\n"
    config.write_text(text, encoding="utf-8")
    command = [binary, f"--config.file={config}", "--enable-feature=exemplar-storage"]
    command += [f"--storage.tsdb.path={folder / 'data'}"]
    command += ["--storage.tsdb.retention.time=10y", f"--web.listen-address={address.target}"]
    log = folder / "prometheus.log"
    with ended(native.Part("Prometheus", command, log, os.environ)) as part:
        native.wait_ready(f"{address.url}/-/ready", [part], threading.Event())
        yield address.url


def load(api: native.Address, folder: Path, *options: str) -> native.Part:
    """Start Locust on the API; it ends by itself."""
    command = [sys.executable, "-m", "locust", *LOCUST, "--host", api.url, *options]
    return native.Part("Locust", command, folder / "locust.log", os.environ)


def record(folder: Path, minutes: float, arrivals: float) -> Times:
    """Run the service through the four states; returns when each of them was."""
    seconds = minutes * 60
    times: Times = {}
    (api,) = native.free_addresses(1)
    environ = {"SPECOPS_MODEL": "demo", **os.environ}
    environ |= {"SPECOPS_HOST": api.host, "SPECOPS_PORT": str(api.port)}
    serve = [str(Path(sys.executable).parent / "specops"), "serve"]

    def state(name: str, lasts: float, back: float = seconds) -> None:
        print(f"{name}: {lasts:.0f} s", flush=True)
        time.sleep(lasts)
        times[name] = (time.time() - back, time.time())

    steady = ("--users", "4", "--spawn-rate", "4", "--run-time", f"{seconds:.0f}s")
    too_much = ("--request-rate", f"{arrivals:g}", "--run-time", f"{seconds:.0f}s")
    with recorded(folder, api), ended(native.Part("API", serve, folder / "api.log", environ)) as it:
        native.wait_ready(f"{api.url}/health", [it], threading.Event())
        state("idle", seconds)
        with ended(load(api, folder, *steady)):
            state("load", seconds)
        with ended(load(api, folder, *too_much)):
            state("overload", seconds)
        times["load and overload"] = (times["load"][0] - UNTIL_RESTED, times["overload"][1])
        time.sleep(UNTIL_RESTED)
        with ended(load(api, folder, *steady)):
            time.sleep(seconds / 2)
            it.process.kill()
            state("dead for 15 s", SOON)
            state("outage", seconds / 2)
    return times


def kept(folder: Path, make: Callable[[], Times]) -> Times:
    """The times of the states: those that the folder keeps, or of a new record."""
    path = folder / "states.json"
    if not path.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        path.write_text(json.dumps(make(), indent=1), encoding="utf-8")
    return {
        name: (start, end)
        for name, (start, end) in json.loads(path.read_text(encoding="utf-8")).items()
    }


def main() -> int:
    """Command line; see the module's docstring."""
    known = sorted(path.stem for path in draw.DASHBOARDS.glob("*.json"))
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dashboards", nargs="*", metavar="DASHBOARD", help=f"of {', '.join(known)}")
    parser.add_argument("--minutes", type=float, default=5, help="for each state, and in a picture")
    parser.add_argument("--arrivals", type=float, default=120, help="overload: requests a second")
    parser.add_argument("--output", type=Path, default=Path("pictures"), metavar="FOLDER")
    parser.add_argument("--again", action="store_true", help="draw what FOLDER has recorded")
    options = parser.parse_args()
    folder = options.output.resolve() / "recorded"
    try:
        draw.bundled()
        if not options.again:
            (folder / "states.json").unlink(missing_ok=True)
        times = kept(folder, lambda: record(folder, options.minutes, options.arrivals))
        wrong = []
        with recorded(folder, None) as prometheus:
            for name, span in times.items():
                where = options.output / name.replace(" ", "-")
                names = options.dashboards or known
                wrong += [f"{name}: {it}" for it in draw.draw_all(names, prometheus, span, where)]
    except (draw.DrawError, native.StartError, BrowserError) as error:
        wrong = [str(error)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
