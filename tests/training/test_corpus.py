"""The split of the training text: repeatable, and nothing held out is ever trained on."""

import lzma
import shutil
import subprocess
from pathlib import Path

import pytest

from training.corpus import (
    HELD_OUT,
    Corpus,
    held_out_name,
    heldout_prompts,
    load_corpus,
    read_held_out,
    read_prompts,
    write_held_out,
)

DEMO = Path(__file__).parents[2] / "api" / "models" / "demo"


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return load_corpus()


def make_library(root: Path, *extra: str) -> Path:
    """A library with every held-out module and the `extra` paths, all of them one line long."""
    for path in (*(f"{name}.py" for name in HELD_OUT), *extra):
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {path}\n")
    return root


def test_the_same_library_gives_the_same_corpus(tmp_path: Path) -> None:
    library = make_library(tmp_path, "os.py", "ast.py", "email/header.py", "test/test_ast.py")
    assert load_corpus(library) == load_corpus(library)


def test_no_held_out_document_is_in_the_training_text(corpus: Corpus) -> None:
    trained = {document.text for document in corpus.library + corpus.tests}
    shipped = read_held_out()
    assert trained.isdisjoint(document.text for document in corpus.held_out + shipped)
    paths = {document.path for document in corpus.library + corpus.tests}
    assert paths.isdisjoint(document.path for document in corpus.held_out + shipped)


def test_a_file_that_copies_a_part_of_a_held_out_one_is_left_out(tmp_path: Path) -> None:
    make_library(tmp_path, "os.py")
    lines = [f"value_{number} = {number}" for number in range(40)]
    (tmp_path / "heapq.py").write_text("\n".join(lines))
    (tmp_path / "copied.py").write_text("# mine\n\n" + "\n\n".join(lines[5:25]))
    (tmp_path / "quoted.py").write_text("# mine\n" + "\n".join(lines[5:24]))
    assert [d.path for d in load_corpus(tmp_path).library] == ["os.py", "quoted.py"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("heapq.py", "heapq"),
        ("_heapq.py", "heapq"),
        ("_pyheapq.py", "heapq"),
        ("json/decoder.py", "json"),
        ("zipfile/_path/glob.py", "zipfile"),
        ("test/test_heapq.py", "heapq"),
        ("test/test_zipfile64.py", "zipfile"),
        ("test/test_json/test_scanner.py", "json"),
        ("email/message.py", None),
        ("asyncio/queues.py", None),
        ("email/header.py", None),
        ("test/test_email/test_message.py", None),
    ],
)
def test_modules_and_their_tests_are_held_out_together(path: str, name: str | None) -> None:
    assert held_out_name(path) == name


def test_installed_packages_and_generated_tables_are_left_out(tmp_path: Path) -> None:
    make_library(tmp_path, "os.py", "site-packages/x.py", "_sysconfigdata_linux.py")
    table = tmp_path / "encodings" / "cp1252.py"
    table.parent.mkdir()
    table.write_text("decoding_table = (\n)\n")
    assert [document.path for document in load_corpus(tmp_path).library] == ["os.py"]


def test_a_library_that_lacks_a_held_out_module_is_refused_by_name(tmp_path: Path) -> None:
    (make_library(tmp_path) / "heapq.py").unlink()
    with pytest.raises(FileNotFoundError, match="heapq"):
        load_corpus(tmp_path)


def test_held_out_text_survives_shipping(tmp_path: Path, corpus: Corpus) -> None:
    documents = corpus.held_out[:5]
    write_held_out(documents, tmp_path)
    assert read_held_out(tmp_path) == documents


@pytest.mark.skipif(shutil.which("xz") is None, reason="the xz command is not installed")
def test_the_shipped_archive_is_as_small_as_the_xz_command_makes_it() -> None:
    archive = (DEMO / "heldout.txt.xz").read_bytes()
    command = ["xz", "-9e", "--threads=1", "--stdout"]
    done = subprocess.run(command, input=lzma.decompress(archive), capture_output=True, check=True)
    assert len(archive) == len(done.stdout)


def test_the_shipped_prompts_are_distinct_whole_lines_of_held_out_code() -> None:
    prompts = read_prompts()
    texts = [document.text for document in read_held_out()]
    assert len(prompts) == len(set(prompts)) == 200
    assert prompts == heldout_prompts(200)
    for prompt in prompts:
        assert prompt.lstrip().startswith(("def ", "class "))
        assert any(prompt in text + "\n" for text in texts)
