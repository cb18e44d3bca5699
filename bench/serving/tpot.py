"""Compares TPOT as the load test and guidellm measure it, by protocol, at the same load.

    python -m bench.serving.tpot --guidellm PATH [--host URL] [--users 2] [--requests 40]

Each way sends prompts of its own, made anew, of the same length and for answers of the same length,
all in turn for some rounds: what one way sent and got would make the next one faster. A first round
of each only warms up. Ends with status 1 if the medians of two ways' rounds differ by more than a
tenth. guidellm has another name for TPOT without the first token: `inter_token_latency`, a mean for
each request.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from loadtest.texts import lines

LOCUSTFILE = Path(__file__).parents[2] / "loadtest" / "locustfile.py"
LOCUST = Path(sys.executable).with_name("locust")
APIS = ("generate", "openai", "chat")
INPUT_TOKENS, OUTPUT_TOKENS = 100, 64
ALLOWED = 0.1


def by_locust(api: str, options: argparse.Namespace, dataset: Path, folder: Path) -> float:
    """Mean TPOT, in milliseconds, by this load test."""
    report = folder / "report.json"
    command: list[object] = [LOCUST, "-f", LOCUSTFILE, "--headless", "--only-summary"]
    command += ["--host", options.host, "--api", api, "--dataset", dataset, "--tags", "stream"]
    command += ["--users", options.users, "--spawn-rate", options.users, "--ignore-eos"]
    command += ["--num-prompts", options.requests, "--report", report]
    _run(command)
    return float(json.loads(report.read_text("utf-8"))["whole"]["tpot_mean"]) * 1000


def by_guidellm(options: argparse.Namespace, dataset: Path, folder: Path) -> float:
    """The same by guidellm's chats."""
    report = folder / "guidellm.json"
    command: list[object] = [options.guidellm, "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={options.host},http2=false"]
    command += ["--profile", f"kind=concurrent,streams={options.users}"]
    command += ["--constraint", f"kind=max_requests,count={options.requests}"]
    command += ["--data", f"kind=json_file,path={dataset}", "--output", f"kind=json,path={report}"]
    _run(command)
    (benchmark,) = json.loads(report.read_text("utf-8"))["benchmarks"]
    return float(benchmark["metrics"]["inter_token_latency_ms"]["successful"]["mean"])


def _run(command: Sequence[object]) -> None:
    words = list(map(str, command))
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{command[0]} ended with {done.returncode}:\n{done.stdout}{done.stderr}")


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--guidellm", type=Path, required=True, help="guidellm's program")
    parser.add_argument("--host", default="http://127.0.0.1:8000")
    for name, default in (("users", 2), ("requests", 40), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        dataset = folder / "prompts.jsonl"
        ways: dict[str, Callable[[], float]] = {
            api: lambda api=api: by_locust(api, options, dataset, folder)  # type: ignore[misc]
            for api in APIS
        }
        ways["guidellm, chat"] = lambda: by_guidellm(options, dataset, folder)
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(options.rounds + 1):
            for way, measure in ways.items():
                seed = os.urandom(8).hex()
                made = lines(options.requests, INPUT_TOKENS, OUTPUT_TOKENS, seed)
                dataset.write_text(made, "utf-8")
                milliseconds = measure()
                if turn:
                    found[way].append(milliseconds)
    middle = {way: median(values) for way, values in found.items()}
    for way, values in found.items():
        each = ", ".join(f"{value:.3f}" for value in values)
        print(f"{way:16} TPOT {middle[way]:.3f} ms ({each})")
    apart = max(middle.values()) / min(middle.values()) - 1
    print(f"they differ by {apart:.1%} (allowed: {ALLOWED:.0%})")
    return int(apart > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
