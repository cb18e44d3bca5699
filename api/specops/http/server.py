"""Runs the API under uvicorn so that a SIGTERM loses no answer.

uvicorn alone closes its socket first: new clients would see refused connections, `/health` could
not say that the service drains, and requests that wait in the queue would hold up the end. Here
the service is stopped first, while the socket still answers: running requests finish, new ones
get 503. Then uvicorn ends. It also ends where the engine has crashed, once all clients have been
told: a restart then brings a sound one.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
from types import FrameType

import uvicorn
from fastapi import FastAPI

from specops.config import Settings
from specops.http.state import AppState
from specops.serving.async_engine import AsyncEngine

# After the service has stopped, responses only have to leave the socket's buffer.
_FLUSH_SECONDS = 5
# Longer than the minute after which load balancers drop idle connections: they go first.
_KEEP_ALIVE_SECONDS = 75
log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Stops the service at the first signal, itself at the second or when that is done."""

    def __init__(self, config: uvicorn.Config, service: AsyncEngine) -> None:
        super().__init__(config)
        self.service = service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        self._loop = asyncio.get_running_loop()
        watch = asyncio.create_task(self._end_with_engine())
        try:
            await super().serve(sockets)
        finally:
            watch.cancel()

    async def _end_with_engine(self) -> None:
        await self.service.crashed.wait()
        fields = {"reason": self.service.error}
        log.critical("ending: the engine has crashed", extra={"fields": fields})
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; called by the signal handler, between any two instructions."""
        if self._loop is None or not self.started:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._on_signal, sig)

    def _on_signal(self, sig: int) -> None:
        if self._drain is None:
            log.info("draining", extra={"fields": {"signal": signal.Signals(sig).name}})
            self._drain = asyncio.create_task(self._stop_service())
        else:
            self.should_exit = True
            self.force_exit = True

    async def _stop_service(self) -> None:
        try:
            await self.service.stop()
        finally:
            self.should_exit = True


def make_server(app: FastAPI, settings: Settings) -> DrainingServer:
    """Build the server of an application made by `create_app`."""
    state: AppState = app.state.specops
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,  # the middleware's lines say more
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
    return DrainingServer(config, state.service)


def run(app: FastAPI, settings: Settings) -> int:
    """Serve the application until SIGTERM or SIGINT.

    Returns:
        The exit code: 1 where the model or the engine had failed, otherwise 0.
    """
    server = make_server(app, settings)
    gc.collect()
    gc.freeze()  # or each full collection looks through all libraries: 30 ms without a token
    server.run()
    return 1 if server.service.error else 0
