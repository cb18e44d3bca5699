"""Long texts of every kind, to every endpoint that encodes one, from clients that stay or leave.

One client, with many connections, sends them to `specops serve` with the default model, while
another streams answers and asks with prompts of kilobytes. A finding is an end of the server, an
answer that is the server's failure or has no word why, a request that is left, more memory than
every plan leaves spare, or, where a run has a time, a neighbour who waits.
"""

import asyncio
import http.client
import json
import multiprocessing
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench.serving.load import Answer, Ask, metric, once
from bench.tools.repeating import repeating
from specops.runtime.memory_plan import spare_bytes
from tests.fuzz.cases import FindingError, seeds
from tests.loopback import HOST
from tests.overload import resident_bytes, serving
from tests.waiting import wait

AT_ONCE = 20
MAX_GROWTH = spare_bytes(0)  # what every plan leaves for requests
PAUSE = 0.25  # seconds that a stream may stand still beyond what it did alone
WAITS = 10.0  # the same for a prompt of 5 KB, whose passes it shares with the crowd's prompts
ALONE_SECONDS = 5.0
# The neighbour's prompts of 1,100 tokens have been in all of the KV cache before the crowd comes.
_SMALL, _FILLING = {"SPECOPS_KV_TOKENS": "8192"}, 9
_KEYS = {"crowd": "a-key", "neighbour": "another-key"}
_LEAVES = (0.0, 0.01, 0.1, 0.5, 2.0)  # seconds after which a client leaves; half of them wait
_PATIENCE = 20.0  # of those: prompts that fit may have the engine compute for minutes
_WORDS = ("the", "quick", "brown", "fox", "said", "1234567890", "naïve", "漢字", "🙂", "\n", "{}")
_SIZES = (1_000, 5_000, 20_000, 60_000, 200_000, 500_000, 1_000_000)
_KINDS: dict[str, Callable[[random.Random, int], str]] = {
    "digits": lambda rng, size: "".join(rng.choices("0123456789", k=64)) * (size // 64),
    "one letter": lambda rng, size: rng.choice("aé漢 \n=\t") * size,
    "spaces": lambda rng, size: (" " * rng.randrange(1, 300) + "x") * (size // 150),
    "words": lambda rng, size: " ".join(rng.choices(_WORDS, k=99)) * (size // 500),
    "letters": lambda rng, size: "".join(rng.choices("abcdefgh", k=999)) * (size // 999),
    "marks": lambda rng, size: rng.choice(("<|im_start|>", "<|im_end|>", "<s>")) * (size // 10),
    "parts of letters": lambda rng, size: "e\u0301\u0323" * (size // 5),
}


def _chat(text: str) -> dict[str, Any]:
    return {"model": "", "messages": [{"role": "user", "content": text}], "max_tokens": 1}


_BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/generate": lambda text: {"prompt": text, "max_new_tokens": 1},
    "/v1/completions": lambda text: {"prompt": [text, "a"], "max_tokens": 1},
    "/completion": lambda text: {"prompt": text, "n_predict": 1},
    "/infill": lambda text: {"input_prefix": text, "input_suffix": "", "n_predict": 1},
    "/v1/chat/completions": _chat,
    "/v1/messages": _chat,
    "/v1/messages/count_tokens": _chat,
    "/v1/responses": lambda text: {"input": text, "max_output_tokens": 1},
    "/api/chat": lambda text: _chat(text) | {"options": {"num_predict": 1}},
    "/api/generate": lambda text: {"prompt": text, "options": {"num_predict": 1}},
    "/api/embed": lambda text: {"input": [text, text[:100]]},
    "/v1/embeddings": lambda text: {"input": text},
    "/embedding": lambda text: {"content": text},
    "/completions": lambda text: {"prompt": text, "n_predict": 1},
    "/api/embeddings": lambda text: {"prompt": text},
    "/tokenize": lambda text: {"content": text},
    "/apply-template": _chat,
}


def request(seed: int, model: str) -> tuple[Ask, float, str]:
    """A request, the seconds after which its client leaves, and what it is."""
    rng = random.Random(seed)
    path, kind, size = rng.choice([*_BODIES]), rng.choice([*_KINDS]), rng.choice(_SIZES)
    body = _BODIES[path](_KINDS[kind](rng, size)) | {"model": model}
    content = json.dumps(body, ensure_ascii=False).encode()[: (1 << 20) + 100]
    headers = {"authorization": f"Bearer {_KEYS['crowd']}", "content-type": "application/json"}
    headers["content-length"] = str(len(content))
    leaves = rng.choice(_LEAVES) if rng.random() < 0.5 else _PATIENCE
    return Ask(path, content, headers), leaves, f"{path}, {size} bytes of {kind}"


@dataclass
class Waits:
    """What the neighbour has seen: the longest of each, in seconds."""

    gap: float = 0.0
    prompt: float = 0.0
    problems: list[str] = field(default_factory=list)


def _neighbour(port: int, model: str, pipe: Connection) -> None:
    """Stream and ask until a message comes; for each one send what was seen since the last."""
    key = {"authorization": f"Bearer {_KEYS['neighbour']}", "content-type": "application/json"}
    seen, asked = Waits(), 0
    while True:
        connection = http.client.HTTPConnection(HOST, port, timeout=120)
        asked += 1
        prompt = f"{asked} " + "some words of a prompt, " * 200  # 5 KB that nobody has computed
        begun = time.monotonic()
        body = {"model": model, "prompt": prompt, "max_tokens": 64, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body | {"ignore_eos": True}), key)
        answer = connection.getresponse()
        seen.prompt, last = max(seen.prompt, time.monotonic() - begun), time.monotonic()
        if answer.status not in (200, 429):  # the crowd may fill the queue
            seen.problems.append(f"{answer.status} {answer.read(200)!r}")
        for _ in answer:
            seen.gap, last = max(seen.gap, time.monotonic() - last), time.monotonic()
        connection.close()
        if pipe.poll():
            if pipe.recv() == "end":
                return
            pipe.send(seen)
            seen = Waits()


@dataclass
class Attack:
    """One client that sends texts to a server, and what it finds."""

    port: int
    model: str
    found: list[str] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)

    async def run(self, cases: int, seconds: float, seed: int) -> None:
        """Send."""
        turns = seeds(cases, seconds, seed)
        await asyncio.gather(*(self._sender(turns) for _ in range(AT_ONCE)))

    async def _sender(self, turns: Iterator[int]) -> None:
        for seed in turns:
            if self.found:
                return
            ask, leaves, kind = request(seed, self.model)
            try:
                async with asyncio.timeout(leaves):
                    self._judge(await once(self.port, ask), f"seed {seed}: {kind}")
            except TimeoutError:
                self.ends["left"] += 1

    def _judge(self, answer: Answer, what: str) -> None:
        self.ends[str(answer.status)] += 1
        if answer.status == 0 or (answer.status >= 500 and answer.status not in (501, 503)):
            self.found.append(f"{what}: {answer.status} {answer.problem} {answer.body[:200]!r}")
        elif answer.status >= 400 and not (b"error" in answer.body and len(answer.body) < 2_000):
            self.found.append(f"{what}: {answer.status} without a word: {answer.body[:200]!r}")


def run(cases: int, seconds: float, seed: int) -> str:
    """Attack a server; return what came of it.

    Raises:
        FindingError: there are findings.
    """
    keys = ",".join(f"{name}:{key}" for name, key in _KEYS.items())
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), SPECOPS_MODEL="", SPECOPS_API_KEYS=keys, **_SMALL) as (port, process),
    ):
        bearer = {"authorization": f"Bearer {_KEYS['neighbour']}"}
        models = asyncio.run(once(port, Ask("/v1/models", headers=bearer)))
        model = models.events[0]["data"][0]["id"]
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        neighbour = context.Process(target=_neighbour, args=(port, model, there), daemon=True)
        neighbour.start()

        def waits(pause: float = 0.0) -> Waits:
            time.sleep(pause)  # as long as the measurement is
            here.send("tell")
            found: Waits = here.recv()
            return found

        for _ in range(_FILLING):
            waits()
        alone, before = waits(ALONE_SECONDS), resident_bytes(process)
        attack, held = Attack(port, model), [before]
        with repeating(lambda: held.append(resident_bytes(process)), 0.05):
            asyncio.run(attack.run(cases, seconds, seed))
        beside, peak = waits(), max(held)
        here.send("end")
        neighbour.join()
        if process.poll() is not None:
            attack.found.append(f"the server ended with {process.returncode}")
        else:
            for name in ("specops_requests_running", "specops_requests_waiting"):
                wait(f"{name} is 0", lambda it=name: asyncio.run(metric(port, it)) == 0)
        attack.found += alone.problems + beside.problems
        if peak - before > MAX_GROWTH:
            attack.found.append(f"memory grew from {before / 1e6:.0f} to {peak / 1e6:.0f} MB")
        if not cases and beside.gap > alone.gap + PAUSE:
            attack.found.append(
                f"a stream stood still for {beside.gap:.2f} s, {alone.gap:.2f} alone"
            )
        if not cases and beside.prompt > alone.prompt + WAITS:
            attack.found.append(f"5 KB waited {beside.prompt:.2f} s, {alone.prompt:.2f} alone")
    if attack.found:
        raise FindingError("\n".join(attack.found))
    return (
        f"{attack.ends.total():,} requests, {dict(sorted(attack.ends.items()))}; beside them a "
        f"stream paused {beside.gap:.2f} s at most ({alone.gap:.2f} alone), a prompt of 5 KB took "
        f"{beside.prompt:.2f} s ({alone.prompt:.2f}), {(peak - before) / 1e6:+.0f} MB at the peak"
    )
