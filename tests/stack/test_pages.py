"""Pages of a service that asks for a key, in a real browser: without one, and with a wrong one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.kinds import running
from tests.stack.console import opened, until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A service of the default model that asks for a key."""
    with running(tmp_path_factory.mktemp("guarded"), SPECOPS_API_KEYS="secret") as url:
        yield url


def test_an_example_is_sent_with_the_key(browser: Any, guarded: str) -> None:
    with opened(browser, f"{guarded}/docs") as (page, asked):
        page.get_by_role("button", name="Authorize").first.click()
        page.locator(".auth-container input").fill("secret")
        page.locator(".auth-btn-wrapper").get_by_role("button", name="Apply").click()
        page.get_by_role("button", name="Close").click()
        page.locator("#operations-openai-models_v1_models_get button").first.click()
        page.get_by_role("button", name="Try it out").click()
        page.get_by_role("button", name="Execute").click()
        until(page, lambda: ("/v1/models", 200) in asked)


def test_a_console_without_its_key_asks_once_and_goes_on_when_it_has_one(
    browser: Any, guarded: str
) -> None:
    with opened(browser, guarded, refused=True) as (page, asked):
        page.clock.install()  # time passes below
        page.reload()

        def refused() -> int:
            return asked.count(("/console/figures", 401))

        page.wait_for_selector("#state.failed")
        assert "needs a key" in page.locator("#state").inner_text()
        before = refused()
        page.clock.run_for(600_000)
        assert refused() == before
        page.get_by_text("Options").click()
        page.get_by_label("API key").fill("wrong")
        page.get_by_label("API key").blur()
        until(page, lambda: refused() == before + 1)
        page.clock.run_for(600_000)
        until(page, lambda: "does not know this key" in page.locator("#state").inner_text())
        page.get_by_label("API key").fill("secret")
        page.get_by_label("API key").blur()
        page.wait_for_selector("#state.ready")
        assert refused() == before + 1
