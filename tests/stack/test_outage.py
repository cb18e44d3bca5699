"""A real Prometheus looks at a real API, which is killed; the dashboards must say so.

One dead replica of three: `test_dashboards.py`, by the rules and queries alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from grafana.promql import GONE
from scripts import native
from tests.deploy.gateway.load import load
from tests.loopback import HOST, free_port
from tests.overload import serving
from tests.stack import queries
from tests.stack.support import prometheus_values, read_yaml, tool
from tests.waiting import answers, started, wait

pytestmark = pytest.mark.e2e

SAID_WITHIN = 15  # seconds after the death of an API
REFRESH = 5  # seconds between two looks of Grafana
SCRAPE, RULES = (
    int(read_yaml("prometheus/prometheus.yml")["global"][f"{what}_interval"].removesuffix("s"))
    for what in ("scrape", "evaluation")
)


class Query(Protocol):
    """Asks Prometheus for the values of an expression, now or at a time."""

    def __call__(self, promql: str, at: float | None = None) -> list[float]: ...


@contextmanager
def prometheus(ports: list[int], folder: Path) -> Iterator[Query]:
    """A Prometheus with the configuration and the rules of a native run."""
    if tool("prometheus") is None:
        pytest.skip("no Prometheus here")
    config, key, port = folder / "prometheus.yml", folder / "metrics-key", free_port()
    key.touch()
    config.write_text(native.prometheus_config([f"{HOST}:{one}" for one in ports], None, key))
    url = f"http://{HOST}:{port}"
    command = [
        *("prometheus", f"--config.file={config}", "--enable-feature=exemplar-storage"),
        *(f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={HOST}:{port}"),
    ]
    with started(command, folder / "prometheus.log", lambda: answers(f"{url}/-/ready")):
        yield partial(prometheus_values, url)


def url(port: int) -> str:
    return f"http://{HOST}:{port}"


def silent_panels(query: Query, at: float) -> set[str]:
    """The panels that show a figure, or that do not say that the API is unreachable."""
    wrong = set()
    for name, promql in queries.dashboard_queries():
        values = query(promql, at)
        panel, legend = name.split(" / ")[1].split(": ", maxsplit=1)
        if panel in queries.words():
            says = [1.0] if legend == "unreachable" else []
            right = values == says
        elif len(values) == 1:
            right = values == [GONE]
        else:
            right = not values
        if not right:
            wrong.add(f"{name}: {values}")
    for board in queries.boards().values():
        (mark,) = (m for m in board["annotations"]["list"] if m["name"] == "Unreachable")
        if not query(queries.filled(mark["target"]["expr"]), at):
            wrong.add(f"{board['title']}: no red mark")
    return wrong


def test_within_15_seconds_every_panel_says_that_a_killed_api_is_unreachable(
    tmp_path: Path,
) -> None:
    with (
        serving(tmp_path) as (port, process),
        prometheus([port], tmp_path) as query,
        load(url(port), 4),
    ):
        first = queries.by_panel("healthy", queries.LOADED)
        for title, asked in first.items():
            wait(f"{title} has data", lambda asked=asked: any(map(query, asked)), 90)
        assert query(first["State"][0]) == [1.0]
        process.kill()
        wait("a scrape fails", lambda: query("up") == [0.0])
        (failed,) = query("timestamp(up)")
        at = failed + RULES  # each rule is evaluated once until then
        wait("a scrape after that", lambda: query("timestamp(up)") > [at])
        assert silent_panels(query, at) == set()
    assert SCRAPE + RULES + REFRESH <= SAID_WITHIN
