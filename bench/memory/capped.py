"""Runs one service under a memory cap: starts it in a cgroup, sends load and records memory.

The models are TinyLlama's shape with a draft model of 160 M parameters, and published shapes, with
random weights: memory depends on sizes, not on the values of weights. Files that are made once per
machine (graphs, weight tiles, costs of passes) are made before, without a cap: in production they
are in a volume that outlives containers.
"""

import asyncio
import os
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any

from bench.memory.cgroup import Cgroup, cgroup, evict
from bench.models import LLAMA_160M, TINYLLAMA, head_shape, shape
from bench.serving.load import Ask, Script, figure, follow, metric, once
from bench.serving.server import environment, serving
from bench.tools.quiet import watched
from bench.tools.repeating import repeating
from bench.tools.report import progress
from specops.config import Settings
from specops.engine.engine import NO_DRAFTER

GB = 10**9
SWAP_BYTES = 12 * GB
_WATCH_SECONDS = 0.1
_RETRY_SECONDS = 1.0  # minimum of `Retry-After`
_FIRST_TOKENS = 8
_GENERATED, _PREEMPTIONS = "specops_generated_tokens_total", "specops_preemptions_total"
_REFUSED: dict[int, str] = {
    HTTPStatus.TOO_MANY_REQUESTS: "shed",
    HTTPStatus.GATEWAY_TIMEOUT: "late",
}
_WORDS = ("class", "def", "return", "import", "value", "self", "raise", "yield", "while", "path")

# Without calibration, which gains nothing with random weights.
WEIGHTS = {"int4": "int4-128-rtn", "int8": "int8-128"}

PUBLISHED = {
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "gemma-3-1b": "google/gemma-3-1b-it",
    "lfm2.5-1.2b": "LiquidAI/LFM2.5-1.2B-Instruct",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "granite-4.0-h-micro": "ibm-granite/granite-4.0-h-micro",
    "gemma-4-e4b": "google/gemma-4-E4B-it",
}
HEADS = {"qwen3-4b": "AngelSlim/Qwen3-4B_eagle3"}


@dataclass(frozen=True, slots=True)
class Case:
    """A model and a memory cap."""

    model: str  # tinyllama, with its draft model, or a key of PUBLISHED
    quant: str  # int4 or int8, blocks of 128
    cap_gb: float
    swap: bool

    @property
    def name(self) -> str:
        """Such as `tinyllama-int4-1.0GB-noswap`."""
        swap = "swap" if self.swap else "noswap"
        return f"{self.model}-{self.quant}-{self.cap_gb}GB-{swap}"


@dataclass(frozen=True, slots=True)
class Load:
    """Clients that send one request after the other; pairs are minimum and maximum sizes."""

    seconds: float
    clients: int = 2
    prompt_words: tuple[int, int] = (60, 60)
    new_tokens: tuple[int, int] = (32, 32)

    def body(self, rng: random.Random) -> dict[str, Any]:
        """A request whose prompt shares no prefix with another."""
        prompt = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(*self.prompt_words)))
        tokens = rng.randint(*self.new_tokens)
        return {"prompt": prompt, "max_new_tokens": tokens, "ignore_eos": True}


