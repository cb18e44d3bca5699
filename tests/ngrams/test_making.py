"""A table is made from start to end, with interruptions, and then serves; more time goes on."""

import errno
import json
import re
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from specops.cli.main import main
from specops.config import Settings
from specops.engine.engine import Engine
from specops.models import prepare as preparing
from specops.models.errors import ModelError
from specops.models.head_folder import NGRAMS
from specops.models.prepare import choose, prepare
from specops.ngrams import conversations, evaluation, making
from specops.ngrams.evaluation import Evaluation
from specops.ngrams.making import Progress, make_ngrams
from specops.ngrams.storage import Conversation, ConversationStore
from specops.ngrams.table import make_table
from specops.presets import Preset
from specops.request import GenerationRequest, Output
from tests.conftest import THREADS
from tests.generating import generate

MINUTES = 2.0  # of a clock that goes on by some seconds with each step


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short texts, few measurements, and a line of progress whenever there is one."""
    for module, name, value in (
        (conversations, "_ANSWER_TOKENS", 12),
        (conversations, "_MIN_DISTINCT", 0.0),
        (making, "_HELD_OUT", 3),
        (making, "_SLOTS", 6),
        (making, "_REPORT_SECONDS", 0.0),
        (evaluation, "_PROMPTS", 1),
        (evaluation, "_MIN_PROMPTS", 1),
        (evaluation, "_TOKENS", 8),
    ):
        monkeypatch.setattr(module, name, value)


def clock(seconds: int = 2) -> Callable[[], float]:
    return count(step=seconds).__next__


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """Loads of an engine, of which none succeeds."""
    seen: list[Settings] = []

    def load(settings: Settings) -> None:
        seen.append(settings)
        raise ModelError("no more is needed here")

    monkeypatch.setattr(making.Engine, "load", load)
    return seen


def make(out: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """Return why no table is made."""
    assert main(["draft", "make", "--model", "demo", "--out", str(out), *flags]) == 1
    return capsys.readouterr().err


@pytest.mark.usefixtures("small")
def test_a_table_is_made_with_interruptions_serves_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(model="demo", threads=THREADS, cache_dir=tmp_path / "cache")
    out, work, said = tmp_path / "table", tmp_path / "table.making", list[str]()

    def stop(text: str) -> None:
        said.append(text)
        if text.startswith("measuring"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make_ngrams(settings, out, MINUTES, stop, clock=clock())
    assert said[0].startswith("writing: ")
    assert not out.exists()
    texts = (work / "conversations.i32").read_bytes()
    results = make_ngrams(settings, out, MINUTES, said.append, clock=clock())
    greedy, drawn = (result.verdict for result in results)
    unknown = r"it cannot be told from chance whether the table pays \(faster in [01] of 1 conv"
    assert re.match(f"greedily {unknown}", greedy)
    assert re.match(f"at temperature 0.7 {unknown}", drawn)
    assert (work / "conversations.i32").read_bytes() == texts  # its time was used up
    assert {path.name for path in out.iterdir()} == {"README.md", NGRAMS}
    card = (out / "README.md").read_text()
    assert f"- {greedy}\n- {drawn}\n" in card
    assert "held-out conversations (1)" in card
    assert "tokens of text from an empty prompt" in card  # it is no chat model
    assert 'The rows "without" have no table' in card

    patch = {"SPECOPS_CACHE_DIR": str(settings.cache_dir), "SPECOPS_THREADS": str(THREADS)}
    for name, value in patch.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(making, "make_ngrams", partial(make_ngrams, clock=clock()))
    hours = str(MINUTES / 60)
    assert main(["draft", "make", "--model", "demo", "--out", str(out), "--more", hours]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{out}: greedily ")
    assert printed.err.startswith("writing: ")
    assert (work / "conversations.i32").read_bytes().startswith(texts)
    assert len((work / "conversations.i32").read_bytes()) > len(texts)
    assert json.loads((work / "progress.json").read_text())["minutes"] == 2 * MINUTES

    engine = Engine.load(replace(settings, draft=str(out), slots=1, context=128))
    assert engine.info.ngrams == out / NGRAMS
    plain, drafted = (
        generate(engine, "def add(", 24, drafter=drafter) for drafter in ("none", "suffix")
    )
    assert [piece.token for piece in plain[0]] == [piece.token for piece in drafted[0]]


@pytest.mark.parametrize("left", ["61.5\n", '{"written": 61.5', "[1]\n"])
def test_what_an_earlier_version_left_is_refused_in_words(tmp_path: Path, left: str) -> None:
    (tmp_path / "progress.json").write_text(left, encoding="utf-8")
    with pytest.raises(ModelError, match="earlier version, or is damaged"):
        Progress(tmp_path / "progress.json")


def test_an_interruption_keeps_what_is_half_written(tmp_path: Path) -> None:
    """Its seconds count, so it does."""
    half = Conversation(3, *(np.arange(n, dtype=np.int32) for n in (2, 9)))
    writer = Mock(writes_nothing=False)
    writer.write.side_effect = [[], KeyboardInterrupt]
    writer.unfinished.return_value = [half]
    progress = Progress(tmp_path / "progress.json", clock())
    with pytest.raises(KeyboardInterrupt):
        making._written(lambda first: writer, progress, 60.0, lambda text: None)
    again = Progress(tmp_path / "progress.json")
    (kept,) = ConversationStore(again.conversations).read()
    assert (kept.number, kept.tokens.tolist()) == (3, half.tokens.tolist())
    assert again.known["written"] == 2.0


def test_evenings_add_up_and_a_repeated_call_does_not(tmp_path: Path) -> None:
    def plan(minutes: float, *, more: bool, finished: bool = True) -> float:
        progress = Progress(tmp_path / "progress.json")
        whole = progress.plan(minutes, more=more)
        progress.known["finished"] = finished
        progress.save()
        return whole

    assert plan(60, more=False, finished=False) == 60
    assert plan(60, more=False) == 60
    assert plan(60, more=False) == 60
    assert plan(120, more=True, finished=False) == 180
    assert plan(120, more=True) == 180  # it was interrupted
    assert plan(120, more=True) == 300
    assert plan(30, more=False) == 300  # nothing is left to do
    assert plan(60, more=True) == 360
    assert plan(6000, more=False, finished=False) == 6000
    assert plan(400, more=False) == 400  # that was a slip


@pytest.mark.parametrize("out", ["notes", "notes/todo", "."])
def test_nothing_but_a_table_is_replaced(
    out: str,
    tmp_path: Path,
    loads: list[Settings],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And that is said before an hour of work."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "todo").write_text("keep")
    monkeypatch.chdir(tmp_path)
    said = make(Path(out), capsys)
    assert re.fullmatch(
        rf"specops: {(tmp_path / out).resolve()}: .*(ngrams\.npy|current).*\n", said
    )
    assert loads == []
    assert (tmp_path / "notes" / "todo").read_text() == "keep"
    assert [path.name for path in tmp_path.iterdir()] == ["notes"]


def test_an_earlier_table_and_a_new_folder_may_be_written(
    tmp_path: Path, loads: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / NGRAMS).touch()
    for name in ("old", "new"):
        assert make(tmp_path / name, capsys) == "specops: no more is needed here\n"
    assert len(loads) == 2
    assert (tmp_path / "old" / NGRAMS).exists()
    assert not (tmp_path / "new").exists()


def test_a_model_or_head_with_a_table_is_not_replaced(
    tmp_path: Path, loads: list[Settings], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("config.json", NGRAMS):
        (tmp_path / name).touch()
    assert "is the folder of a model or a draft head: choose another --out" in make(
        tmp_path, capsys
    )
    assert loads == []


def test_a_folder_that_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert make(tmp_path / "file" / "table", capsys).startswith(f"specops: {tmp_path / 'file'}")


def test_conversations_of_another_model_are_not_counted(tmp_path: Path) -> None:
    Progress(tmp_path / "progress.json").keep_to("one that wrote nothing", "sha256:3", 768)
    Progress(tmp_path / "progress.json").keep_to("qwen", "sha256:1", 576)
    (tmp_path / "conversations.i32").touch()
    Progress(tmp_path / "progress.json").keep_to("the same, elsewhere", "sha256:1", 576)
    for digest, size in (("sha256:2", 576), ("sha256:1", 64), ("", 576)):
        with pytest.raises(ModelError, match=r"another model .*, qwen: .* --out, or") as refused:
            Progress(tmp_path / "progress.json").keep_to("smollm", digest, size)
        assert str(tmp_path) in str(refused.value)


@pytest.mark.usefixtures("small")
def test_an_hour_of_work_is_not_lost_to_a_short_context(
    tmp_path: Path, tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table is measured in the context that its conversations were written in."""
    seen, given = list[Settings](), list[float]()

    def evaluate(
        settings: Settings, before: str, conversations: object, seconds: float, clock: object
    ) -> list[Evaluation]:
        seen.append(settings)
        given.append(seconds)
        assert before == "none"
        ways = {"without": 1.0, "with": 1.0}
        return [Evaluation(0.0, 1, 7, 0, ways, ways)]

    monkeypatch.setattr(making, "evaluate", evaluate)
    short = replace(tiny_settings, draft="none", context=16)
    make_ngrams(short, tmp_path / "table", MINUTES, lambda text: None, clock=clock())
    assert [settings.context for settings in seen] == [making._CONTEXT]
    assert given == [pytest.approx(60 * MINUTES * (1 - making._WRITING))]
    assert "on 7 threads" in (tmp_path / "table" / "README.md").read_text().replace("\n", " ")
    known = json.loads((tmp_path / "table.making" / "progress.json").read_text())["target"]
    assert known["name"] == "target"
    assert known["hidden_size"] == 256
    assert known["source_digest"] == "target"  # its export does not say of what it is


