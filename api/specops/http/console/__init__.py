"""The console: one page at `/` for people without Grafana, and the figures that it draws.

The process assembles the page from its files at the start. The page's policy allows nothing from
anywhere else. Programs that request JSON from `/` get a list of links, all others the words by
which Ollama's clients recognize a server.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.routing import APIRoute

from specops.engine.model_info import ModelState
from specops.http.documentation import policy_source
from specops.http.sse import EventStream, event
from specops.http.state import AppState, Ctx

_FOLDER = Path(__file__).resolve().parent
_SCRIPTS = ("console.js", "markdown.js", "chat.js")
_PERIOD_SECONDS = 1.0
OLLAMA_RUNS = "Ollama is running"  # clients compare it letter by letter
# The series that the charts need: reading them takes a fraction of the time of /metrics.
FIGURES = tuple(
    f"specops_{name}"
    for name in (
        *("generated_tokens_total", "draft_tokens_total", "accepted_tokens_total"),
        *("avg_jump", "draft_length", "estimated_speedup", "requests_running", "requests_waiting"),
        "memory_bytes",
    )
)
# The model's facts on the page; `ModelInfo` has more, and not all of that is JSON.
FACTS = (
    *("name", "quant", "parameters", "drafters", "default_drafter", "context", "slots"),
    *("kv_tokens", "kv_dtype", "threads", "chat", "batch_invariant"),
)
router = APIRouter(include_in_schema=False)


def _page() -> tuple[str, str]:
    """Return the page, and the policy that allows only its parts and this server."""
    style = (_FOLDER / "console.css").read_text("utf-8")
    script = "".join((_FOLDER / name).read_text("utf-8") for name in _SCRIPTS)
    html = (_FOLDER / "index.html").read_text("utf-8")
    html = html.replace("/*style*/", style).replace("/*script*/", script)
    policy = (
        f"default-src 'none'; style-src {policy_source(style)}; "
        f"script-src {policy_source(script)}; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'"
    )
    return html, policy


_HTML, _POLICY = _page()


@router.get("/")
async def index(request: Request) -> Response:
    """Return the console to browsers, links to clients that want only JSON, else Ollama's words."""
    accepted = request.headers.get("accept", "")
    if "text/html" in accepted:
        return HTMLResponse(_HTML, headers={"content-security-policy": _POLICY})
    if "application/json" not in accepted or "*/*" in accepted:  # some clients write both
        return PlainTextResponse(OLLAMA_RUNS)
    routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
    paths = [route.path for route in routes if route.include_in_schema and "{" not in route.path]
    links = {path.strip("/").replace("/", "_"): path for path in (*paths, "/docs")}
    return JSONResponse({"name": "specops", "version": version("specops"), "links": links})


@router.get("/console/figures")
async def figures(ctx: Ctx) -> Response:
    """Send the state of the model and the load once a second, until client or service ends."""
    left = asyncio.Event()
    return EventStream(_figures(ctx.app, left), left.set, {})


async def _figures(state: AppState, left: asyncio.Event) -> AsyncGenerator[bytes, None]:
    while not left.is_set():
        yield event(_now(state))
        if state.service.state is ModelState.DRAINING:
            return
        try:
            await asyncio.wait_for(left.wait(), _PERIOD_SECONDS)
        except TimeoutError:
            continue


def _now(state: AppState) -> dict[str, Any]:
    service, info = state.service, state.service.info
    return {
        "seconds": time.monotonic(),
        "state": service.state,
        "detail": service.detail,
        "error": service.error,
        "model": {name: getattr(info, name) for name in FACTS} if info else None,
        "temperature": info.sampling.temperature if info else None,
        "max_tokens": state.settings.max_new_tokens,
        "figures": state.metrics.read(FIGURES),  # NaN, which JSON lacks, becomes null
    }
