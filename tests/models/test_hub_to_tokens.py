"""From the hub to tokens: downloads are reported, conversions are kept."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest

from specops.config import Settings
from specops.engine.engine import Engine
from specops.engine.model_info import Download, ModelState, Report
from specops.metrics.metrics import Metrics
from specops.models.prepare import prepare
from specops.serving.async_engine import AsyncEngine
from tests.generating import generate
from tests.models.hub_server import Hub
from tests.models.tiny_repo import MODEL, REPO
from tests.waiting import PATIENCE, until

pytestmark = pytest.mark.anyio


async def test_a_download_shows_in_health_and_in_the_metrics(tiny_settings: Settings) -> None:
    go_on = threading.Event()

    def load(settings: Settings, report: Report) -> Engine:
        for done in (0, 600, 2000):
            report(ModelState.DOWNLOADING, f"{done} bytes", Download("draft", done, 2000))
        assert go_on.wait(PATIENCE)
        return Engine.load(settings, report)

    metrics = Metrics()
    service = AsyncEngine(tiny_settings, metrics, load)
    service.start()
    await until(lambda: service.detail == "2000 bytes")
    assert service.state is ModelState.DOWNLOADING
    value = metrics.registry.get_sample_value
    for name in ("specops_download_bytes", "specops_download_total_bytes"):
        assert value(name, {"model": "draft"}) == 2000
        assert value(name, {"model": "target"}) == 0
    assert value("specops_model_state", {"state": "downloading"}) == 1
    go_on.set()
    await until(lambda: service.state is ModelState.READY)
    await service.stop()


def test_a_model_of_the_hub_is_converted_once_and_then_needs_nobody(
    hub: Hub, tmp_path: Path
) -> None:
    said: list[str] = []
    reported: list[tuple[str, int, int]] = []

    def get() -> Path:
        return prepare(
            MODEL,
            "int8-32",
            name="tiny",
            cache_dir=tmp_path,
            report=said.append,
            downloading=lambda *progress: reported.append(progress),
        ).path

    first = get()
    assert said == ["converting someone/tiny@main to int8-32"]
    assert reported[-1][1] == reported[-1][2] > 0
    assert "someone/tiny@main" in reported[-1][0]
    hub.requests.clear()
    assert get() == first
    assert hub.requests == []
    assert len(said) == 1


def test_from_the_hub_to_tokens(hub: Hub, tiny_settings: Settings, tmp_path: Path) -> None:
    hub.repos["someone/draft"] = hub.repos[REPO]
    settings = replace(
        tiny_settings, target=REPO, draft="someone/draft@main", quant="int8-32", cache_dir=tmp_path
    )
    seen: list[tuple[ModelState, str | None]] = []

    def report(state: ModelState, detail: str, download: Download | None = None) -> None:
        seen.append((state, download.model if download else None))

    engine = Engine.load(settings, report)
    assert (engine.info.name, engine.info.drafters[0]) == ("tiny", "draft")
    order = list(dict.fromkeys(seen))
    assert order == [
        (ModelState.DOWNLOADING, "target"),
        (ModelState.CONVERTING, None),
        (ModelState.DOWNLOADING, "draft"),
        (ModelState.LOADING, None),
    ]
    generate(engine, "def add", 4)
