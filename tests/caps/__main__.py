"""`sudo .venv/bin/python -m tests.caps [MODEL] --mib 800`: mixed requests below a memory limit.

It serves a model (a GGUF file, or a folder) in a cgroup of its own and sends schemas, tools,
regular expressions, long prompts, four answers at once, log-probabilities, embeddings and texts to
count of almost a megabyte, several at the same time. The kernel must kill nothing, each answer must
be whole, and the memory that the service holds at its peak must be what its plan said, within 8 %:
a plan that is too large gives away KV cache. Of the KV cache, blocks count that were used: no
200 requests fill that of a gigabyte. `--level 2000` asks as well that anonymous memory
stays level after so many requests. The exit status is 1 if that does not hold; the reasons follow.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from bench.memory.cgroup import Cgroup, cgroup, evict
from bench.serving.load import Answer, Ask, Script, figure, follow_all, once
from bench.serving.server import serving
from bench.tools.repeating import repeating
from specops.runtime.kernels import BLOCK_TOKENS
from specops.text.files import TOKENIZER
from tests.checkpoints import make_checkpoint
from tests.fuzz.grammars import chat_tokenizer
from tests.kinds import chats

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
    unused_tokens: int = 0  # of these: their blocks were never used
    rest: int = 0  # anonymous memory when the service was ready
    peak: int = 0
    levels: list[tuple[int, int]] = field(default_factory=list)  # answers so far, anonymous memory
    answers: Counter[str] = field(default_factory=Counter)
    first: dict[str, float] = field(default_factory=dict)  # seconds of schemas, by when they came
    kills: int = 0
    refusal: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The peak, of the plan without blocks that were never used."""
        unused = self.plan.get("KV cache", 0) * self.unused_tokens / max(1, self.kv_tokens)
        return self.peak / max(1.0, self.plan.get("anonymous", 0) - unused)


