"""Clients of our service that send at the same moment, each on a connection of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

from bench.serving.server import Client, ServerError, events

_LIKELIEST = 5  # the most that the API tells


class HttpSide:
    """Our service as `most` clients see it. A context manager: closes its connections.

    Plain decoding: speculation is measured elsewhere, and a random model repeats itself more than
    any real one.
    """

    def __init__(self, pid: int, client: Client, most: int) -> None:
        self.pid = pid
        self._clients = [Client(client.port) for _ in range(most)]
        self._threads = ThreadPoolExecutor(most)

    def __enter__(self) -> HttpSide:
        self._model = json.loads(self._clients[0].get("/v1/models"))["data"][0]["id"]
        self._clients[0].close()
        return self

    def __exit__(self, *exception: object) -> None:
        for client in self._clients:
            client.close()
        self._threads.shutdown()

    def complete(self, prompts: Sequence[Sequence[int]], output: int) -> tuple[float, list[Any]]:
        """Send all prompts at once, for `output` tokens each.

        Returns seconds from the first sending to the last answer's end, and how the tokens that are
        likeliest to come first in each answer are spelled; none where `output` is more than one:
        probabilities take time.
        """
        if len(prompts) > len(self._clients):
            raise ValueError(f"{len(prompts)} prompts for {len(self._clients)} clients")
        for client in self._clients[: len(prompts)]:
            client.connect()
        start = time.perf_counter()
        firsts = list(self._threads.map(self._ask, self._clients, prompts, repeat(output)))
        return time.perf_counter() - start, firsts

    def _ask(self, client: Client, prompt: Sequence[int], output: int) -> list[str]:
        body = {"model": self._model, "prompt": prompt, "max_tokens": output, "temperature": 0}
        body |= {"ignore_eos": True, "drafter": "none", "stream": True}
        body |= {"stream_options": {"include_usage": True}}
        body |= {"logprobs": _LIKELIEST if output == 1 else None}
        response = client.post("/v1/completions", body)
        first, *_, last = events(response)
        client.close()
        if (got := last["usage"]["completion_tokens"]) != output:
            raise ServerError(f"{got} tokens came, not {output}")
        told = first["choices"][0]["logprobs"]
        return list(told["top_logprobs"][0]) if told else []