@pytest.mark.usefixtures("small")
def test_measuring_takes_its_share_of_the_time_and_answers_do_not_help_each_other(
    tiny_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[GenerationRequest] = []

    def generate(engine: Engine, request: GenerationRequest) -> Iterator[Output]:
        asked.append(request)
        return generated(engine, request)

    generated = Engine.generate
    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(evaluation, "_PROMPTS", 24)
    monkeypatch.setattr(evaluation, "_MIN_PROMPTS", 5)
    texts = [Conversation(i, np.arange(3, dtype=np.int32), np.zeros(9, np.int32)) for i in range(9)]
    np.save(tmp_path / NGRAMS, make_table(texts))
    settings = replace(tiny_settings, draft=str(tmp_path), context=64, prefix_cache="all")
    results = evaluation.evaluate(settings, "none", texts, 6.0, clock(1))
    assert [result.prompts for result in results] == [6, 6]
    results = evaluation.evaluate(settings, "none", texts, 0.0, clock(1))
    assert [result.prompts for result in results] == [5, 5]
    assert len({request.client for request in asked}) == 6  # three ways at two temperatures
    assert {request.drafter for request in asked} == {"none", "suffix"}
    assert {request.sampling.temperature for request in asked} == {0.0, 0.7}


@pytest.mark.parametrize(
    ("faster", "prompts", "pays"),
    [
        *((4, 4, None), (5, 5, True), (0, 5, False), (4, 5, None), (7, 8, True), (6, 8, None)),
        *((17, 24, True), (16, 24, None), (8, 24, None), (7, 24, False)),
    ],
)
def test_a_table_is_recommended_on_more_than_chance(
    faster: int, prompts: int, pays: bool | None
) -> None:
    speed, jumps = {"without": 1.2, "with": 1.4}, {"without": 1.6, "with": 1.8}
    result = Evaluation(0.7, prompts, 2, faster, speed, jumps)
    assert result.pays is pays
    assert f"(faster in {faster} of {prompts} conversations)" in result.verdict
    assert ("cannot be told from chance" in result.verdict) == (pays is None)


def test_a_table_is_faster_where_it_beats_both_other_ways_by_saving_passes() -> None:
    """The last answer was only faster because the clock was disturbed."""
    speeds = {"plain": (10,) * 4, "without": (20, 10, 5, 10), "with": (21, 10, 9, 15)}
    steps = {"plain": (9,) * 4, "without": (5,) * 4, "with": (4, 4, 4, 5)}
    figures = {
        way: [
            Mock(tokens_per_second=speed, generated_tokens=9, sequence_steps=count)
            for speed, count in zip(speeds[way], steps[way], strict=True)
        ]
        for way in speeds
    }
    assert evaluation._summary(0.0, 2, figures).faster == 1


@pytest.mark.usefixtures("small")
def test_a_model_that_writes_nothing_of_use_is_said_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversations, "_MIN_DISTINCT", 1.1)  # all texts seem to repeat
    settings = Settings(model="demo", threads=THREADS, cache_dir=tmp_path / "cache")
    with pytest.raises(ModelError, match=r"first \d\d texts .*, so their n-grams say nothing"):
        make_ngrams(settings, tmp_path / "table", 6000, lambda text: None)