def asks(
    rng: random.Random, context: int, *, chat: bool, embeds: bool, shorter: int = 1
) -> Iterator[tuple[str, Ask]]:
    """Requests without end, and their kinds; lengths as `--shorter` says."""
    longest = min(context * 3 // 4, 3_000)
    kinds = ["schema", "regex", "long", "n", "logprobs", "echo", "plain", "text"]
    kinds += ["tools", "chat"] * chat + ["embeddings"] * embeds
    for number in count():
        kind = kinds[number % len(kinds)]
        part = shorter if number % shorter else 1
        words = " ".join(rng.choices(_WORDS, k=rng.randint(20, 120) // part))
        tokens = rng.randint(16, 96) // part
        body: dict[str, Any] = {"model": "", "max_tokens": tokens, "prompt": words}
        path = "/v1/completions"
        match kind:
            case "schema":
                name = f"field{number % 40}"  # forty schemas: some are known, some are new
                properties = {**_PERSON["properties"], name: {"type": "string", "maxLength": 20}}
                schema = {**_PERSON, "properties": properties, "required": [*properties]}
                body |= {"guided_json": schema, "max_tokens": 300 // part}
            case "regex":
                body |= {"guided_regex": r"[A-Z][a-z]{2,9}( [a-z]{2,9}){3,12}\."}
            case "long":
                body["prompt"] = " ".join(rng.choices(_WORDS, k=longest // part))
            case "n":
                body |= {"n": 4, "temperature": 0.9}
            case "logprobs":
                body |= {"logprobs": 5}
            case "echo":
                body |= {"logprobs": 5, "echo": True}
            case "text":
                content = " ".join(rng.choices(_WORDS, k=140_000 // part))
                path, body = "/tokenize", {"content": content}
            case "embeddings":
                path, body = "/v1/embeddings", {"model": "", "input": [words, words[:50]]}
            case "chat" | "tools":
                path = "/v1/chat/completions"
                body = {"model": "", "max_tokens": 64 // part} | {
                    "messages": [{"role": "user", "content": words}]
                }
                if kind == "tools":
                    function = {"name": "look_up", "parameters": _PERSON}
                    body |= {"tools": [{"type": "function", "function": function}]}
                    body |= {"tool_choice": "required", "max_tokens": 300 // part}
        yield kind, Ask(path, body)


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


def load(port: int, group: Cgroup, seen: Seen, options: argparse.Namespace) -> None:
    """Send the requests."""
    model = asyncio.run(once(port, Ask("/v1/models"))).events[0]["data"][0]
    seen.refusal = model.get("constraints_refused", "")

    def first() -> Script:
        for name, pause in {"at once": 0.0, "after 10 s": 10.0, "the next": 0.0}.items():
            answer = yield _first(name, pause)
            seen.first[name] = answer.seconds
            note("schema", answer, seen)

    asyncio.run(follow_all(port, [first()]))
    embeds = asyncio.run(once(port, Ask("/v1/embeddings", {"model": "", "input": "a"}))).complete
    has = {"chat": model["chat"], "embeds": embeds, "shorter": options.shorter}
    rest = asks(random.Random(1), model["context_length"], **has)

    def client() -> Script:
        while seen.answers.total() < options.requests:
            kind, ask = next(rest)
            while (answer := (yield ask)).status == 429:
                ask = replace(ask, pause=answer.retry_after)
            note(kind, answer, seen)
            if (done := seen.answers.total()) % max(1, options.requests // 40) == 0:
                page = (yield Ask("/metrics")).body.decode()
                free = figure(page, "specops_kv_blocks", 'state="free"')
                seen.unused_tokens = min(seen.unused_tokens, int(free) * BLOCK_TOKENS)
                seen.levels.append((done, held(group)))
                print(f"{done:6} answers, {seen.levels[-1][1] / 1e6:7.1f} MB", flush=True)

    asyncio.run(follow_all(port, (client() for _ in range(options.at_once))))


def _first(name: str, pause: float) -> Ask:
    """A request for a schema that no other request has."""
    properties = {f"only {name}": {"type": "string", "maxLength": 8}}
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    body = {"model": "", "prompt": "a", "max_tokens": 30, "guided_json": schema}
    return Ask("/v1/completions", body, pause=pause)


def note(kind: str, answer: Answer, seen: Seen) -> None:
    """Count an answer, and keep what is wrong with it."""
    if seen.refusal and answer.status == 400 and kind in ("schema", "regex", "tools"):
        kind = f"{kind} refused"
        if seen.refusal.encode() not in answer.body:
            seen.problems.append(f"{kind}, but not in words: {answer.body[:300]!r}")
    elif not answer.complete:
        told = f"{answer.status} {answer.problem} {answer.body[:300]!r}"
        seen.problems.append(f"{kind}: {told}")
    seen.answers[kind] += 1


def made_up(folder: Path, tokens: int) -> dict[str, str]:
    """Settings that serve a model with random weights and a vocabulary of this size.

    It has the default model's tokens, and random pairs of those that are letters.
    """
    tokenizer, rng = chat_tokenizer(), random.Random(0)
    vocabulary = tokenizer["model"]["vocab"]
    known = [text for text in vocabulary if text.isascii() and text.isalpha()]
    while len(vocabulary) < tokens:
        vocabulary.setdefault("".join(rng.sample(known, 2)), len(vocabulary))
    sizes = {"hidden": 512, "layers": 8, "heads": 8, "ffn": 1024, "context": 8192}
    end = {"eos_token_id": vocabulary["<|im_end|>"]}
    path = make_checkpoint(folder, "qwen3", vocab=tokens, config=end, **sizes)
    (path / TOKENIZER).write_text(json.dumps(tokenizer))
    return chats(path)


def run(options: argparse.Namespace, folder: Path) -> Seen:
    """Serve the model below the limit, and load it."""
    cache = options.cache.resolve()
    variables = {"SPECOPS_CACHE_DIR": str(cache)}
    if options.vocabulary:
        variables |= made_up(folder / "model", options.vocabulary)
    elif options.model:
        variables["SPECOPS_TARGET"] = str(options.model)
    variables |= dict(one.split("=", 1) for one in options.set)
    with serving(variables):  # makes what is made once, without a limit
        pass
    evict(cache)  # pages that others have read would not be charged to the group
    seen = Seen()
    swap = options.swap_mib * MIB
    name = f"specops-mixed-{os.getpid()}"
    log = folder / "log"
    with (
        cgroup(name, memory=options.mib * MIB, swap=swap) as group,
        watching(group, seen),
    ):
        try:
            with serving(variables, enclosed=group.enclosed, log=log) as server:
                text = log.read_text("utf-8")
                for row, figure in re.findall(r"memory: (\w[\w ]*?) +([\d,.]+) MB", text):
                    seen.plan[row] = int(float(figure.replace(",", "")) * 1e6)
                if tokens := re.search(r"MB +([\d,]+) tokens of", text):
                    seen.kv_tokens = seen.unused_tokens = int(tokens[1].replace(",", ""))
                seen.rest = held(group)
                load(server.port, group, seen, options)
        except OSError as error:
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
    if not seen.plan:
        reasons.append("there is no plan in the log")
    elif abs(seen.share - 1) > SPAN:
        reasons.append(f"the peak is {seen.share:.1%} of the plan")
    if options.level:
        later = [size for done, size in seen.levels if done > options.level]
        if max(later) > (1 + LEVEL) * later[0]:
            reasons.append(f"memory grew from {later[0] / 1e6:.1f} to {max(later) / 1e6:.1f} MB")
    return reasons


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.caps", description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", help="default: SPECOPS_MODEL's")
    parser.add_argument("--vocabulary", type=int, default=0, help="of a made-up model instead")
    parser.add_argument("--mib", type=int, default=800, help="the limit")
    parser.add_argument("--swap-mib", type=int, default=0, help="swap in addition")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--level", type=int, default=0, help="answers until memory is level")
    parser.add_argument("--shorter", type=int, default=1, help="divides all lengths but each Nth")
    parser.add_argument("--set", action="append", default=[], help="a setting: SPECOPS_SLOTS=2")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/specops").expanduser())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen = run(options, Path(folder))
    for row, size in seen.plan.items():
        print(f"{row:16} {size / 1e6:9.1f} MB")
    print(
        f"KV cache of {seen.kv_tokens:,} tokens, {seen.unused_tokens:,} of them never used; ready "
        f"with {seen.rest / 1e6:.1f} MB; peak {seen.peak / 1e6:.1f} MB, {seen.share:.1%} of the "
        f"plan; {seen.kills} kills; constraints: {seen.refusal or 'yes'}"
    )
    print("schemas, seconds:", ", ".join(f"{name} {one:.2f}" for name, one in seen.first.items()))
    print("answers:", ", ".join(f"{many} {kind}" for kind, many in seen.answers.items()))
    reasons = judged(seen, options)
    print("All is well." if not reasons else "Not well:", *reasons, sep="\n- " if reasons else "")
    return int(bool(reasons))


if __name__ == "__main__":
    sys.exit(main())
