"""The API follows its own description: schemathesis sends requests that this allows, and others.

`SCHEMA_CASES` is the number of random requests per endpoint. `make check` sets it: it runs more of
them, and schemathesis' 6,000 systematic ones, which take half a minute.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.specs.openapi.checks import positive_data_acceptance

from specops.config import Settings
from specops.http.app import create_app
from specops.request import FinishReason
from tests.fakes import FakeService, fills_in, output
from tests.kinds import require_no_error
from tests.loopback import HOST
from tests.overload import serving

CASES = int(os.environ.get("SCHEMA_CASES", "10"))


class Lasting(FakeService):
    """Survives the end of the application, which comes with each case."""

    async def stop(self) -> None:
        self.calls.append("stop")


LAST = replace(output(" world", finish=FinishReason.STOP), embeddings=np.ones((1, 4), np.float32))
service = Lasting([output("Hel", "lo"), LAST])
service.loaded.tokenizer = fills_in()  # of another model /infill would be 501
schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(Settings(), service))  # type: ignore[arg-type]
schema.config.phases.coverage.enabled = "SCHEMA_CASES" in os.environ
real = schemathesis.openapi.from_dict(create_app(Settings()).openapi()).exclude(
    path="/infill"
)  # 501
real.config.phases.coverage.enabled = False


def follow(case: schemathesis.Case, model: str, base_url: str | None = None) -> None:
    """Send a request and check its answer by the description."""
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = model  # or else hardly any request would get further
    # Fields that are right each by itself can be wrong together, which no schema says.
    case.call_and_validate(base_url=base_url, excluded_checks=[positive_data_acceptance])


@schema.parametrize()
@settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
def test_every_answer_is_described_and_none_is_the_servers_fault(case: schemathesis.Case) -> None:
    follow(case, "fake")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The demo pair in a process of its own. An error in its log fails the test."""
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, SPECOPS_MAX_NEW_TOKENS="8") as (port, _):
        yield f"http://{HOST}:{port}"
    require_no_error(map(json.loads, (folder / "log").read_text().splitlines()))


@pytest.mark.e2e
@real.parametrize()
@settings(max_examples=CASES, suppress_health_check=list(HealthCheck))
def test_a_real_engines_answers_are_described_too(case: schemathesis.Case, served: str) -> None:
    follow(case, "demo", served)
