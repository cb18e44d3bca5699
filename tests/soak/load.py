"""The clients of a soak: some wait for a known answer, some leave, some send wrong requests.

Clients arrive at fixed moments (open loop), however busy the server is. The moments are the same
in each window, so that windows can be compared.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.serving.load import Answer, Ask, once

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
DRAFTERS = ("suffix", "draft", "cascade", "none")
PLAIN = {"drafter": "none", "stream": False}
HONEST = 0.7  # share of the clients that wait for their answer
PATIENCE = 1.0  # a request this many seconds before SIGTERM may not have reached the server

Visit = Callable[[], Awaitable[object]]
Choices = dict[int, tuple[str, tuple[float, ...], str]]  # choice: text, log-probabilities, end


def asks(prompts: list[str], number: int = 36) -> list[Ask]:
    """Requests of every kind with a certain answer; some begin alike, as follow-ups do."""
    return [_ask(index, prompts) for index in range(number)]


def _ask(index: int, prompts: list[str]) -> Ask:
    prompt = prompts[index]
    if index % 5 < 2:
        prompt = prompts[index % 2] + prompt
    body: dict[str, Any] = {"temperature": 0, "ignore_eos": index % 6 != 5}
    body |= {"stream": index % 2 == 1, "drafter": DRAFTERS[index % 4]}
    if index % 4 == 3:
        body |= {"temperature": 0.8, "seed": index, "top_p": 0.95}
    tokens = 16 + 8 * (index % 7)
    path = (COMPLETIONS, CHAT, GENERATE)[index % 3]
    if path == GENERATE:
        return Ask(path, body | {"prompt": prompt, "max_new_tokens": tokens})
    body |= {"model": "demo", "max_tokens": tokens, "n": 2 if index % 9 == 4 else 1}
    if index % 7 == 0:
        body |= {"stop": ["\n\n", "return"], "ignore_eos": False}
    if path == COMPLETIONS:
        return Ask(path, body | {"prompt": prompt} | ({"logprobs": 2} if index % 2 else {}))
    messages = [{"role": "user", "content": prompt}]
    return Ask(path, body | {"messages": messages, "logprobs": index % 2 == 0})


HALF_BODY = Ask(GENERATE, {"prompt": "def " * 30}).content()[:-100]
WRONG: tuple[tuple[Ask | bytes, int], ...] = (
    (Ask(GENERATE, b'{"prompt": '), 400),
    (Ask(GENERATE, {}), 422),
    (Ask(COMPLETIONS, {"model": "demo"}), 400),
    (Ask(COMPLETIONS, {"model": "demo", "prompt": "a", "max_tokens": "b"}), 400),
    (Ask(COMPLETIONS, {"model": 1, "prompt": "a"}), 400),
    (Ask(GENERATE, {"prompt": "word " * 20_000}), 400),
    (Ask(GENERATE, {"prompt": "a" * (1 << 20)}), 413),
    (Ask("/nothing"), 404),
    (b"GET / HTTP\x00\r\n\r\n", 400),
    (HALF_BODY, 408),
)
_SOON = 0.2  # seconds until the next server may listen


class _ComeAgain(Exception):  # noqa: N818 - an answer, not an error
    """429 or 503: the client comes again after so many seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds


