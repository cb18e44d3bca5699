"""Runs the API under uvicorn so that a SIGTERM loses no answer.

uvicorn alone closes its socket first: new clients would see refused connections, `/health` could
not report that the service is draining, and waiting requests would delay the end. Here the service
stops first, while the socket still answers: running requests finish, new ones get 503. Then uvicorn
ends. It also ends if the engine has crashed, after all clients got their errors, so that a restart
brings a sound process. A process that hangs cannot end itself: `watchdog` kills it. `connection`
limits slow clients.
"""

import asyncio
import gc
import logging
import os
import signal
import socket
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from specops.config import ConfigError, Settings, client_keys
from specops.http.server.connection import Connection, Limits
from specops.http.server.watchdog import watched
from specops.http.state import AppState
from specops.serving.async_engine import AsyncEngine
from specops.system.failures import Failures
from specops.system.resources import raise_open_files

# When the service has stopped, responses only have to leave the socket's buffer.
_FLUSH_SECONDS = 5
_TICKS = 10  # of uvicorn's main loop per second
# Connections to accept before the next look at the open ones. Accepted all at once, a flood of
# connections that are soon reset would be a crowd of open ones for a moment.
_ACCEPTED = 64
# An open connection takes 5 KiB, one with 64 KiB of a body 67 KiB (means of 600): 0.14 GB.
_MAX_CONNECTIONS = 2048
log = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Stops the service at the first signal, and itself after that or at the second signal.

    Args:
        config: uvicorn's configuration.
        service: stopped before the server ends.
        failures: counts errors of the event loop.
        backlog: connections that may wait to be accepted.
    """

    def __init__(
        self, config: uvicorn.Config, service: AsyncEngine, failures: Failures, backlog: int
    ) -> None:
        super().__init__(config)
        self.service = service
        self._failures = failures
        self._backlog = backlog
        self._loop: asyncio.AbstractEventLoop | None = None
        self._drain: asyncio.Task[None] | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve until a signal."""
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(self._on_exception)
        watch = asyncio.create_task(self._end_with_engine())
        try:
            await super().serve(sockets)
        finally:
            watch.cancel()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; uvicorn has one number for waiting connections and for those accepted at once."""
        await super().startup(sockets)
        for server in self.servers:
            for listener in server.sockets:
                with socket.socket(fileno=os.dup(listener.fileno())) as same:
                    same.listen(self._backlog)

    async def _end_with_engine(self) -> None:
        await self.service.crashed.wait()
        fields = {"reason": self.service.error}
        log.critical("ending: the engine has crashed", extra={"fields": fields})
        self.should_exit = True

    def _on_exception(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Count an exception that no callback or task has caught; called by the event loop."""
        error = context.get("exception") or RuntimeError(context["message"])
        self._failures.report("loop", error, context["message"])

    async def on_tick(self, counter: int) -> bool:
        """Check the connections once a second; uvicorn calls this ten times a second.

        An exception here would end the server.
        """
        with self._failures.report_errors("tick"):
            if counter % _TICKS == 0:
                self.check_deadlines()
            return await super().on_tick(counter)
        return self.should_exit

    def check_deadlines(self) -> None:
        """Close the connections of clients that were too slow."""
        for connection in list(self.server_state.connections):
            if isinstance(connection, Connection):
                connection.check_deadlines()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to drain; the signal handler calls this between any two instructions."""
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


def make_server(app: FastAPI, settings: Settings, limits: Limits | None = None) -> DrainingServer:
    """Build the server of an application made by `create_app`.

    Args:
        app: the application.
        settings: the settings.
        limits: a client's limits; by default, half of the file descriptors are for connections.
    """
    state: AppState = app.state.specops
    # The other half is for refused and waiting connections, and open files.
    limits = limits or Limits(raise_open_files(2 * _MAX_CONNECTIONS) // 2)
    metrics = state.metrics
    connection: Any = partial(Connection, limits, metrics.observe_closing, metrics.failures)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=connection,
        ws="none",
        log_config=None,
        access_log=False,  # the middleware writes a better one
        server_header=False,
        backlog=_ACCEPTED,
        timeout_keep_alive=limits.idle,
        timeout_graceful_shutdown=_FLUSH_SECONDS,
    )
    backlog = max(1, limits.connections // 2)
    return DrainingServer(config, state.service, metrics.failures, backlog)


def run(app: FastAPI, settings: Settings) -> int:
    """Serve the application until SIGTERM or SIGINT.

    Returns:
        The exit code: 1 if the model or the engine failed, otherwise 0.

    Raises:
        ConfigError: the server cannot listen at its address.
    """
    _check_address(settings)
    server = make_server(app, settings)
    if settings.api_keys:
        clients = dict.fromkeys(name for name, _ in client_keys(settings.api_keys))
        log.info("only clients with a key are served", extra={"fields": {"clients": [*clients]}})
    if settings.prefix_cache == "all" or not (settings.api_keys or settings.prefix_cache == "off"):
        log.warning(
            "all clients count as one: they share the prefix cache, and response times can reveal "
            "to a client what others asked. SPECOPS_API_KEYS tells them apart, unless "
            "SPECOPS_PREFIX_CACHE is all"
        )
    gc.collect()
    gc.freeze()  # otherwise each full collection visits all libraries: a pause of 30 ms
    with watched(settings.host, settings.port, settings.request_timeout):
        server.run()
    return 1 if server.service.error else 0


def _check_address(settings: Settings) -> None:
    """Refuse an address that the server cannot listen on, before it loads a model."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {settings.host}, port {settings.port}: {error.strerror}. "
            "Choose another address with SPECOPS_HOST and SPECOPS_PORT, or --host and --port"
        ) from error
