"""Mixed requests for one model: whether each is answered, and how much memory they take.

Schemas, regular expressions, choices, tool calls, long prompts, four answers to a prompt, log
probabilities, embeddings and streams, several at once, in the same order for the same seed. A
request may be refused, with a reason; any other ending is a failure, and so is an answer that does
not have what was asked for.

    python -m tests.files.mixed --model FILE --cap 600      # starts the service, in a cgroup (root)
    python -m tests.files.mixed --url http://127.0.0.1:8000 # a service that runs
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import re
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.memory.capped import SWAP_BYTES
from bench.memory.cgroup import Cgroup, cgroup
from bench.serving.load import Answer, Ask, once
from bench.serving.server import ServerError, serving

MB = 10**6
_LOOK_SECONDS = 0.1  # between two looks at the memory
_VISITS = 20  # of a client that is told to come again
_REFUSED = {HTTPStatus.BAD_REQUEST, HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE}
_WORDS = ("river", "class", "return", "seven", "green", "import", "the", "of", "station", "0.25")
_NAMES = ["name", "tags", "count"]
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "count": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": _NAMES,
    "additionalProperties": False,
}
_REGEX = r"[A-Z][a-z]{2,8}-[0-9]{3}"
_CHOICES = ["north", "south-east", "nowhere at all"]
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": _SCHEMA}}
Body = dict[str, Any]
Check = Callable[[Answer], bool]


class Kind(NamedTuple):
    """One kind of request: what is sent for a prompt, and whether an answer has what was asked."""

    ask: Callable[[str], Ask]
    sound: Check


@dataclass
class Seen:
    """How the requests ended, and the memory: of the whole run, in bytes."""

    answered: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    planned: int = 0
    start_peak: int = 0
    peak: int = 0
    oom_kills: int = 0


# -- requests --------------------------------------------------------------------------------------


def _generate(**fields: Any) -> Callable[[str], Ask]:
    return lambda prompt: Ask("/generate", {"prompt": prompt, "max_new_tokens": 64, **fields})


def _chat(**fields: Any) -> Callable[[str], Ask]:
    def ask(prompt: str) -> Ask:
        body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 96, **fields}
        return Ask("/v1/chat/completions", body)

    return ask


def _completed(**fields: Any) -> Callable[[str], Ask]:
    return lambda prompt: Ask("/v1/completions", {"prompt": prompt, "max_tokens": 24, **fields})


def _text(answer: Answer) -> str:
    return str(answer.events[-1]["generated_text"])


def _whole(answer: Answer) -> bool:
    """Whether an answer ended by itself; only such a one follows its grammar to the end."""
    return bool(answer.events[-1]["finish_reason"] == "stop")


def _is_object(text: str) -> bool:
    value = json.loads(text)
    return set(value) == set(_NAMES) and type(value["count"]) is int


def _called(answer: Answer) -> bool:
    (choice,) = answer.events[0]["choices"]
    calls = choice["message"].get("tool_calls") or []
    if choice["finish_reason"] == "length":
        return True
    return bool(calls) and all(_is_object(call["function"]["arguments"]) for call in calls)


def _likely(answer: Answer) -> bool:
    (choice,) = answer.events[0]["choices"]
    listed = choice["logprobs"]["token_logprobs"]
    return bool(listed) and all(math.isfinite(one) and one <= 0 for one in listed)


def _pointing(answer: Answer) -> bool:
    vectors = [item["embedding"] for item in answer.events[0]["data"]]
    lengths = [math.sqrt(sum(value * value for value in vector)) for vector in vectors]
    return len(vectors) == 3 and all(abs(length - 1) < 1e-3 for length in lengths)


KINDS: dict[str, Kind] = {
    "plain": Kind(_generate(), lambda answer: bool(_text(answer))),
    "stream": Kind(_generate(stream=True, temperature=0.8), lambda answer: bool(_text(answer))),
    "chat": Kind(_chat(), lambda answer: len(answer.events[0]["choices"]) == 1),
    "schema": Kind(
        _generate(guided_json=_SCHEMA),
        lambda answer: not _whole(answer) or _is_object(_text(answer)),
    ),
    "regex": Kind(
        _generate(guided_regex=_REGEX, temperature=1.0),
        lambda answer: re.fullmatch(_REGEX, _text(answer)) is not None,
    ),
    "choice": Kind(_generate(guided_choice=_CHOICES), lambda answer: _text(answer) in _CHOICES),
    "tools": Kind(_chat(tools=[_TOOL], tool_choice="required"), _called),
    "long": Kind(_generate(max_new_tokens=16), lambda answer: bool(_text(answer))),
    "n 4": Kind(
        _completed(n=4, temperature=0.9), lambda answer: len(answer.events[0]["choices"]) == 4
    ),
    "log-probabilities": Kind(_completed(logprobs=5), _likely),
    "embeddings": Kind(
        lambda prompt: Ask("/v1/embeddings", {"input": [prompt, prompt[:40], "a"]}), _pointing
    ),
}


def asks(number: int, seed: int, most: int) -> Iterator[tuple[str, Ask]]:
    """Requests of all kinds in turn; the prompts of long ones have up to `most` words."""
    rng = random.Random(seed)
    names = list(KINDS)
    for index in range(number):
        name = names[index % len(names)]
        words = rng.randint(most // 2, most) if name == "long" else rng.randint(4, 60)
        prompt = " ".join(rng.choice(_WORDS) for _ in range(words))
        ask = KINDS[name].ask(f"{index}. {prompt}")
        yield name, ask


# -- the run ---------------------------------------------------------------------------------------


async def play(port: int, requests: list[tuple[str, Ask]], at_once: int, seen: Seen) -> None:
    """Send the requests, `at_once` at a time; who is told to come again does."""
    models = json.loads((await once(port, Ask("/v1/models"))).body)
    model, waiting = models["data"][0]["id"], iter(requests)

    async def client() -> None:
        for name, ask in waiting:
            body: Body = {"model": model, **ask.body} if isinstance(ask.body, dict) else {}
            _count(name, await _visit(port, Ask(ask.path, body)), seen)

    await asyncio.gather(*(client() for _ in range(at_once)))


async def _visit(port: int, ask: Ask) -> Answer:
    for _ in range(_VISITS):
        answer = await once(port, ask)
        if answer.status not in _REFUSED or "retry-after" not in answer.headers:
            break
        await asyncio.sleep(answer.retry_after)
    return answer


def _count(name: str, answer: Answer, seen: Seen) -> None:
    if answer.complete:
        try:
            sound = KINDS[name].sound(answer)
        except (LookupError, ValueError, TypeError):
            sound = False
        if sound:
            seen.answered[name] += 1
        else:
            seen.failed.append(f"{name}: not what was asked for: {answer.body[-300:]!r}")
        return
    reason = ""
    with suppress(LookupError, ValueError, TypeError):
        error = json.loads(answer.body)
        reason = error["error"]["message"] if isinstance(error["error"], dict) else error["error"]
    if answer.status in _REFUSED and reason:
        seen.refused[f"{name}: {answer.status} {reason}"] += 1
    else:
        seen.failed.append(f"{name}: {answer.status} {answer.problem} {answer.body[-300:]!r}")


@contextmanager
def watched(group: Cgroup, seen: Seen) -> Iterator[None]:
    """Keep the highest anonymous memory of the group while the context lasts."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_SECONDS):
            seen.peak = max(seen.peak, group.counters()["anon"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def planned(log: str) -> int:
    """The anonymous memory, in bytes, that a log's last plan allows; 0 without a plan."""
    found = re.findall(r"anonymous +([0-9,.]+) MB", log)
    return round(float(found[-1].replace(",", "")) * MB) if found else 0


def under_a_cap(options: argparse.Namespace) -> Seen:
    """Start the service for a file, in a group with a cap where one is asked for, and load it."""
    seen = Seen()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        variables = {"SPECOPS_TARGET": str(options.model), "SPECOPS_DRAFT": "none"}
        variables["SPECOPS_CACHE_DIR"] = str(options.cache or folder / "cache")
        enclosed: Callable[[list[str]], list[str]] = list
        group = None
        if options.cap:
            swap = SWAP_BYTES if options.swap else 0
            name = f"specops-mixed-{os.getpid()}"
            group = stack.enter_context(cgroup(name, memory=options.cap * MB, swap=swap))
            stack.enter_context(watched(group, seen))
            enclosed = group.enclosed
        log = folder / "log"
        try:
            with serving(variables, log=log, enclosed=enclosed) as server:
                seen.start_peak, seen.peak = seen.peak, 0
                requests = list(asks(options.number, options.seed, options.words))
                asyncio.run(play(server.port, requests, options.at_once, seen))
        except (ServerError, OSError, LookupError, ValueError) as error:
            seen.failed.append(f"the service: {error}")
        seen.planned = planned(log.read_text(encoding="utf-8", errors="replace"))
        seen.oom_kills = group.oom_kills() if group else 0
    return seen


def report(seen: Seen) -> None:
    """Print what was seen."""
    print(f"answered: {sum(seen.answered.values())} {dict(seen.answered)}")
    for reason, count in seen.refused.items():
        print(f"refused: {count} {reason}")
    for problem in seen.failed:
        print(f"failed: {problem[-2000:]}")
    if seen.peak:
        share = f"{seen.peak / seen.planned:.3f} of the plan" if seen.planned else "no plan"
        print(
            f"anonymous MB: planned {seen.planned / MB:.1f}, peak {seen.peak / MB:.1f} ({share}), "
            f"while starting {seen.start_peak / MB:.1f}; OOM kills {seen.oom_kills}"
        )


def main() -> int:
    """Run the requests; 1 if one failed or the kernel killed a process."""
    parser = argparse.ArgumentParser(prog="python -m tests.files.mixed", description=__doc__)
    server = parser.add_mutually_exclusive_group(required=True)
    server.add_argument("--model", type=Path, help="a GGUF file, or what SPECOPS_TARGET takes")
    server.add_argument("--url", help="a service that runs")
    parser.add_argument("--cap", type=int, default=0, help="of memory, in MB; needs root")
    parser.add_argument("--swap", action="store_true", help="with 12 GB of swap beside the cap")
    parser.add_argument("--cache", type=Path, help="SPECOPS_CACHE_DIR; default: a new, empty one")
    parser.add_argument("--number", type=int, default=200, help="of requests (200)")
    parser.add_argument("--at-once", type=int, default=8, help="clients (8)")
    parser.add_argument("--words", type=int, default=600, help="of the longest prompts (600)")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    if options.url:
        seen = Seen()
        requests = list(asks(options.number, options.seed, options.words))
        asyncio.run(play(urlsplit(options.url).port or 80, requests, options.at_once, seen))
    else:
        seen = under_a_cap(options)
    report(seen)
    return int(bool(seen.failed or seen.oom_kills))


if __name__ == "__main__":
    sys.exit(main())