@dataclass
class Load:
    """Clients of one server and of the next one at the same address.

    Attributes:
        port: where the servers listen.
        requests: the requests; `record` asks for their answers.
        arrivals: clients each second.
        ending: when the server was told to end; None before that.
        ready: when the next server was ready; None before that.
        seconds: times that honest clients waited for their answers; `watch` empties the list.
        ended: number of clients by how their visit ended.
        problems: what went wrong.
    """

    port: int
    requests: Sequence[Ask]
    arrivals: float
    ending: float | None = None
    ready: float | None = None
    seconds: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    _expected: list[Choices] = field(default_factory=list)
    _here: set[asyncio.Task[None]] = field(default_factory=set)

    async def record(self) -> None:
        """Get each answer alone and by plain decoding; later answers must equal these."""
        for ask in self.requests:
            self._expected.append(await self._answer(with_fields(ask, PLAIN)))

    async def play(self, seconds: float, times: float = 1.0) -> None:
        """Let clients arrive for so long, `times` as often; each call has the same clients."""
        rng, moment, started = random.Random(1), 0.0, time.monotonic()
        while (moment := moment + rng.expovariate(self.arrivals * times)) < seconds:
            await asyncio.sleep(started + moment - time.monotonic())
            name, visit = self._visitor(random.Random(rng.random()))
            task = asyncio.create_task(self.see(name, visit))
            self._here.add(task)
            task.add_done_callback(self._here.discard)
        await asyncio.sleep(started + seconds - time.monotonic())

    async def all_gone(self) -> None:
        """Wait until every client has left."""
        await asyncio.gather(*self._here)

    async def see(self, name: str, visit: Visit) -> None:
        """Run a client to its end and count it."""
        try:
            await self._retry(visit)
        except (OSError, AssertionError, LookupError, ValueError) as error:
            self.ended["wrong"] += 1
            self.problems.append(f"{name}: {error!r}")
        else:
            self.ended[name] += 1

    def _visitor(self, chance: random.Random) -> tuple[str, Visit]:
        ask = chance.choice(self.requests)
        if chance.random() < HONEST:
            return "answered as alone", lambda: self.stay(ask)
        wrong = chance.choice(WRONG)
        lines = chance.randrange(1, 12)
        others: tuple[tuple[str, Visit], ...] = (
            ("left in the middle of a stream", lambda: self._leave(ask, lines)),
            ("left before the answer", lambda: self._send(ask, 0)),
            ("left with half a body sent", lambda: self._send(HALF_BODY, 0)),
            ("drawn without a seed", self._draw),
            ("refused as is right", lambda: self._be_refused(*wrong)),
        )
        return chance.choice(others)

    async def _retry(self, visit: Visit) -> None:
        """Repeat a visit if the server asks for that, or if the next server takes its place."""
        while True:
            began = time.monotonic()
            try:
                await visit()
            except _ComeAgain as later:
                self.ended["times told to come back"] += 1
                await asyncio.sleep(later.seconds)
            except OSError:
                if not self._found_no_server(began):
                    raise
                self.ended["times sent again, as the server ended"] += 1
                await asyncio.sleep(_SOON)
            else:
                return

    def _found_no_server(self, began: float) -> bool:
        """Whether a visit that began then came when one server ended and the next was not ready."""
        if self.ending is None or began < self.ending - PATIENCE:
            return False
        return self.ready is None or began < self.ready

    # -- what clients do -------------------------------------------------------------------------

    async def stay(self, ask: Ask) -> None:
        """Wait for an answer, which must be the recorded one."""
        began = time.monotonic()
        answer = await self._answer(ask)
        self.seconds.append(time.monotonic() - began)
        expected = self._expected[self.requests.index(ask)]
        assert answer == expected, f"{answer} instead of {expected} to {ask}"

    async def _draw(self) -> None:
        body = {"prompt": "def ", "temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}
        answer = await self._answer(Ask(GENERATE, body))
        assert answer[0][2] == "length", answer

    async def _leave(self, ask: Ask, lines: int) -> None:
        answer = await self._send(with_fields(ask, {"stream": True}), lines)
        assert answer.status == 200, f"status {answer.status}"

    async def _be_refused(self, content: Ask | bytes, status: int) -> None:
        answer = await self._send(content)
        assert answer.status == status, f"{answer} instead of {status}"

    # -- requests --------------------------------------------------------------------------------

    async def _send(self, content: Ask | bytes, leaves: int | None = None) -> Answer:
        """Send a request on a new connection; see `once`."""
        answer = await once(self.port, content, leaves)
        if answer.problem and not answer.status:
            raise ConnectionError(answer.problem)
        if answer.status in (429, 503):
            raise _ComeAgain(answer.retry_after)
        return answer

    async def _answer(self, ask: Ask) -> Choices:
        answer = await self._send(ask)
        assert answer.complete, f"{answer.status}, broken off: {answer.body[-200:]!r}"
        return _read(answer.events)


def with_fields(ask: Ask, fields: dict[str, Any]) -> Ask:
    """The request with other fields of its body."""
    return Ask(ask.path, {**(ask.body or {}), **fields})


def _read(events: list[dict[str, Any]]) -> Choices:
    """The choices of an answer or of the events of a stream."""
    if "generated_text" in (last := events[-1]):
        text = "".join(event["text"] for event in events[:-1]) or last["generated_text"]
        return {0: (text, (), last["finish_reason"])}
    found: Choices = {}
    for event in events:
        for choice in event["choices"]:
            text, numbers, end = found.get(choice["index"], ("", (), ""))
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            logprobs = choice.get("logprobs") or {}
            listed = [item["logprob"] for item in logprobs.get("content") or ()]
            listed += logprobs.get("token_logprobs") or ()
            found[choice["index"]] = (
                text + (said.get("content") or ""),
                (*numbers, *listed),
                choice["finish_reason"] or end,
            )
    return found
