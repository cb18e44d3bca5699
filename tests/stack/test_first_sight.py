"""What a person sees first, on the model that this person gets: every GET endpoint and every page.

On the default model, as `make up` starts it, and on a preset of each other kind.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from specops.config import Settings
from specops.http.app import create_app
from tests.kinds import KINDS, running
from tests.stack import first_sight
from tests.stack.console import ask, console, finish
from tests.stack.test_load_page import load_page
from tests.waiting import PATIENCE

pytestmark = pytest.mark.e2e

MAKE = ("make", "load", f"SHAPE={first_sight.SHAPE}", "ARGS=--web")


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


def test_the_console_answers_and_nothing_in_it_is_empty(browser: Any, served: str) -> None:
    first_sight.use_console(browser, served)


@pytest.mark.parametrize("served", ["default model"], indirect=True)  # it is the same for all kinds
def test_the_description_is_whole_and_its_examples_can_be_sent(browser: Any, served: str) -> None:
    first_sight.use_description(browser, served)


def test_a_load_test_on_locusts_page_goes_to_its_report(
    browser: Any, served: str, tmp_path: Path
) -> None:
    with load_page(served, tmp_path / "log", *MAKE) as page:
        first_sight.run_load_test(browser, page, served)


@pytest.mark.parametrize("served", ["draft model"], indirect=True)
def test_every_drafter_has_a_look_of_its_own(browser: Any, served: str) -> None:
    def draft_always(route: Any) -> None:
        """Send the request on to the service, which may not decide that drafting does not pay."""
        body = {**route.request.post_data_json, "adaptive": False}
        route.continue_(post_data=json.dumps(body))

    with console(browser, served) as page:
        page.route("**/generate", draft_always)
        page.get_by_text("Options").click()
        looks = set()
        for drafter in ("suffix", "draft"):
            page.get_by_label("Drafter").select_option(drafter)
            page.get_by_label("Most draft tokens per step").fill("4")
            ask(page, 120)
            finish(page)
            assert f"drafted by {drafter}" in page.locator("#legend").inner_text()
            answer, legend = page.evaluate(
                """(selectors) => selectors.map((selector) => {
                    const look = getComputedStyle(document.querySelector(selector));
                    return [look.color, look.textDecorationStyle];
                })""",
                [f"#answer span[title='drafted by {drafter}']", "#legend [class]"],
            )
            assert answer == legend
            looks.add(tuple(answer))
        colours, underlines = zip(*looks, strict=True)
        assert len(set(colours)) == len(set(underlines)) == 2
