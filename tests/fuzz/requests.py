"""Bodies with fields of every type and size, for every endpoint: each gets an answer or a word why.

The application's own description says which fields there are and what fits into them, so that a new
field is asked about, too. Most fields of a body fit; hypothesis varies them and makes a finding
small. A finding is a failure of the server, a refusal without a word, a long wait, or a callback
that holds the event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import hypothesis
from fastapi import FastAPI
from hypothesis import strategies as st

from specops.config import Settings
from specops.http.errors import internal_error
from specops.serving.async_engine import AsyncEngine
from tests.http.costly import LongestCallback, usual_of
from tests.http.real_engine import in_process
from tests.text.schemas import odd

HELD_SECONDS = 0.3  # of the event loop's own time
_SECONDS = 60.0  # for an answer of a few tokens
_AT_ONCE = 4
_BATCH = 100  # bodies that hypothesis varies together
# The model may draw a mark of a gap, which ends an answer: not before its second token.
_TWO_TOKENS = {"n_predict": 2, "min_tokens": 2}
Values = st.SearchStrategy[Any]
Bodies = st.SearchStrategy[tuple[str, dict[str, Any]]]
_MOST_BYTES = 2 << 20  # of a value; twice as many as are taken


def _times(item: Any, size: int) -> int:
    return min(size, _MOST_BYTES // (len(json.dumps(item)) + 8))


_sizes = st.sampled_from((65, 300, 5_000, 200_000))
_LARGE: Values = st.one_of(
    st.builds(str.__mul__, st.sampled_from(("a", "é", "\n", '"', "{", "9", "x y ")), _sizes),
    st.builds(lambda item, size: [item] * _times(item, size), odd.values, _sizes),
    st.builds(
        lambda item, size: {f"{number}": item for number in range(_times(item, size))},
        odd.values,
        _sizes,
    ),
    st.integers(2, 300).map(lambda depth: json.loads("[" * depth + "]" * depth)),
)
ANY = odd.values | odd.schemas | _LARGE


class Description:
    """What fits into the bodies of an application's endpoints.

    Args:
        app: the application.
        model: its model's name.
    """

    def __init__(self, app: FastAPI, model: str) -> None:
        document = app.openapi()
        self._parts = document["components"]["schemas"]
        self._known: dict[str, Values] = {}
        self.usual: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, Bodies] = {}
        for path, operations in document["paths"].items():
            if described := operations.get("post", {}).get("requestBody"):
                usual = usual_of(path, model)
                if {"n_predict", "min_tokens"} <= self.fields(described).keys():
                    usual = usual | _TWO_TOKENS
                self.usual[path] = usual
                self.bodies[path] = st.tuples(st.just(path), self._body(described, usual))

    def fields(self, described: dict[str, Any]) -> dict[str, Any]:
        """The schemas of a body's fields, by their names."""
        name = described["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        properties: dict[str, Any] = self._parts[name]["properties"]
        return properties

    def _body(self, described: dict[str, Any], usual: dict[str, Any]) -> Values:
        fields = {name: self._field(schema) for name, schema in self.fields(described).items()}
        few = st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True)
        more = few.flatmap(
            lambda names: st.fixed_dictionaries({name: fields[name] for name in names})
        )
        left_out = st.sets(st.sampled_from(sorted(usual)), max_size=1) if usual else st.just(set())
        often_none = st.one_of(*[st.just(set())] * 9, left_out)
        return st.builds(
            lambda more, without: {k: v for k, v in (usual | more).items() if k not in without},
            more,
            often_none,
        )

    def _field(self, schema: dict[str, Any]) -> Values:
        return st.one_of(*[self._fitting(schema)] * 3, ANY)

    def _fitting(self, schema: dict[str, Any]) -> Values:  # noqa: PLR0911 - one for each form
        """Values that fit a schema of the description, or nearly."""
        match schema:
            case {"$ref": str(name)}:
                return self._part(name.rpartition("/")[2])
            case {"anyOf": list(options)} | {"oneOf": list(options)}:
                return st.one_of(*map(self._fitting, options))
            case {"const": value}:
                return st.just(value)
            case {"enum": list(values)}:
                return st.sampled_from(values)
            case {"type": "array"}:
                return st.lists(self._field(schema.get("items", {})), max_size=3)
            case {"type": "object", "properties": dict(properties)}:
                needed = schema.get("required", ())
                fields = {name: self._field(inner) for name, inner in properties.items()}
                must = {name: fields.pop(name) for name in needed}
                return st.fixed_dictionaries(must, optional=fields)
            case {"type": "object"}:
                return st.dictionaries(odd.texts, ANY, max_size=3) | odd.schemas
            case {"type": "integer" | "number" as kind}:
                low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
                high = schema.get("maximum", schema.get("exclusiveMaximum", low + 9))
                around = st.integers(int(low) - 1, int(high) + 1)
                floats = st.floats(low, high, allow_nan=False)
                return around if kind == "integer" else around | floats
            case {"type": "boolean"}:
                return st.booleans()
            case {"type": "null"}:
                return st.none()
            case {"type": "string"}:
                return odd.texts
        return ANY

    def _part(self, name: str) -> Values:
        if name not in self._known:
            self._known[name] = st.deferred(lambda: made)
            made = self._fitting(self._parts[name])
        return self._known[name]


