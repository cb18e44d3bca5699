"""`make clients`: real clients against `specops serve` with the chat model.

Installs what `python.txt`, `page.txt` and `npm/package-lock.json` pin, below build/clients, and
prints a table of all clients and features. The exit status is 1 where a cell is not as `table.py`
has it. `--only NAME` tries the clients whose names have this in them.
"""

import argparse
import re
import sys
import time
from functools import partial
from pathlib import Path

import httpx

from scripts import chat_model
from specops import presets
from tests import browser
from tests.clients import environments, judge, webui
from tests.clients.drivers import LONG
from tests.clients.running import driver
from tests.clients.table import CLIENTS, PAGES, Client, features
from tests.loopback import HOST
from tests.overload import serving
from tests.waiting import wait

# The context is small, so that a prompt that is too long for it is read soon.
SETTINGS = {"SPECOPS_MODEL": "smollm2", "SPECOPS_CONTEXT": "2048"}
COUNTERS = ('requests_total{outcome="cancelled"}', "generated_tokens_total")
GREEN, RED, WRONG = "yes", "no", "WRONG"


def figure(address: str, series: str) -> float:
    """Read one of the service's metrics."""
    page = httpx.get(f"{address}/metrics").text
    (value,) = re.findall(rf"^specops_{re.escape(series)} (\S+)$", page, re.M)
    return float(value)


def library(client: Client, address: str, log: Path) -> dict[str, str | None]:
    """Try a library; return what is wrong, by the feature."""
    found: dict[str, str | None] = {}
    with driver(client, address, log) as asked:
        for feature in features(client):
            lack = client.lacks.get(feature)
            if lack is not None and not lack.error:
                continue
            before = [figure(address, name) for name in COUNTERS]
            found[feature] = judge.problem(client, feature, asked.ask(feature))
            wait("the server is idle", lambda: figure(address, "requests_running") == 0)
            after = [figure(address, name) for name in COUNTERS]
            cancelled, tokens = (now - then for now, then in zip(after, before, strict=True))
            stopped = cancelled and tokens < LONG
            if feature == "cancel" and found[feature] is None and not stopped:
                found[feature] = f"the server went on: {tokens:.0f} tokens"
    return found


def table(outcomes: dict[Client, dict[str, str | None]]) -> list[str]:
    """Return the lines of a table of clients that have the same features."""
    if not outcomes:
        return []
    columns = features(next(iter(outcomes)))
    lines = [["client", *columns]]
    for client, problems in outcomes.items():
        cells = [
            WRONG if problems.get(name) else RED if name in client.lacks else GREEN
            for name in columns
        ]
        lines.append([f"{client.name}, {client.kind}", *cells])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def prepare(kinds: set[str]) -> None:
    """Install what is not there yet.

    Raises:
        MissingError, BrowserError: something that is not installed here is missing.
    """
    chat_model.main()
    if not chat_model.is_here(presets.chat_model()):
        raise environments.MissingError("There is no chat model to try the clients with")
    if "page" in kinds:
        browser.executable()
    for kind in sorted(kinds):
        if kind == "npm":
            environments.npm()
        else:
            environments.python(kind)


def main() -> int:
    """Try all clients; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", metavar="NAME")
    only = parser.parse_args().only
    chosen = [client for client in (*CLIENTS, *PAGES) if only in client.name]
    if not chosen:
        parser.error(f"no client has {only!r} in its name")
    logs = environments.BUILD / "logs"
    served = environments.BUILD / "served"
    for folder in (logs, served):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        prepare({client.kind for client in chosen})
    except (environments.MissingError, browser.BrowserError) as error:
        print(error, file=sys.stderr)
        return 2
    outcomes: dict[Client, dict[str, str | None]] = {}
    with serving(served, **SETTINGS) as (port, _):
        address = f"http://{HOST}:{port}"
        for client in chosen:
            started = time.monotonic()
            log = logs / f"{client.kind}-{client.driver}-{client.protocol}.log"
            if client.kind == "page":
                read = partial(figure, address)
                outcomes[client] = webui.attempt(client, address, log, read)
            else:
                outcomes[client] = library(client, address, log)
            wrong = sum(map(bool, outcomes[client].values()))
            print(
                f"{client.name}, {client.kind}: {time.monotonic() - started:.1f} s, {wrong} wrong",
                flush=True,
            )
    for kinds in (("python", "npm"), ("page",)):
        lines = table({item: found for item, found in outcomes.items() if item.kind in kinds})
        print("", *lines, sep="\n")
    for client in outcomes:
        for feature, lack in client.lacks.items():
            print(f"no: {client.name}, {client.kind}, {feature}: {lack.why}")
    wrong = [
        f"WRONG: {client.name}, {client.kind}, {feature}: {said}"
        for client, found in outcomes.items()
        for feature, said in found.items()
        if said
    ]
    print(*(wrong or ["every cell is as tests/clients/table.py has it"]), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