def test_the_demo_target_with_other_weights_is_the_same_model(tmp_path: Path) -> None:
    """Its export in the repository and a conversion are of one checkpoint."""
    progress = Progress(tmp_path / "progress.json")
    progress.conversations.touch()
    for quant in ("int8-128", "int4-32-rtn"):
        choice = choose(Settings(model="demo", quant=quant))
        folder = prepare(
            choice.target, quant, name="demo", cache_dir=tmp_path, report=lambda text: None
        )
        progress.keep_to("demo", folder.source_digest, folder.hidden_size)


@pytest.mark.usefixtures("small")
def test_a_preset_s_own_table_is_what_a_new_one_is_measured_against(
    tmp_path: Path, tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, said = list[str](), list[str]()
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / NGRAMS).touch()
    (tmp_path / "target").symlink_to(tiny_settings.target)
    preset = Preset("", "./target", "./own", "int8-128", "")
    monkeypatch.setattr(preparing, "presets", lambda: {"demo": preset})

    def evaluate(settings: Settings, before: str, *_: object) -> list[Evaluation]:
        seen.append(before)
        ways = {"without": 1.0, "with": 1.0}
        return [Evaluation(0.0, 1, 7, 0, ways, ways)]

    monkeypatch.setattr(making, "evaluate", evaluate)
    settings = replace(tiny_settings, model="demo", target="", quant="", models_dir=tmp_path)
    make_ngrams(settings, tmp_path / "table", MINUTES, said.append, clock=clock())
    assert seen == [str(tmp_path / "own")]
    assert "demo comes with a table: the new one is measured against it" in said
    assert "have the preset's table." in (tmp_path / "table" / "README.md").read_text()


def test_a_full_disk_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system's error does not say which file, or numpy hides the error."""
    for error in (OSError(errno.ENOSPC, "No space left"), OSError("9 requested and 3 written")):
        monkeypatch.setattr(making, "_make", Mock(side_effect=error))
        said = make(tmp_path / "table", capsys)
        assert said == f"specops: {tmp_path / 'table.making'}: No space left on device\n"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stopped_process_ends_as_after_ctrl_c(
    number: signal.Signals, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that it saves what it has written."""

    def stopped(*_: object, **__: object) -> None:
        signal.raise_signal(number)

    monkeypatch.setattr(making, "make_ngrams", stopped)
    kept = {each: signal.signal(each, signal.SIG_DFL) for each in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with pytest.raises(SystemExit) as ended:
            main(["draft", "make", "--out", str(tmp_path / "table")])
    finally:
        for each, handler in kept.items():
            signal.signal(each, handler)
    assert ended.value.code == status
