"""Ending on a signal: running requests get their answers, later ones get 503."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from specops.config import ConfigError, Settings
from specops.http.app import create_app
from specops.http.server.server import run
from specops.request import FinishReason
from specops.serving.async_engine import NotReady
from tests.fakes import FakeService, output
from tests.http.connections import Served, served
from tests.loopback import free_port
from tests.waiting import PATIENCE

pytestmark = pytest.mark.anyio


@pytest.fixture
async def running() -> AsyncIterator[Served]:
    """A server on the loopback interface, its service and a client."""
    async with served(service=FakeService()) as here:
        address = f"http://127.0.0.1:{here.port}"
        async with httpx.AsyncClient(base_url=address, timeout=PATIENCE) as here.client:
            yield here
        here.service.may_stop.set()


async def test_head_asks_for_the_headers_of_get(running: Served) -> None:
    paths = ("/", "/health", "/health/live", "/metrics", "/v1/models", "/models", "/props")
    for path in (*paths, "/api/tags", "/api/version"):
        got, head = await running.client.get(path), await running.client.head(path)
        assert (head.status_code, head.content) == (got.status_code, b"") == (200, b"")
        assert head.headers["content-type"] == got.headers["content-type"]
    assert (await running.client.head("/generate")).status_code == 405


async def test_signal_lets_the_running_finish_and_refuses_the_late(running: Served) -> None:
    service, client = running.service, running.client
    service.may_stop.clear()
    body = {"prompt": "a"}
    plain = asyncio.create_task(client.post("/generate", json=body))
    plain_ticket = await service.submitted.get()
    request = client.build_request("POST", "/generate", json=body | {"stream": True})
    opening = asyncio.create_task(client.send(request, stream=True))
    stream_ticket = (await service.submitted.get()).push(output("be"))
    lines = (await opening).aiter_lines()
    assert '"be"' in await anext(lines)

    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(service.stopping.wait(), PATIENCE)
    service.refusal = NotReady(service.state, "draining")
    health = await client.get("/health")
    assert (health.status_code, health.json()["state"]) == (503, "draining")
    assert (await client.get("/health/live")).status_code == 200
    assert (await client.post("/generate", json=body)).status_code == 503

    plain_ticket.push(output("all", finish=FinishReason.STOP))
    stream_ticket.push(output("gan", finish=FinishReason.STOP))
    service.may_stop.set()
    assert (await plain).json()["generated_text"] == "all"
    rest = [line async for line in lines if line]
    assert '"gan"' in rest[0]
    assert rest[-1] == "data: [DONE]"


async def test_server_ends_without_a_signals_exit_code(running: Served) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running.task, PATIENCE)  # uvicorn alone would raise the signal again
    assert running.service.calls == ["start", "stop", "stop"]


async def test_second_signal_does_not_wait_for_the_running(running: Served) -> None:
    running.service.may_stop.clear()
    body = {"prompt": "a"}
    hanging = asyncio.create_task(running.client.post("/generate", json=body))
    await running.service.submitted.get()
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(running.service.stopping.wait(), PATIENCE)
    assert not running.task.done()
    os.kill(os.getpid(), signal.SIGINT)
    await asyncio.wait_for(running.task, PATIENCE)
    assert not running.service.may_stop.is_set()
    hanging.cancel()


async def test_crash_of_the_engine_ends_the_process_after_all_clients_have_their_errors(
    running: Served,
) -> None:
    service = running.service
    asking = asyncio.create_task(running.client.post("/generate", json={"prompt": "a"}))
    handle = await service.submitted.get()
    service.error, service.alive = "the fuse blew", False
    handle.push(output(finish=FinishReason.ERROR))
    service.crashed.set()
    assert (await asking).status_code == 500
    await asyncio.wait_for(running.task, PATIENCE)


@pytest.mark.parametrize(
    ("error", "code", "keys", "shares", "warns"),
    [
        ("the fuse blew", 1, "", "client", True),
        (None, 0, "a-key", "client", False),
        (None, 0, "a-key", "all", True),
        (None, 0, "", "all", True),
        (None, 0, "", "off", False),
    ],
)
def test_exit_code_tells_a_crash_from_an_end(
    error: str | None, code: int, keys: str, shares: str, warns: bool, *, caplog: Any
) -> None:
    """And the log warns at the start where clients can learn from each other's times."""
    caplog.set_level(logging.INFO)

    class Ending(FakeService):
        def start(self) -> None:
            self.error = error
            if error is None:
                os.kill(os.getpid(), signal.SIGTERM)
            else:
                self.crashed.set()

    settings = Settings(port=free_port(), api_keys=keys, prefix_cache=shares)
    assert run(create_app(settings, Ending()), settings) == code  # type: ignore[arg-type]
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert ["all clients count as one" in record.message for record in warned] == [True] * warns


def test_an_address_that_is_taken_is_refused_before_the_model_is_loaded() -> None:
    service = FakeService()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = Settings(port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=rf"port {settings.port}: .*SPECOPS_PORT"):
            run(create_app(settings, service), settings)  # type: ignore[arg-type]
    assert not service.calls
