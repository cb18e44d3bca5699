"""What a new user does on each page of the stack in containers: on its model, and on mounted ones.

tests/stack/test_first_sight.py has every kind of preset, without containers.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.e2e.stack import UP, Stack
from tests.kinds import KINDS, require_kind, require_no_error
from tests.stack import first_sight

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", params=["default model", "draft head"])
def served(
    request: pytest.FixtureRequest, started: Stack, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stack]:
    """The stack and Locust, on a folder of models as its user would mount one."""
    folder = tmp_path_factory.mktemp("models")
    made = KINDS[request.param][0](folder)
    own = {name: text.removeprefix(f"{folder}/") for name, text in made.items()}
    for path in (folder, *folder.rglob("*")):  # pytest and safetensors make them for one user
        path.chmod(0o755)
    env = {**started.env, "SPECOPS_MODEL": "", "LOAD_SHAPE": first_sight.SHAPE, **own}
    if own:
        env["SPECOPS_MODELS_DIR"] = str(folder)
    running = replace(started, env=env)
    running.compose(*UP, "api", "locust")
    require_kind(running.url("api"), request.param)
    yield running
    require_no_error(running.logged("api"))
    log = running.engine.docker("logs", *running.containers("locust"))
    assert "Traceback" not in log.stdout + log.stderr


default = pytest.mark.parametrize("served", ["default model"], indirect=True)


def test_the_console_answers_and_nothing_in_it_is_empty(browser: Any, served: Stack) -> None:
    first_sight.use_console(browser, served.url("api"))


@default
def test_the_description_is_whole_and_its_examples_can_be_sent(browser: Any, served: Stack) -> None:
    first_sight.use_description(browser, served.url("api"))


@default
def test_a_load_test_on_locusts_page_goes_to_its_report(browser: Any, served: Stack) -> None:
    first_sight.run_load_test(browser, served.url("locust"), served.url("api"))
