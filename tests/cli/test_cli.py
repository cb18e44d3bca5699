"""The command line, on the tiny models with random weights."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from specops.cli.main import main
from specops.config import Settings
from specops.engine.engine import Engine
from specops.models import prepare as preparing
from specops.models.convert import Quantization, export_checkpoint
from specops.models.head_folder import NGRAMS
from specops.ngrams.storage import Conversation
from specops.ngrams.table import make_table
from specops.presets import Preset
from specops.request import GenerationRequest, TokenOutput
from specops.system.memory import read_memory
from tests.loopback import free_port
from tests.mtp_blocks import make_checkpoint

PROMPT = "def add(a, b):"
TOKENS = 24
FIXED = 3  # draft tokens; the chosen number would differ from run to run


@pytest.fixture
def environment(tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The tiny pair as the process's settings."""
    variables = {
        "SPECOPS_TARGET": tiny_settings.target,
        "SPECOPS_DRAFT": tiny_settings.draft,
        "SPECOPS_QUANT": tiny_settings.quant,
        "SPECOPS_CACHE_DIR": str(tiny_settings.cache_dir),
        "SPECOPS_THREADS": str(tiny_settings.threads),
    }
    for name in [name for name in os.environ if name.startswith("SPECOPS_")]:
        monkeypatch.delenv(name)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return variables


@pytest.fixture
def pieces(tiny_settings: Settings) -> list[TokenOutput]:
    """The engine's answer to `PROMPT`."""
    engine = Engine.load(replace(tiny_settings, slots=1))
    request = GenerationRequest(
        request_id="test",
        prompt_tokens=engine.encode(PROMPT),
        max_new_tokens=TOKENS,
        drafter="cascade",
        k_draft=FIXED,
    )
    return [piece for output in engine.generate(request) for piece in output.pieces]


GENERATE = ["generate", PROMPT, "--max-new-tokens", str(TOKENS), "--k-draft", str(FIXED)]


