"""One service under a memory cap: started in a cgroup made by hand, loaded and watched.

The models are TinyLlama's shape with a draft of 160 M parameters and Phi-3 Mini's shape, with
random weights: what memory does depends on sizes, not on what the weights say. Everything that is
made once per machine (graphs, their tiles, the costs of passes) is made before, without a cap: it
lies in a volume that outlives containers.
"""

from __future__ import annotations

import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any

from bench.cgroup import Cgroup, cgroup
from bench.machine import describe
from bench.models import phi3, tinyllama_pair
from bench.page_cache import evict
from bench.quiet import cpu_seconds, machine_seconds
from bench.server import Client, RefusedError, ServerError, serving
from specops.config import Settings
from specops.engine import NO_DRAFTER

GB = 10**9
SWAP_BYTES = 12 * GB
_WATCH_SECONDS = 0.1
_RETRY_SECONDS = 1.0  # what `Retry-After` says at least
_FIRST_TOKENS = 8
_TOLD: dict[int, str] = {HTTPStatus.TOO_MANY_REQUESTS: "shed", HTTPStatus.GATEWAY_TIMEOUT: "late"}
_WORDS = ("class", "def", "return", "import", "value", "self", "raise", "yield", "while", "path")


@dataclass(frozen=True, slots=True)
class Case:
    """What is served, and under what."""

    model: str  # tinyllama, with its draft, or phi3
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
    """Clients that ask one request after the other; pairs are the least and the most of a size."""

    seconds: float
    clients: int = 2
    prompt_words: tuple[int, int] = (60, 60)
    new_tokens: tuple[int, int] = (32, 32)
    sample_every: float = float("inf")  # seconds between two entries of the time series

    def body(self, rng: random.Random) -> dict[str, Any]:
        """A request that no other one begins like."""
        prompt = " ".join(rng.choice(_WORDS) for _ in range(rng.randint(*self.prompt_words)))
        tokens = rng.randint(*self.new_tokens)
        return {"prompt": prompt, "max_new_tokens": tokens, "ignore_eos": True}


@dataclass(frozen=True, slots=True)
class Sample:
    """The group at a moment of the load. Bytes; counts since the load began."""

    seconds: float
    tokens: float
    anonymous: int
    file: int
    swap: int
    major_faults: int


@dataclass(slots=True)
class Outcome:
    """What became of it. Bytes; counts are of the group, from its first process on."""

    ending: str = "served"  # or `refused by the plan`, `killed`, or what went wrong
    slots: int = 0
    context: int = 0
    kv_tokens: int = 0  # of the target's cache
    start_seconds: float = 0.0
    first_seconds: float = 0.0  # of a first answer, which brings back what loading pushed out
    seconds: float = 0.0  # of the load
    tokens: float = 0.0
    answered: int = 0
    shed: int = 0  # answered with 429
    late: int = 0  # answered with 504: no slot, or no end of the text, in time
    failed_requests: int = 0
    most_running: int = 0  # requests that held a slot at the same time
    preempted: int = 0  # requests that gave their blocks up and were computed again
    peak_anonymous: int = 0
    peak_swap: int = 0
    major_faults: int = 0  # during the load
    oom_kills: int = 0
    strangers: float = 0.0  # cores that others took during the load, as a mean
    date: str = ""
    samples: list[Sample] = field(default_factory=list)

    @property
    def tokens_per_second(self) -> float:
        """Of all clients together."""
        return self.tokens / self.seconds if self.seconds else 0.0


def measure(case: Case, load: Load, cache: Path) -> Outcome:
    """Start the service under the cap, load it, and say what happened.

    Raises:
        CgroupError: no cgroup can be made here.
    """
    settings = prepared(case, cache)
    for folder in (settings.cache_dir, Path(settings.target).parent):
        evict(folder)  # what others have read would be charged to nobody, and stay
    outcome = Outcome(date=describe().date)
    swap = SWAP_BYTES if case.swap else 0
    with cgroup(f"specops-caps-{os.getpid()}", memory=int(case.cap_gb * GB), swap=swap) as group:
        with _watched(group, outcome):
            begin, users = time.monotonic(), list[threading.Thread]()
            try:
                with serving(settings, group.enclosed) as (pid, client):
                    outcome.start_seconds = time.monotonic() - begin
                    outcome.slots, outcome.context = _shape(client)
                    outcome.kv_tokens = int(client.metric("specops_kv_capacity_tokens"))
                    outcome.first_seconds = _first(client, load)
                    others = _strangers(pid)
                    users = _play(load, client, group, outcome)
                    outcome.strangers = (_strangers(pid) - others) / outcome.seconds
            except (ServerError, OSError, HTTPException) as error:
                outcome.ending = _told(error)
            for user in users:
                user.join()
        outcome.oom_kills = group.oom_kills()
        if outcome.oom_kills:
            outcome.ending = "killed"
    return outcome