class Attack:
    """Bodies for an application, and what came of them.

    Attributes:
        counts: how often each status came.
        held: the longest that the event loop was held, in seconds.
    """

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._description = Description(http._transport.app, model)  # type: ignore[attr-defined]
        self.paths = sorted(self._description.bodies)
        self.counts: Counter[int] = Counter()
        self.held = 0.0

    def run(self, cases: int, seed: int, runner: asyncio.Runner) -> None:
        """Send that many bodies, some at once.

        Raises:
            AssertionError: there is a finding; hypothesis tells the smallest bodies.
        """
        bodies = st.sampled_from(self.paths).flatmap(self._description.bodies.__getitem__)
        groups = st.lists(bodies, min_size=_AT_ONCE, max_size=_AT_ONCE)

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=-(-cases // _AT_ONCE),
            database=None,
            deadline=None,
            phases=(hypothesis.Phase.generate, hypothesis.Phase.shrink),
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(groups)
        def attack(group: list[tuple[str, dict[str, Any]]]) -> None:
            runner.run(self._send([(*case, json.dumps(case[1])) for case in group]))

        attack()

    async def _send(self, group: list[tuple[str, dict[str, Any], str]]) -> None:
        with LongestCallback() as longest:
            await asyncio.gather(*(self._ask(*case) for case in group))
        self.held = max(self.held, longest.seconds)
        assert longest.seconds < HELD_SECONDS, f"the loop was held for {longest.seconds:.2f} s"

    async def _ask(self, path: str, body: dict[str, Any], content: str) -> None:
        headers = {"content-type": "application/json"}
        async with asyncio.timeout(_SECONDS):
            answer = await self._http.post(path, content=content, headers=headers)
        status, usual = answer.status_code, body == self._description.usual[path]
        self.counts[status] += 1
        told = f"{path} {content[:500]}: {status} {answer.text[:300]}"
        assert status < 500 or status == 501, told
        assert internal_error().detail not in answer.text, told  # within a stream
        if status >= 400:
            assert "error" in answer.json(), told
            assert not usual or status == 501, told
        elif usual and "n_predict" in body:
            assert answer.json().get("tokens_predicted", 2) == 2, told


@asynccontextmanager
async def filling_in(settings: Settings) -> AsyncIterator[tuple[AsyncEngine, httpx.AsyncClient]]:
    """A model that was not trained to fill in a gap, with tokens for it."""
    async with in_process(settings) as (service, http):
        marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|file_sep|>")
        known = {mark: 300 + index for index, mark in enumerate(marks)}
        service.engine.tokenizer.token = known.get  # type: ignore[method-assign]
        yield service, http


def attack(folder: Path, goes_on: Callable[[int], bool], first: int) -> Attack:
    """Send bodies to the demo pair, batch by batch; return what came of them."""
    settings = Settings(model="demo", cache_dir=folder, threads=1, max_new_tokens=8, queue_size=64)
    with asyncio.Runner() as runner:
        opened = filling_in(settings)
        service, http = runner.run(opened.__aenter__())
        assert service.info is not None
        made = Attack(http, service.info.name)
        try:
            for batch in itertools.count():
                if not goes_on(made.counts.total()):
                    break
                made.run(_BATCH, first + batch, runner)
        finally:
            runner.run(opened.__aexit__(None, None, None))
    return made


def run(cases: int, seconds: float, first: int) -> int:
    """Send random bodies to the demo pair; returns the exit status."""
    end = time.monotonic() + seconds

    def goes_on(count: int) -> bool:
        return count < cases if cases else time.monotonic() < end

    with tempfile.TemporaryDirectory() as folder:
        try:
            made = attack(Path(folder), goes_on, first)
        except (AssertionError, TimeoutError) as finding:
            print(f"requests: {finding!r} {getattr(finding, '__notes__', '')}", file=sys.stderr)
            return 1
    told = ", ".join(f"{count:,} times {status}" for status, count in sorted(made.counts.items()))
    print(f"requests: {made.counts.total():,} bodies, {told}; the loop was held {made.held:.3f} s")
    return 0