@pytest.mark.usefixtures("environment")
def test_generate_prints_the_engines_text_and_a_line_of_figures(
    pieces: list[TokenOutput], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(GENERATE) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(piece.text for piece in pieces) + "\n"
    assert re.fullmatch(
        rf"\d+ \+ {len(pieces)} tokens · [\d.]+ tokens/s · first token after [\d.]+ s"
        r" · [\d.]+ tokens per pass · \d+ of \d+ draft tokens accepted \(\d+%\)\n",
        shown.err,
    )


@pytest.mark.usefixtures("environment")
def test_generate_colours_accepted_draft_tokens_and_nothing_else(
    pieces: list[TokenOutput], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(GENERATE) == 0
    out = capsys.readouterr().out
    colours = {"draft": "32", "suffix": "36"}
    accepted = [(colours[p.origin], p.text) for p in pieces if p.origin != "target"]
    assert accepted
    assert len(accepted) < len(pieces)
    assert re.findall(r"\x1b\[(3\d)m(.*?)\x1b\[0m", out, re.DOTALL) == accepted
    plain = re.sub(r"\x1b\[\d+m", "", out)
    assert plain == "".join(piece.text for piece in pieces) + "\n"
    assert main([*GENERATE, "--no-color"]) == 0
    assert capsys.readouterr().out == plain
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(GENERATE) == 0
    assert capsys.readouterr().out == plain


@pytest.mark.usefixtures("environment")
def test_generate_flags_reach_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = [*GENERATE, "--temperature", "1.5", "--drafter", "none"]
    texts = []
    for seed in ("1", "1", "2"):
        assert main([*drawn, "--seed", seed]) == 0
        shown = capsys.readouterr()
        assert "draft tokens" not in shown.err
        texts.append(shown.out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.usefixtures("environment")
def test_generate_reads_the_prompt_from_standard_input(
    pieces: list[TokenOutput], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.write(writer, PROMPT.encode())
    os.close(writer)
    with os.fdopen(reader) as stream:
        monkeypatch.setattr(sys, "stdin", stream)
        assert main(["generate", "-", *GENERATE[2:]]) == 0
    assert capsys.readouterr().out == "".join(piece.text for piece in pieces) + "\n"


TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    "{% if 'poem' in messages[-1].content %}{{ raise_exception('no poems') }}{% endif %}"
)


def test_generate_asks_a_chat_model_and_continues_a_text(
    environment: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = shutil.copytree(environment["SPECOPS_TARGET"], tmp_path / "target")
    for folder in (target, target / "onnx" / environment["SPECOPS_QUANT"]):
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    monkeypatch.setenv("SPECOPS_TARGET", str(target))
    asked = "system: Be brief.\nuser: Who?\nassistant:"
    texts = []
    for arguments in (["Who?", "--system", "Be brief."], [asked, "--raw"], ["Who?", "--raw"]):
        assert main(["generate", *arguments, *GENERATE[2:]]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert main(["generate", "A poem!"]) == 1
    assert re.fullmatch("specops: .*refuses this: no poems\n", capsys.readouterr().err)


@pytest.mark.usefixtures("environment")
def test_too_long_prompt_is_refused_with_both_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "word " * 1000, "--context", "64"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("specops: ")
    assert "64 tokens" in error


@pytest.mark.usefixtures("environment")
@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["generate", "a", "--k-draft", "99"], "--k-draft"),
        (["generate", "a", "--drafter", "oracle"], "SPECOPS_DRAFTER"),
        (["generate", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["generate", "a", "--temperature", "3"], "--temperature"),
        (["generate", "a", "--temperature", "nan"], "--temperature"),
        (["generate", "a", "--seed", "-1"], "--seed"),
        (["serve", "--port", "0"], "SPECOPS_PORT"),
        (["info", "--model", "nothing"], "SPECOPS_MODEL"),
    ],
)
def test_wrong_value_is_named_and_exits_with_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"specops: {named} must be ")
    assert shown.out == ""


def test_a_missing_model_is_named(
    environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del environment
    assert main(["generate", "a", "--target", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err


def about(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return the lines of `specops info` before the memory plan, by their first word."""
    lines, plan = capsys.readouterr().out.split("\n\n")
    assert "KV cache" in plan
    return dict(line.split(maxsplit=1) for line in lines.splitlines())


@pytest.mark.usefixtures("environment")
def test_info_describes_model_and_machine(
    tiny_pair: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["info", "--context", "100", "--kv-dtype", "int8"]) == 0
    lines = about(capsys)
    assert str(tiny_pair / "target" / "onnx" / "int8-128") in lines["target"]
    size = sum(path.stat().st_size for path in (tiny_pair / "draft/onnx/int8-128").iterdir())
    assert f"{size / 1e6:,.1f} MB" in lines["draft"]
    assert lines["drafters"] == "draft, suffix, cascade, none (default: cascade)"
    assert lines["context"] == "100 tokens; at most 8 requests at the same time"
    assert re.fullmatch(r"cache +\d+ tokens in int8; [\d.,]+ MB", lines["kv"])
    assert lines["batch"] == "invariant  yes"
    assert f"{read_memory().limit / 1e6:,.1f} MB" in lines["memory"]


@pytest.mark.usefixtures("environment")
def test_info_says_that_a_model_drafts_with_its_own_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SPECOPS_DRAFT", "")
    made = tmp_path / "made"
    quantization = Quantization.parse("int8-32")
    export_checkpoint(make_checkpoint(tmp_path / "target"), made, quantization=quantization)
    assert main(["info", "--target", str(made)]) == 0
    lines = about(capsys)
    assert lines["draft"].startswith("the target's own MTP block; ")
    assert lines["drafters"] == "head, suffix, cascade, none (default: cascade)"


@pytest.mark.usefixtures("environment")
def test_info_names_a_draft_head(tiny_head: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", "--draft", "none"]) == 0
    assert about(capsys)["draft"] == "none"
    assert main(["info", "--draft", str(tiny_head)]) == 0
    lines = about(capsys)
    said = r"a head, [\d.]+ MB, \S+/head-\S+; guesses [01]% of a test text: another model's, .*"
    assert re.fullmatch(said, lines["draft"])
    assert lines["drafters"] == "head, suffix, cascade, none (default: cascade)"


@pytest.mark.usefixtures("environment")
def test_info_names_a_table_of_ngrams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = Conversation(0, np.zeros(1, np.int32), np.arange(40, dtype=np.int32) % 4)
    np.save(tmp_path / NGRAMS, make_table([said]))
    assert main(["info", "--draft", str(tmp_path)]) == 0
    lines = about(capsys)
    assert re.fullmatch(rf"[\d.]+ MB, {tmp_path / NGRAMS}", lines["n-grams"])
    assert lines["draft"] == "none"
    assert lines["drafters"] == "suffix, cascade, none (default: suffix)"


@pytest.mark.usefixtures("environment")
def test_info_tells_of_a_head_and_its_ngrams_only_what_is_used(
    tiny_head: Path,
    tiny_settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(Path(tiny_settings.target), tmp_path / "target")
    head = shutil.copytree(tiny_head, tmp_path / "head")
    said = Conversation(0, np.zeros(1, np.int32), np.arange(40, dtype=np.int32) % 4)
    np.save(head / NGRAMS, make_table([said]))
    preset = Preset("", "./target", "./head", "int8-128", "int8-64")
    monkeypatch.setattr(preparing, "presets", lambda: {"demo": preset})
    for name, value in (("MODEL", "demo"), ("MODELS_DIR", str(tmp_path)), ("TARGET", "")):
        monkeypatch.setenv(f"SPECOPS_{name}", value)
    for name in ("QUANT", "DRAFT", "DRAFT_QUANT"):
        monkeypatch.delenv(f"SPECOPS_{name}", raising=False)
    assert main(["info"]) == 0
    lines = about(capsys)
    assert lines["draft"].startswith("a head, ")
    assert lines["n-grams"].endswith(str(head / NGRAMS))
    (head / NGRAMS).write_bytes(b"")
    assert main(["info"]) == 0
    lines = about(capsys)
    assert lines["draft"] == "none: the preset's cannot be used, the log says why"
    assert (lines["n-grams"], lines["drafters"]) == (
        "none",
        "suffix, cascade, none (default: suffix)",
    )


def test_export_writes_a_folder_that_generates(
    environment: dict[str, str], tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    del environment
    source = shutil.copytree(
        tiny_pair / "target", tmp_path / "source", ignore=shutil.ignore_patterns("onnx")
    )
    destination = tmp_path / "exported"
    assert main(["export", str(source), str(destination), "--quant", "int4-32-rtn"]) == 0
    assert "int4-32-rtn" in capsys.readouterr().out
    assert main(["generate", "a", "--target", str(destination), "--draft", "none"]) == 0


def test_export_of_no_checkpoint_says_so(
    tiny_pair: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(tmp_path), str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("specops: ")
    source = str(tiny_pair / "target")
    assert main(["export", source, str(tmp_path / "out"), "--quant", "int3"]) == 1
    assert "int3" in capsys.readouterr().err


def test_export_says_what_the_disk_says(
    tiny_pair: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    source = str(tiny_pair / "target")
    assert main(["export", source, str(tmp_path / "file" / "out"), "--quant", "fp32"]) == 1
    assert capsys.readouterr().err.startswith(f"specops: {tmp_path / 'file'}")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("specops.models.convert.converter.write_checksums", full)
    assert main(["export", source, str(tmp_path / "out"), "--quant", "fp32"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_making_a_table_needs_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "make", "--out", str(tmp_path / "table"), "--minutes", "0"]) == 2
    assert "--minutes must be a number above 0" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_answers_without_loading_the_engine() -> None:
    code = (
        "import sys, specops.cli.main\n"
        "heavy = {'numpy', 'onnxruntime', 'fastapi', 'onnx', 'safetensors'} & set(sys.modules)\n"
        "sys.exit(' '.join(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""
    for arguments in ([], ["serve"], ["generate"], ["export"], ["info"]):
        with pytest.raises(SystemExit, match="0"):
            main([*arguments, "--help"])


# -- serve, as a process -----------------------------------------------------------------------


@pytest.mark.e2e
@pytest.mark.usefixtures("environment")
def test_serve_with_a_broken_model_says_why_and_ends_with_1(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-W", "error", "-m", "specops", "serve", "--port", str(port)]
    environment = {**os.environ, "SPECOPS_TARGET": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            transport = httpx.HTTPTransport(retries=20)  # until the server listens
            base = f"http://127.0.0.1:{port}"
            with httpx.Client(base_url=base, timeout=30, transport=transport) as client:
                while (health := client.get("/health").json())["state"] != "failed":
                    assert process.poll() is None
                    time.sleep(0.05)
                assert health["error"].startswith(f"{tmp_path.name} contains no model")
                assert client.get("/health/live").status_code == 200
                assert client.post("/generate", json={"prompt": "a"}).status_code == 503
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 1
        finally:
            process.kill()


def test_there_is_no_telemetry(tmp_path: Path) -> None:
    """ONNX Runtime's telemetry, on by default, would write files below the home folder."""
    left_out = {"ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME"}
    inherited = {name: text for name, text in os.environ.items() if name not in left_out}
    subprocess.run(
        [sys.executable, "-c", "import specops.runtime.session"],
        env=inherited | {"HOME": str(tmp_path)},
        check=True,
    )
    assert list(tmp_path.rglob("*")) == []
