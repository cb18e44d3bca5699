"""Clients of the application with a real engine, in this process."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
from openai import AsyncOpenAI

from specops.config import Settings
from specops.engine.engine import Engine
from specops.engine.model_info import ModelState, Report
from specops.http.app import create_app
from specops.serving.async_engine import AsyncEngine
from tests.http.chat_clients import Official
from tests.serving.service import serving, share


@asynccontextmanager
async def in_process(
    settings: Settings, load: Callable[[Settings, Report], Engine] = share
) -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    """Serve a model; yield the service, and a client of its application."""
    async with serving(settings, load) as (service, metrics):
        assert service.state is ModelState.READY, service.error
        app = create_app(settings, service, metrics)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=600
        ) as http:
            yield service, http
        app.state.specops.executors.shut_down()


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[AsyncOpenAI]:
    """Serve a model; yield OpenAI's client."""
    async with in_process(settings) as (_, http):
        yield Official.of(http).openai
