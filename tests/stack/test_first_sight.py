"""What a person sees first, on the model that this person gets: every GET endpoint and every page.

On the default model, as `make up` starts it, and on a preset of each other kind.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from specops.config import Settings
from specops.http.app import create_app
from tests.kinds import KINDS, running
from tests.stack.console import ask, console, finish, opened, option, say, until
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


def test_the_console_answers_and_nothing_in_it_is_empty(browser: Any, served: str) -> None:
    with opened(browser, served) as (page, asked):
        page.wait_for_selector("#state.ready")
        real = "smollm2" in page.locator("#model").inner_text()
        # The likeliest answer, which is right; or a short one of random weights, which end none.
        option(page, "Temperature" if real else "Longest answer", "0" if real else "60")
        say(page, "What is the capital of France?")
        finish(page)
        answer = page.locator("#turns li.assistant .content")
        assert "Paris" in answer.inner_text() if real else answer.locator("span").count()
        until(page, "Number(document.getElementById('now-jump').textContent) >= 1")
        for chart in ("speed", "jump", "queue", "memory"):
            assert page.locator(f"#chart-{chart} path").first.get_attribute("d")
        ask(page, 60)
        finish(page)
        assert page.locator("#answer span").count()
        figures = page.locator("dd:visible, figcaption output").all_inner_texts()
        assert [text for text in figures if not re.search(r"\d|\w{2}", text)] == []
    assert {path for path, _ in asked} == {
        *("/", "/console/figures", "/generate", "/v1/chat/completions")
    }


def test_the_description_is_whole_and_its_examples_can_be_sent(browser: Any, served: str) -> None:
    described = httpx.get(f"{served}/openapi.json", timeout=PATIENCE).json()["paths"]
    with opened(browser, f"{served}/docs") as (page, asked):
        blocks, count = page.locator(".opblock"), sum(map(len, described.values()))
        blocks.nth(count - 1).wait_for()
        assert blocks.count() == count
        for path in ("/generate", "/v1/models"):
            block = page.locator(".opblock", has=page.locator(f"[data-path='{path}']"))
            block.locator("button").first.click()
            block.get_by_role("button", name="Try it out").click()
            block.get_by_role("button", name="Execute").click()
            block.locator(".live-responses-table .response-col_status", has_text="200").wait_for()
    assert {path for path, _ in asked} == {
        *("/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json"),
        *("/generate", "/v1/models"),
    }


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
