"""What a person sees first, on the model that this person gets: every GET endpoint and every page.

On the default model, as `make up` starts it, and on a preset of each other kind.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from specops.config import Settings
from specops.http.app import create_app
from tests.kinds import KINDS, running
from tests.waiting import PATIENCE

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=KINDS)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The address of a running service."""
    with running(tmp_path_factory.mktemp("kind"), request.param) as url:
        yield url


def read(answer: httpx.Response) -> object:
    """What an answer says, by its type; of a stream without end the first event."""
    kind = answer.headers["content-type"].partition(";")[0]
    if kind == "text/event-stream":
        return json.loads(next(answer.iter_lines()).removeprefix("data: "))
    answer.read()
    if kind == "application/json":
        return answer.json()
    if answer.url.path == "/metrics":
        return list(text_string_to_metric_families(answer.text))
    return answer.text


@pytest.mark.parametrize("accept", ["*/*", "application/json", "text/html"])
def test_every_get_endpoint_answers(served: str, accept: str) -> None:
    with httpx.Client(base_url=served, timeout=PATIENCE, headers={"accept": accept}) as client:
        model = client.get("/v1/models").json()["data"][0]["id"]
        routes = [route for route in create_app(Settings()).routes if isinstance(route, Route)]
        paths = {route.path for route in routes if "GET" in (route.methods or ())}
        assert {"/console/figures", "/docs", "/v1/models/{model:path}"} < paths
        for path in paths:
            with client.stream("GET", path.replace("{model:path}", model)) as answer:
                assert (path, answer.status_code) == (path, 200)
                assert read(answer), path