@dataclass(slots=True)
class Record:
    """The results of a case. Sizes are in bytes; memory is that of the whole group."""

    ending: str = "served"  # or `refused by the plan`, `killed`, or an error
    slots: int = 0
    context: int = 0
    kv_tokens: int = 0  # of the target's cache
    start_seconds: float = 0.0
    first_seconds: float = 0.0  # of the first answer, which reads pages evicted during loading
    seconds: float = 0.0  # of the load
    tokens: float = 0.0
    answered: int = 0
    shed: int = 0  # answered with 429
    late: int = 0  # answered with 504: no slot, or no complete answer, in time
    failed_requests: int = 0
    most_running: int = 0  # maximum number of concurrent requests
    preempted: int = 0  # requests that gave up their KV blocks and were computed again
    peak_anonymous: int = 0
    peak_swap: int = 0
    major_faults: int = 0  # during the load
    oom_kills: int = 0
    strangers: float = 0.0  # mean number of cores that other processes used during the load

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all clients together."""
        return self.tokens / self.seconds if self.seconds else 0.0


def measure(case: Case, load: Load, cache: Path) -> Record:
    """Start the service under the cap and send the load.

    Args:
        case: the model and the cap.
        load: the clients.
        cache: folder of the models.
    """
    settings = prepared(case, cache)
    for folder in (settings.cache_dir, Path(settings.target).parent):
        evict(folder)  # pages already in memory would not be charged to the group
    record = Record()
    swap = SWAP_BYTES if case.swap else 0
    with cgroup(f"specops-caps-{os.getpid()}", memory=int(case.cap_gb * GB), swap=swap) as group:
        with peaks(group, record):
            begin = time.monotonic()
            try:
                with serving(environment(settings), enclosed=group.enclosed) as server:
                    record.start_seconds = time.monotonic() - begin
                    page = asyncio.run(once(server.port, Ask("/metrics"))).body.decode()
                    record.slots, record.context = _shape(page)
                    record.kv_tokens = int(figure(page, "specops_kv_capacity_tokens"))
                    first = {**load.body(random.Random("first")), "max_new_tokens": _FIRST_TOKENS}
                    alone = asyncio.run(once(server.port, Ask("/generate", first))).checked()
                    record.first_seconds = alone.seconds
                    with watched(os.getpid(), server.pid) as seen:
                        asyncio.run(_play(load, server.port, group, record))
                    record.strangers = seen.others
            except OSError as error:
                refused = " not fit: " in str(error)
                reason = f"{type(error).__name__}: {error}"
                record.ending = "refused by the plan" if refused else reason
        record.oom_kills = group.oom_kills()
        if record.oom_kills:
            record.ending = "killed"
    return record


def prepared(case: Case, cache: Path) -> Settings:
    """The case's settings, after one start has made the files that are made once per machine."""
    name, quant = PUBLISHED.get(case.model, case.model), WEIGHTS[case.quant]
    draft = NO_DRAFTER
    if case.model == TINYLLAMA:
        draft = str(shape(LLAMA_160M, "int8-128", cache))
    elif case.model in HEADS:
        draft = str(head_shape(HEADS[case.model], cache))
    settings = Settings(
        target=str(shape(name, quant, cache)),
        draft=draft,
        cache_dir=cache / "caps",
        drain_timeout=0,  # unfinished requests need no answer
    )
    progress("starting once without a cap, which makes the files for later starts")
    with serving(environment(settings)):
        pass
    return settings


@contextmanager
def peaks(group: Cgroup, record: Record) -> Iterator[None]:
    """Record the group's peaks during the block."""

    def look() -> None:
        record.peak_anonymous = max(record.peak_anonymous, group.counters()["anon"])
        record.peak_swap = max(record.peak_swap, group.swap_bytes())

    with repeating(look, _WATCH_SECONDS):
        yield


async def _play(load: Load, port: int, group: Cgroup, record: Record) -> None:
    """Let the clients send requests for a while and count the tokens.

    They disconnect without waiting for their last answers, which would take minutes under the
    tightest caps.
    """
    faults, tokens = group.counters()["pgmajfault"], await metric(port, _GENERATED)
    preempted = await metric(port, _PREEMPTIONS)
    scripts = (_client(load, random.Random(seed), record) for seed in range(load.clients))
    clients = [asyncio.create_task(follow(port, script)) for script in scripts]
    begin = time.monotonic()
    try:
        while time.monotonic() - begin < load.seconds and not record.failed_requests:
            running = int(await metric(port, "specops_requests_running"))
            record.most_running = max(record.most_running, running)
            await asyncio.sleep(_WATCH_SECONDS)
        record.tokens = await metric(port, _GENERATED) - tokens
        record.seconds = time.monotonic() - begin
        record.preempted = int(await metric(port, _PREEMPTIONS) - preempted)
        record.major_faults = group.counters()["pgmajfault"] - faults
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def _client(load: Load, rng: random.Random, record: Record) -> Script:
    """A client. It counts its requests by how they end, and stops after a failure."""
    pause = 0.0
    while not record.failed_requests:
        answer = yield Ask("/generate", load.body(rng), pause=pause)
        ending = "answered" if answer.complete else _REFUSED.get(answer.status, "failed_requests")
        setattr(record, ending, getattr(record, ending) + 1)
        pause = _RETRY_SECONDS if ending == "shed" else 0.0


def _shape(page: str) -> tuple[int, int]:
    """The planned slots and context, from the metrics page."""
    (labels,) = re.findall(r"^specops_model_info\{(.*)\}", page, re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return int(found["slots"]), int(found["context"])
