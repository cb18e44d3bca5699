"""Fixtures of all tests: small models with random weights, workers, kernels, the summary's lines.

The models are made once for each worker of pytest. They are real graphs with random weights.
"""

import gc
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from specops.config import Settings
from specops.models import child, layout, prepare
from specops.models.convert import Quantization, check, export_checkpoint
from specops.models.convert import __main__ as converter
from specops.models.eagle import convert as head_converter
from specops.models.graph import prepack, weight_cache
from specops.runtime import calibration, kernels
from specops.runtime.session import share_threads
from tests.allowed_skips import watch_skips
from tests.checkpoints import make_llama_checkpoint
from tests.eagle_heads import write_head
from tests.waiting import PATIENCE

THREADS = 1  # each worker of pytest has one core; tests of threads start processes
SLOTS = 3
CONTEXT = 128

TOGETHER = dict.fromkeys(  # files that share one Docker Engine
    (f"tests/e2e/test_{name}.py" for name in ("codespace", "first_sight", "readme", "scale")),
    "tests/e2e/test_compose.py",
)
APART = {  # files whose tests share nothing
    "tests/fuzz/test_fuzz.py",
    "tests/models_e2e/test_presets.py",
}
FIRST = (  # slow files, which would otherwise run at the end, when other workers have no more work
    "tests/engine/test_demo_pair.py",
    "tests/engine/test_threads.py",
    "tests/deploy/gateway/",
    "tests/http/test_api_schema.py",
    "tests/models/convert/test_families.py",
    "tests/runtime/kernels/test_processors.py",
    "tests/stack/test_load_test.py",
    "tests/text/test_template_process.py",
    "tests/training/",
)

Summary = dict[str, list[str]]
_SUMMARY = pytest.StashKey[Summary]()

