"""Clients of our service that send at the same moment, each on a connection of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.server import Client, ServerError

_HOST = "127.0.0.1"
_PATIENCE = 300.0  # seconds
_HEADERS = {"Content-Type": "application/json"}
_EVENT = b"data: "
_DONE = b"[DONE]"
_LIKELIEST = 5  # the most that the API tells


class HttpSide:
    """Our service as its clients see it. A context manager: closes its connections.

    Plain decoding: speculation is measured elsewhere, and a random model repeats itself more than
    any real one.

    Args:
        pid: of the server.
        client: of the server.
        most: clients at once.
    """

    def __init__(self, pid: int, client: Client, most: int) -> None:
        self.pid = pid
        self._port = client.port
        self._connections = [
            http.client.HTTPConnection(_HOST, client.port, timeout=_PATIENCE) for _ in range(most)
        ]
        self._threads = ThreadPoolExecutor(most)

    def __enter__(self) -> HttpSide:
        self._model = json.loads(self._get("/v1/models"))["data"][0]["id"]
        return self

    def __exit__(self, *exception: object) -> None:
        for connection in self._connections:
            connection.close()
        self._threads.shutdown()

    def _get(self, path: str) -> bytes:
        with contextlib.closing(self._connections[0]) as connection:
            connection.request("GET", path)
            return connection.getresponse().read()

    def complete(self, prompts: Sequence[Sequence[int]], output: int) -> tuple[float, list[Any]]:
        """Send all prompts at once.

        Args:
            prompts: token ids of each.
            output: tokens that each is to get.

        Returns:
            Seconds from the first sending to the last answer's end, and how the tokens that are
            likeliest to come first in each answer are spelled; none where `output` is more than
            one: probabilities take time.

        Raises:
            ServerError: the server refused one, or ended it early.
            ValueError: there are more prompts than clients.
        """
        if len(prompts) > len(self._connections):
            raise ValueError(f"{len(prompts)} prompts for {len(self._connections)} clients")
        for connection in self._connections[: len(prompts)]:
            connection.connect()
        ready = threading.Barrier(len(prompts) + 1)
        answers = [
            self._threads.submit(self._ask, connection, self._body(prompt, output), output, ready)
            for connection, prompt in zip(self._connections, prompts, strict=False)
        ]
        ready.wait(_PATIENCE)
        start = time.perf_counter()
        firsts = [answer.result() for answer in answers]
        return time.perf_counter() - start, firsts

    def _body(self, prompt: Sequence[int], output: int) -> bytes:
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "drafter": "none",
            "stream": True,
            "stream_options": {"include_usage": True},
            "logprobs": _LIKELIEST if output == 1 else None,
        }
        return json.dumps(body).encode()

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        body: bytes,
        output: int,
        ready: threading.Barrier,
    ) -> list[str]:
        ready.wait(_PATIENCE)
        connection.request("POST", "/v1/completions", body, _HEADERS)
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise ServerError(f"HTTP {response.status}: {response.read().decode()}")
        events = [
            line.removeprefix(_EVENT).strip()
            for line in iter(response.readline, b"")
            if line.startswith(_EVENT)
        ]
        connection.close()
        if len(events) < 3 or events[-1] != _DONE:
            raise ServerError(f"the stream ended early: {events[-1:]}")
        if (got := json.loads(events[-2])["usage"]["completion_tokens"]) != output:
            raise ServerError(f"{got} tokens came, not {output}")
        told = json.loads(events[0])["choices"][0]["logprobs"]
        return list(told["top_logprobs"][0]) if told else []