def _told(error: Exception) -> str:
    text = str(error)
    return "refused by the plan" if " not fit: " in text else f"{type(error).__name__}: {text}"


# -- what is served ----------------------------------------------------------------------------


def prepared(case: Case, cache: Path) -> Settings:
    """The case's settings, with all made that is made once per machine."""
    if case.model == "phi3":
        target, draft = phi3(progress, f"{case.quant}-128", cache), None
    else:
        target, draft = tinyllama_pair(progress, f"{case.quant}-128", cache)
    settings = Settings(
        target=str(target),
        draft=str(draft) if draft else NO_DRAFTER,
        cache_dir=cache / "caps",
        drain_timeout=0,  # the load ends with the server
    )
    progress("starting once without a cap, which makes what is made once")
    with serving(settings):
        pass
    return settings


# -- loaded and watched ------------------------------------------------------------------------


@contextmanager
def _watched(group: Cgroup, outcome: Outcome) -> Iterator[None]:
    """Keep the largest figures of the group as long as the context lasts."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_WATCH_SECONDS):
            outcome.peak_anonymous = max(outcome.peak_anonymous, group.counters()["anon"])
            outcome.peak_swap = max(outcome.peak_swap, group.swap_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _play(load: Load, client: Client, group: Cgroup, outcome: Outcome) -> list[threading.Thread]:
    """Let the clients ask for a while and count what was generated.

    Returns:
        The clients. Their last answers end with the server: under the tightest caps they would
        take minutes.
    """
    stop, lock = threading.Event(), threading.Lock()

    def ask(seed: int) -> None:
        user, rng = Client(client.port), random.Random(seed)
        while not stop.is_set():
            told = _ask(user, load.body(rng))
            with lock:
                outcome.answered += told == "answered"
                outcome.shed += told == "shed"
                outcome.late += told == "late"
                outcome.failed_requests += told == "failed" and not stop.is_set()
            if told == "failed":
                break
            if told == "shed":
                stop.wait(_RETRY_SECONDS)
        user.close()

    users = [threading.Thread(target=ask, args=(seed,)) for seed in range(load.clients)]
    faults, tokens = group.counters()["pgmajfault"], _generated(client)
    preempted = client.metric("specops_preemptions_total")
    begin = next_sample = time.monotonic()
    for user in users:
        user.start()
    try:
        while (passed := time.monotonic() - begin) < load.seconds and not outcome.failed_requests:
            running = int(client.metric("specops_requests_running"))
            outcome.most_running = max(outcome.most_running, running)
            if time.monotonic() >= next_sample and load.sample_every < load.seconds:
                counters = group.counters()
                outcome.samples.append(
                    Sample(
                        seconds=passed,
                        tokens=_generated(client) - tokens,
                        anonymous=counters["anon"],
                        file=counters["file"],
                        swap=group.swap_bytes(),
                        major_faults=counters["pgmajfault"] - faults,
                    )
                )
                next_sample += load.sample_every
            time.sleep(_WATCH_SECONDS)
        outcome.tokens = _generated(client) - tokens
        outcome.seconds = time.monotonic() - begin
        outcome.preempted = int(client.metric("specops_preemptions_total") - preempted)
        outcome.major_faults = group.counters()["pgmajfault"] - faults
    finally:
        stop.set()
    return users


def _first(client: Client, load: Load) -> float:
    """Seconds that a short answer takes, alone and before all others."""
    begin = time.monotonic()
    client.generate({**load.body(random.Random("first")), "max_new_tokens": _FIRST_TOKENS})
    return time.monotonic() - begin


def _ask(user: Client, body: dict[str, Any]) -> str:
    """What became of a request: answered, shed, late or failed."""
    try:
        user.generate(body)
    except RefusedError as refused:
        return _TOLD.get(refused.status, "failed")
    except (ServerError, OSError, HTTPException):
        return "failed"
    return "answered"


def _strangers(pid: int) -> float:
    """CPU seconds of everyone but the service and this process, since the machine started."""
    return machine_seconds() - cpu_seconds(pid) - time.process_time()


def _generated(client: Client) -> float:
    client.reconnect()
    return client.metric("specops_generated_tokens_total")


def _shape(client: Client) -> tuple[int, int]:
    """Slots and context that were planned."""
    (labels,) = re.findall(r"^specops_model_info\{(.*)\}", client.metrics(), re.MULTILINE)
    found = dict(re.findall(r'(\w+)="([^"]*)"', labels))
    return int(found["slots"]), int(found["context"])


def progress(text: str) -> None:
    """Say on standard error what takes time."""
    print(f"caps: {text}", file=sys.stderr, flush=True)