# However busy the machine is; and a failure comes from the change: `make fuzz` tries other cases.
hypothesis.settings.register_profile(
    "any machine",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("any machine")

# A shell's background jobs ignore Ctrl-C; without this, the processes of tests would, too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a file in one worker, because they share loaded models."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - only if it is used

    # By default, files with few tests come last. The stack's tests all take long: there it fits.
    config.option.loadscopereorder = config.option.markexpr != "not e2e"

    class Files(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in APART else TOGETHER.get(file, file)

    return Files(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import without looking for garbage: each look would visit a million objects that stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    names = Counter(item.nodeid for item in items)
    if alike := [name for name, count in names.items() if count > 1]:
        raise pytest.UsageError(f"workers would run only one test of each name: {alike}")
    items.sort(key=lambda item: not item.nodeid.startswith(FIRST))


# -- figures that tests report at the end, whether they pass or fail -------------------------------


def pytest_configure(config: pytest.Config) -> None:
    watch_skips(config)
    config.stash[_SUMMARY] = {}


@pytest.fixture(scope="session")
def summary_lines(pytestconfig: pytest.Config) -> Summary:
    """Headings of the summary at the end of a test run, with their lines."""
    return pytestconfig.stash[_SUMMARY]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):  # of one worker among several
        session.config.workeroutput["summary"] = session.config.stash[_SUMMARY]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    for heading, lines in getattr(node, "workeroutput", {}).get("summary", {}).items():
        node.config.stash[_SUMMARY].setdefault(heading, []).extend(lines)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for heading, lines in terminalreporter.config.stash[_SUMMARY].items():
        terminalreporter.section(heading)
        for line in lines:
            terminalreporter.line(line)


# -- how models are made and run here --------------------------------------------------------------

_PROGRAMS: dict[str, Any] = {
    "specops.models.eagle.convert": head_converter,
    "specops.models.convert.__main__": converter,
    "specops.models.convert.check": check,
    "specops.models.graph.prepack": prepack,
    "specops.models.layout": layout,
}
_ONE_AT_A_TIME = threading.Lock()  # servers load models in threads


def run_here(
    module: str,
    *arguments: str,
    lock: int | None = None,
    tell: Callable[[str], None] = lambda line: None,
) -> None:
    """What `run_module` does, in this process: its child spends most of its time on imports."""
    errors: list[str] = []

    def say(text: object, *, file: Any = None, **_: Any) -> None:
        if file is sys.stderr:
            errors.append(str(text))
        else:
            tell(str(text).strip())

    program = _PROGRAMS[module]
    with _ONE_AT_A_TIME, pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "print", say, raising=False)
        patch.setenv("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # `layout` sets it for good
        if program.main(list(arguments)):
            raise child.ChildError("\n".join(errors).strip() or "it does not say why")


@pytest.fixture(scope="session", autouse=True)
def no_children() -> Iterator[None]:
    """Models are converted and prepacked in this process."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (prepare, weight_cache):
            patch.setattr(module, "run_module", run_here)
        yield


@pytest.fixture
def real_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are converted and prepacked in a process of their own, as in service."""
    for module in (prepare, weight_cache):
        monkeypatch.setattr(module, "run_module", child.run_module)


@pytest.fixture(autouse=True)
def _real_children_beside_the_stack(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("e2e"):
        request.getfixturevalue("real_child")


@pytest.fixture(scope="session", autouse=True)
def threads_of_the_process() -> None:
    """ONNX Runtime has one pool of threads in a process if the first session asks for it."""
    share_threads(THREADS)


@pytest.fixture(scope="session", autouse=True)
def short_calibration() -> Iterator[None]:
    """Only two rounds: tests compare tokens, which do not depend on measured times."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "_ENOUGH_SECONDS", 0.0)
        yield


# Threads that may outlast a file, and that only wait: of the processes for templates and grammars,
# which all engines share, of the cache's folders, of tqdm, of Schemathesis and of browsers.
_LASTING = ("chat templates", "grammars", "cache-in-use", "tqdm_monitor")
_LASTING += ("asyncio-portal", "asyncio-waitpid")


@pytest.fixture(scope="module", autouse=True)
def no_threads_left() -> Iterator[None]:
    """A file's threads end with it: one that goes on may disturb any test that follows."""
    before = set(threading.enumerate())
    yield

    def left() -> list[threading.Thread]:
        new = set(threading.enumerate()) - before
        return [thread for thread in new if not thread.name.startswith(_LASTING)]

    if left():
        gc.collect()  # threads of an executor end with it
    for thread in left():
        thread.join(PATIENCE)
    assert left() == []


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints `target` and `draft` of one vocabulary, with exports in `onnx/`."""
    folder = tmp_path_factory.mktemp("tiny")
    shape = {"heads": 4, "kv_heads": 2, "vocab": 320, "context": CONTEXT, "tie": True}
    make_llama_checkpoint(folder / "target", hidden=256, layers=2, ffn=384, seed=1, **shape)
    # The draft is the lower part of the target, so some draft tokens are right and some wrong.
    make_llama_checkpoint(folder / "draft", hidden=128, layers=1, ffn=256, seed=1, **shape)
    for model in ("target", "draft"):
        for quant in ("fp32", "int8-128", "int4-128-rtn", "int4-32-rtn"):
            export_checkpoint(
                folder / model,
                folder / model / "onnx" / quant,
                quantization=Quantization.parse(quant),
            )
    return folder


@pytest.fixture(autouse=True)
def _kernels() -> Iterator[None]:
    """Any test may force kernels; the next one's sessions use the fastest ones again."""
    yield
    kernels.force(None)


@pytest.fixture(scope="session")
def tiny_head(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft head for the tiny target, mostly wrong."""
    folder = tmp_path_factory.mktemp("tiny-head") / "head"
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    return write_head(folder, target=tiny_pair / "target", hidden=256, **layers)


@pytest.fixture(scope="session")
def tiny_settings(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings that load the tiny pair."""
    return Settings(
        target=str(tiny_pair / "target"),
        draft=str(tiny_pair / "draft"),
        quant="int8-128",
        cache_dir=tmp_path_factory.mktemp("cache"),
        threads=THREADS,
        slots=SLOTS,
        max_batched_tokens=16,
        queue_size=4,
    )
