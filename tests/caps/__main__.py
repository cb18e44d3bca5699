"""`sudo .venv/bin/python -m tests.caps [MODEL] --mib 800`: mixed requests below a memory limit.

It serves a model (a GGUF file, or a folder) in a cgroup of its own and sends schemas, tools,
regular expressions, long prompts, four answers at once, log-probabilities, embeddings and texts to
count of almost a megabyte, several at the same time. The kernel must kill nothing, each answer must
be whole, and the memory that the service holds at its peak must be what its plan said, within 8 %:
a plan that is too large gives away KV cache. `--level 2000` asks as well that anonymous memory
stays level after so many requests. The exit status is 1 if that does not hold; the reasons follow.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx

from bench.memory.cgroup import Cgroup, cgroup
from bench.memory.page_cache import evict
from bench.serving.load import HOST
from bench.serving.server import ServerError, serving
from bench.tools.repeating import repeating

MIB = 1 << 20
SPAN = 0.08  # of the plan: how far from it the peak may lie
WAIT_SECONDS = 6.0  # of a schema that is sent when the service is ready
LEVEL = 0.02  # of anonymous memory: how far it may move once it is level
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "mail": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,12}\\.org$"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
    },
    "required": ["name", "age", "mail", "tags"],
    "additionalProperties": False,
}
_WORDS = (
    *("water", "house", "river", "mountain", "answer", "question", "letter", "morning", "evening"),
    *("garden", "window", "table", "paper", "reason", "number", "people", "country", "city"),
    *("street", "music", "winter", "summer", "animal", "bottle", "bridge", "machine"),
)


@dataclass
class Seen:
    """What a run saw. Bytes are of the whole group."""

    plan: dict[str, int] = field(default_factory=dict)  # rows of the plan's table
    kv_tokens: int = 0
    rest: int = 0  # anonymous memory when the service was ready
    peak: int = 0
    levels: list[tuple[int, int]] = field(default_factory=list)  # answers so far, anonymous memory
    answers: Counter[str] = field(default_factory=Counter)
    first: dict[str, float] = field(default_factory=dict)  # seconds of schemas, by when they came
    kills: int = 0
    refusal: str = ""
    problems: list[str] = field(default_factory=list)


def asks(
    rng: random.Random, context: int, *, chat: bool, embeds: bool
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Requests without end: their kinds, paths and bodies."""
    longest = min(context * 3 // 4, 3_000)
    kinds = ["schema", "regex", "long", "n", "logprobs", "echo", "plain", "text"]
    kinds += ["tools", "chat"] * chat + ["embeddings"] * embeds
    for number in count():
        kind = kinds[number % len(kinds)]
        words = " ".join(rng.choices(_WORDS, k=rng.randint(20, 120)))
        body: dict[str, Any] = {"model": "", "max_tokens": rng.randint(16, 96), "prompt": words}
        path = "/v1/completions"
        match kind:
            case "schema":
                name = f"field{number % 40}"  # forty schemas: some are known, some are new
                properties = {**_PERSON["properties"], name: {"type": "string", "maxLength": 20}}
                schema = {**_PERSON, "properties": properties, "required": [*properties]}
                body |= {"guided_json": schema, "max_tokens": 300}
            case "regex":
                body |= {"guided_regex": r"[A-Z][a-z]{2,9}( [a-z]{2,9}){3,12}\."}
            case "long":
                body["prompt"] = " ".join(rng.choices(_WORDS, k=longest))
            case "n":
                body |= {"n": 4, "temperature": 0.9}
            case "logprobs":
                body |= {"logprobs": 5}
            case "echo":
                body |= {"logprobs": 5, "echo": True}
            case "text":
                path, body = "/tokenize", {"content": " ".join(rng.choices(_WORDS, k=140_000))}
            case "embeddings":
                path, body = "/v1/embeddings", {"model": "", "input": [words, words[:50]]}
            case "chat" | "tools":
                path = "/v1/chat/completions"
                body = {"model": "", "max_tokens": 64} | {
                    "messages": [{"role": "user", "content": words}]
                }
                if kind == "tools":
                    function = {"name": "look_up", "parameters": _PERSON}
                    body |= {"tools": [{"type": "function", "function": function}]}
                    body |= {"tool_choice": "required", "max_tokens": 300}
        yield kind, path, body


@contextmanager
def watching(group: Cgroup, seen: Seen) -> Iterator[None]:
    """Keep the peak of what the group holds, in memory and in swap."""

    def look() -> None:
        seen.peak = max(seen.peak, held(group))

    with repeating(look, 0.02):
        yield


def held(group: Cgroup) -> int:
    """Anonymous bytes of the group, swapped or not."""
    return group.counters()["anon"] + group.swap_bytes()


async def load(port: int, group: Cgroup, seen: Seen, options: argparse.Namespace) -> None:
    """Send the requests."""
    limits = httpx.Limits(max_connections=options.at_once + 1)
    async with httpx.AsyncClient(
        base_url=f"http://{HOST}:{port}", timeout=600, limits=limits
    ) as client:
        model = (await client.get("/v1/models")).json()["data"][0]
        seen.refusal = model.get("constraints_refused", "")
        begin = time.monotonic()
        await ask(client, "schema", "/v1/completions", _first(0), seen)
        seen.first["at once"] = time.monotonic() - begin
        await asyncio.sleep(max(0.0, begin + 10 - time.monotonic()))
        for name, number in (("after 10 s", 1), ("the next", 2)):
            begin = time.monotonic()
            await ask(client, "schema", "/v1/completions", _first(number), seen)
            seen.first[name] = time.monotonic() - begin
        embeds = (await client.post("/v1/embeddings", json={"model": "", "input": "a"})).is_success
        rest = asks(random.Random(1), model["context_length"], chat=model["chat"], embeds=embeds)

        async def one(number: int) -> None:
            while sum(seen.answers.values()) < options.requests:
                await ask(client, *next(rest), seen)
                if (done := sum(seen.answers.values())) % max(1, options.requests // 40) == 0:
                    seen.levels.append((done, held(group)))
                    print(f"{done:6} answers, {seen.levels[-1][1] / 1e6:7.1f} MB", flush=True)

        await asyncio.gather(*(one(number) for number in range(options.at_once)))


def _first(number: int) -> dict[str, Any]:
    """A request for a schema that no other request has."""
    properties = {f"only{number}": {"type": "string", "maxLength": 8}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    return {"model": "", "prompt": "a", "max_tokens": 30, "guided_json": schema}


async def ask(
    client: httpx.AsyncClient, kind: str, path: str, body: dict[str, Any], seen: Seen
) -> None:
    """Send a request; come again if there is no room for it."""
    while True:
        answer = await client.post(path, json=body)
        if answer.status_code == 429:
            await asyncio.sleep(float(answer.headers["retry-after"]))
            continue
        if seen.refusal and answer.status_code == 400 and kind in ("schema", "regex", "tools"):
            kind = f"{kind} refused"
            if seen.refusal not in answer.text:
                seen.problems.append(f"{kind}, but not in words: {answer.text[:300]}")
        elif not answer.is_success:
            seen.problems.append(f"{kind}: {answer.status_code} {answer.text[:300]}")
        seen.answers[kind] += 1
        return


def run(options: argparse.Namespace) -> Seen:
    """Serve the model below the limit, and load it."""
    cache = options.cache.resolve()
    variables = {"SPECOPS_CACHE_DIR": str(cache)}
    if options.model:
        variables["SPECOPS_TARGET"] = str(options.model)
    variables |= dict(one.split("=", 1) for one in options.set)
    with serving(variables):  # makes what is made once, without a limit
        pass
    evict(cache)  # pages that others have read would not be charged to the group
    seen = Seen()
    swap = options.swap_mib * MIB
    name = f"specops-mixed-{os.getpid()}"
    with (
        tempfile.TemporaryDirectory() as folder,
        cgroup(name, memory=options.mib * MIB, swap=swap) as group,
        watching(group, seen),
    ):
        log = Path(folder) / "log"
        try:
            with serving(variables, enclosed=group.enclosed, log=log) as server:
                text = log.read_text("utf-8")
                for row, figure in re.findall(r"memory: (\w[\w ]*?) +([\d,.]+) MB", text):
                    seen.plan[row] = int(float(figure.replace(",", "")) * 1e6)
                if tokens := re.search(r"MB +([\d,]+) tokens of", text):
                    seen.kv_tokens = int(tokens[1].replace(",", ""))
                seen.rest = held(group)
                asyncio.run(load(server.port, group, seen, options))
        except (ServerError, httpx.HTTPError) as error:
            seen.problems.append(f"{type(error).__name__}: {error}")
        seen.kills = group.oom_kills()
    return seen


def judged(seen: Seen, options: argparse.Namespace) -> list[str]:
    """What does not hold."""
    reasons = [*seen.problems[:10]]
    if seen.kills:
        reasons.append(f"the kernel killed {seen.kills} processes")
    if (waited := seen.first.get("at once", 0.0)) > WAIT_SECONDS:
        reasons.append(f"the first schema waited {waited:.1f} s")
    if plan := seen.plan.get("anonymous"):
        if abs(seen.peak / plan - 1) > SPAN:
            reasons.append(f"the peak is {seen.peak / plan:.0%} of the plan")
    else:
        reasons.append("there is no plan in the log")
    if options.level:
        later = [size for done, size in seen.levels if done > options.level]
        if max(later) > (1 + LEVEL) * later[0]:
            reasons.append(f"memory grew from {later[0] / 1e6:.1f} to {max(later) / 1e6:.1f} MB")
    return reasons


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.caps", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="default: SPECOPS_MODEL's")
    parser.add_argument("--mib", type=int, default=800, help="the limit")
    parser.add_argument("--swap-mib", type=int, default=0, help="swap beside it")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--level", type=int, default=0, help="answers until memory is level")
    parser.add_argument("--set", action="append", default=[], help="a setting: SPECOPS_SLOTS=2")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/specops").expanduser())
    options = parser.parse_args()
    seen = run(options)
    for row, size in seen.plan.items():
        print(f"{row:16} {size / 1e6:9.1f} MB")
    print(
        f"KV cache of {seen.kv_tokens:,} tokens; ready with {seen.rest / 1e6:.1f} MB; peak "
        f"{seen.peak / 1e6:.1f} MB; {seen.kills} kills; constraints: {seen.refusal or 'yes'}"
    )
    print("schemas, seconds:", ", ".join(f"{name} {one:.2f}" for name, one in seen.first.items()))
    print("answers:", ", ".join(f"{many} {kind}" for kind, many in seen.answers.items()))
    reasons = judged(seen, options)
    print("All is well." if not reasons else "Not well:", *reasons, sep="\n- " if reasons else "")
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
