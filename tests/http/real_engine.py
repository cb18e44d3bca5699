"""Clients of the application with a real engine, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from openai import AsyncOpenAI

from specops.config import Settings
from specops.http.app import create_app
from specops.metrics.metrics import Metrics
from specops.serving.async_engine import AsyncEngine, ModelState


@asynccontextmanager
async def in_process(settings: Settings) -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    """Serve a model; yield the service, and a client of its application."""
    metrics = Metrics()
    service = AsyncEngine(settings, metrics)
    app = create_app(settings, service, metrics)
    service.start()
    try:
        while service.state is not ModelState.READY:
            assert service.state is not ModelState.FAILED, service.error
            await asyncio.sleep(0.01)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://test", timeout=600
        ) as http:
            yield service, http
    finally:
        await service.stop()


@asynccontextmanager
async def served(settings: Settings) -> AsyncIterator[AsyncOpenAI]:
    """Serve a model; yield OpenAI's client."""
    async with in_process(settings) as (_, http):
        yield AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=http, max_retries=0
        )
