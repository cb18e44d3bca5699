"""What a new user does on each page, natively and in containers: the console, /docs, Locust's page.

An error on a page, an answer with the status of an error or an empty place fails the test.
"""

import json
import re
from typing import Any

import httpx

from tests.stack.console import ask, converse, finish, opened, option, until
from tests.stack.test_load_page import stats
from tests.waiting import PATIENCE, wait

USERS = 3
SHAPE = "spike"  # with which Locust's page was started


def use_console(browser: Any, api: str) -> None:
    """Ask the console in a chat and for a completion."""
    with opened(browser, api) as (page, asked):
        page.wait_for_selector("#state.ready")
        real = "smollm2" in page.locator("#model").inner_text()
        # The likeliest answer, which is right; or a short one of random weights, which end none.
        option(page, "Temperature" if real else "Longest answer", "0" if real else "60")
        converse(page, "What is the capital of France?")
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


def use_description(browser: Any, api: str) -> None:
    """Look at every endpoint of /docs, and send the examples of two."""
    described = httpx.get(f"{api}/openapi.json", timeout=PATIENCE).json()["paths"]
    with opened(browser, f"{api}/docs") as (page, asked):
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


def served_requests(api: str) -> float:
    """Requests of load tests, by the API's own counter."""
    text = httpx.get(f"{api}/metrics", timeout=PATIENCE).text
    found = re.findall(r"^specops_load_test_requests_total\{.*\} (\S+)$", text, flags=re.MULTILINE)
    return sum(map(float, found))


# By script, found and pressed at once: the figures beside the button push it from its place, and
# each new one draws it anew. There is none once the test stops.
_PRESS_STOP = """() => [...document.querySelectorAll("button")]
    .filter((button) => button.innerText.toLowerCase() === "stop")
    .forEach((button) => button.click())"""


def run_load_test(browser: Any, address: str, api: str) -> None:
    """Run a load test on Locust's page, from the form to the report."""
    with opened(browser, address, viewport={"width": 1300, "height": 1000}) as (page, _):
        before = served_requests(api)
        if stats(address)["state"] == "stopped":  # the page shows the test before
            page.get_by_role("button", name="New").click()
        page.get_by_role("textbox", name="Number of users").fill(str(USERS))
        page.get_by_role("textbox", name="Ramp up").fill(str(USERS))
        page.get_by_role("button", name="Custom parameters").click()
        labels = filter(None, page.locator("form label").all_inner_texts())
        titles = [label.split(" (")[0] for label in labels]
        assert titles[3:6] == ["Load Shape", "Request Rate", "Max Concurrency"]
        shape = page.get_by_label("Load Shape (")
        assert shape.input_value() == SHAPE
        shape.select_option("users")
        page.get_by_label("Protocol (").select_option("chat")
        page.get_by_label("Length Scale (").fill("0.2")
        page.get_by_role("button", name="Start").click()

        page.get_by_role("tab", name="LLM times").click()
        cells = page.locator("tr", has_text="TPOT").locator("td")
        cells.nth(2).filter(has_text=re.compile("[1-9]")).wait_for()
        assert cells.nth(1).inner_text() == "ms"
        assert float(cells.nth(3).inner_text()) > 0
        page.get_by_role("tab", name="LLM rates").click()
        page.locator("tr", has_text="Goodput").wait_for()
        page.get_by_text("TTFT (ms)", exact=True).wait_for()  # the charts are below
        page.locator("#llm-charts .line").first.wait_for()
        page.get_by_role("tab", name="Prompts and drafts").click()
        told = page.locator("tr", has_text="all").locator("td")
        assert re.fullmatch(r"[\d.]+ %", told.nth(2).inner_text())
        assert float(told.nth(3).inner_text()) >= 1  # tokens a pass
        page.get_by_role("tab", name="Statistics").click()
        page.locator("#llm-charts .line").first.wait_for(state="detached")
        streams = page.locator("tr", has_text="/v1/chat/completions (stream)")
        assert int(streams.locator("td").nth(2).inner_text()) > 0
        assert float(streams.locator("td").nth(10).inner_text()) > 0  # bytes of a stream

        def stopped() -> bool:
            page.evaluate(_PRESS_STOP)
            return str(stats(address)["state"]) == "stopped"

        wait("it stops", stopped)
        assert stats(address)["errors"] == []
        counted = stats(address)["stats"][-1]["num_requests"]
        assert counted == served_requests(api) - before
        page.reload()
        total = page.locator("tr", has_text="Aggregated").locator("td")
        total.nth(2).filter(has_text=f"{counted}").wait_for()  # asked for once the page is shown
        assert int(total.nth(2).inner_text()) == counted
        assert total.nth(3).inner_text() == "0"
        page.get_by_role("tab", name="Download").click()
        with page.expect_popup() as popup:
            page.get_by_text("Download Report").click()
        for part in ("Charts", "LLM times", "Prompts and drafts", "Stages and knee", "Over time"):
            popup.value.get_by_role("heading", name=part, exact=True).wait_for()
        assert popup.value.locator("#llm .line").count() >= 3  # tokens per second, TTFT
        with popup.value.expect_download() as saved:
            popup.value.get_by_text("Download the Report").click()
        assert "TPOT: time per output token" in saved.value.path().read_text()
        with page.expect_download() as saved:
            page.get_by_text("LLM figures (JSON)").click()
        figures = json.loads(saved.value.path().read_text())
        assert figures["api"] == "chat"
        assert figures["whole"]["answered"] == counted
