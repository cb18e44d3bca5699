"""Bodies with fields of every type and size, for every endpoint: each gets an answer or a word why.

The application's own description says which fields there are and what fits into them, so that a new
field is asked about, too. Most fields of a body fit; hypothesis varies them and makes a finding
small. A finding is a failure of the server, a refusal without a word, a long wait, or a callback
that holds the event loop.
"""

import asyncio
import gc
import json
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Iterable
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
from tests.fuzz.cases import TRIES, seeds
from tests.http.costly import LongestCallback, fields_of, usual_of
from tests.http.real_engine import in_process
from tests.runtime.kvcache.naive import check_integrity
from tests.text.schemas import odd

HELD_SECONDS = 0.3  # of the event loop's own time
_SECONDS = 60.0  # for an answer of a few tokens
_AT_ONCE = 4
_BATCH = 100  # bodies that hypothesis varies together
# The model may draw a mark of a gap, which ends an answer: not before its second token.
_TWO_TOKENS = {"n_predict": 2, "min_tokens": 2}
Values = st.SearchStrategy[Any]
Bodies = st.SearchStrategy[tuple[str, dict[str, Any]]]
_MAX_BYTES = 2 << 20  # of a value; twice as many as are taken


def _times(item: Any, size: int) -> int:
    return min(size, _MAX_BYTES // (len(json.dumps(item)) + 8))


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
_OPEN = '"additionalProperties": true'  # objects of anything: schemas, for example
_MISSING: Values = st.just(...)
_PLAIN: dict[str | None, Values] = {
    "boolean": st.booleans(), "null": st.none(), "string": odd.texts
}  # fmt: skip


class Description:
    """What fits into the bodies of an application's endpoints.

    Args:
        app: the application.
        model: its model's name.
    """

    def __init__(self, app: FastAPI, model: str) -> None:
        self._parts = app.openapi()["components"]["schemas"]
        self._known: dict[str, Values] = {}
        self.usual: dict[str, dict[str, Any]] = {}
        self.bodies: dict[str, Bodies] = {}
        for path, fields in fields_of(app).items():
            few_tokens = _TWO_TOKENS if fields.keys() >= _TWO_TOKENS.keys() else {}
            usual = self.usual[path] = usual_of(path, model) | few_tokens
            self.bodies[path] = st.tuples(st.just(path), self._body(fields, usual))

    def _body(self, schemas: dict[str, Any], usual: dict[str, Any]) -> Values:
        fields = {name: self._field(schema) | _MISSING for name, schema in schemas.items()}
        wide = {name: fields[name] for name in fields if _OPEN in json.dumps(schemas[name])}
        some = odd.some_of(fields, 4) | (odd.some_of(wide, 1) if wide else st.nothing())
        return some.map(
            lambda more: {key: value for key, value in (usual | more).items() if value is not ...}
        )

    def _field(self, schema: dict[str, Any]) -> Values:
        return st.one_of(*[self._fitting(schema)] * 3, ANY)

    def _fitting(self, schema: dict[str, Any]) -> Values:  # noqa: PLR0911 - one for each
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
                return st.one_of(odd.schemas, odd.schemas, st.dictionaries(odd.texts, ANY))
            case {"type": "integer" | "number" as kind}:
                low = schema.get("minimum", schema.get("exclusiveMinimum", -1))
                high = schema.get("maximum", schema.get("exclusiveMaximum", low + 9))
                around = st.integers(int(low) - 1, int(high) + 1)
                floats = st.floats(low, high, allow_nan=False)
                return around if kind == "integer" else around | floats
        return _PLAIN.get(schema.get("type"), ANY)

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
        for _ in range(TRIES):
            with LongestCallback() as longest:
                await asyncio.gather(*(self._ask(*case) for case in group))
            if longest.seconds < HELD_SECONDS:
                break
        self.held = max(self.held, longest.seconds)
        assert longest.seconds < HELD_SECONDS, f"the loop was held for {longest.seconds:.2f} s"

    async def _ask(self, path: str, body: dict[str, Any], content: str) -> None:
        headers = {"content-type": "application/json"}
        async with asyncio.timeout(_SECONDS):
            answer = await self._http.post(path, content=content, headers=headers)
        status, usual = answer.status_code, content == json.dumps(self._description.usual[path])
        self.counts[status] += 1
        told = f"{path} {content[:500]}: {status} {answer.text[:300]}"
        assert status < 500 or status == 501, told
        assert internal_error().detail not in answer.text, told  # within a stream
        assert "breaks the process" not in answer.text, told  # for templates or grammars
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


def attack(folder: Path, batches: Iterable[int]) -> Attack:
    """Send bodies to the demo pair, a batch for each seed; return what came of them."""
    settings = Settings(model="demo", cache_dir=folder, threads=1, max_new_tokens=8, queue_size=64)
    with asyncio.Runner() as runner:
        opened = filling_in(settings)
        service, http = runner.run(opened.__aenter__())
        assert service.info is not None
        cache = service.engine.scheduler.target.cache
        made = Attack(http, service.info.name)
        gc.collect()
        gc.freeze()  # as the server does: a full collection would hold the loop
        try:
            for seed in batches:
                made.run(_BATCH, seed, runner)
        finally:
            runner.run(opened.__aexit__(None, None, None))
    check_integrity(cache)
    return made


def run(cases: int, seconds: float, first: int) -> str:
    """Send random bodies to the demo pair; return what came of them.

    Raises:
        AssertionError, TimeoutError: there is a finding.
    """
    with tempfile.TemporaryDirectory() as folder:
        made = attack(Path(folder), seeds(-(-cases // _BATCH), seconds, first))
    told = ", ".join(f"{count:,} times {status}" for status, count in sorted(made.counts.items()))
    return f"{made.counts.total():,} bodies, {told}; the loop was held {made.held:.3f} s"
