"""Collects the training and held-out text: the standard library of the running Python.

Every installation has this text, so training the demo pair needs no download. A fixed list of
modules is held out: neither these nor their tests are ever trained on. This module does not need
torch, so tests and benchmarks read the same text as the training.
"""

import json
import lzma
import random
import sysconfig
from dataclasses import dataclass
from pathlib import Path

DEMO_DIR = Path(__file__).resolve().parents[1] / "api" / "models" / "demo"

# Single modules and small packages, chosen for variety: parsers, protocols, containers, numbers,
# dates, files, processes. A name covers `name.py`, `_name.py`, `_pyname.py` and `name/`.
HELD_OUT = (
    "argparse", "bisect", "calendar", "cmd", "configparser", "csv", "difflib", "fileinput",
    "fractions", "ftplib", "graphlib", "gzip", "heapq", "imaplib", "ipaddress", "json",
    "mailbox", "netrc", "pprint", "queue", "sched", "shelve", "shlex", "smtplib", "statistics",
    "tarfile", "textwrap", "timeit", "tomllib", "uuid", "zipfile",
)  # fmt: skip

PROMPT_LINES = (8, 16, 32)
COPIED_LINES = 20

_TEST_FOLDERS = {"test", "tests", "idle_test"}
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


@dataclass(frozen=True)
class Document:
    """One source file: its path relative to the standard library, and its text."""

    path: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """The split: training uses `library` and `tests`, never `held_out`."""

    library: list[Document]
    tests: list[Document]
    held_out: list[Document]


def is_test(path: str) -> bool:
    """Whether a relative path with `/` is in one of the library's test folders."""
    return any(part in _TEST_FOLDERS for part in path.split("/")[:-1])


def held_out_name(path: str) -> str | None:
    """The held-out module to which a path belongs, as code or as a test; None if there is none.

    Tests are matched by prefix, which may exclude too much but never too little.

    >>> held_out_name("json/decoder.py"), held_out_name("test/test_json/test_scanner.py")
    ('json', 'json')
    >>> held_out_name("email/message.py") is None
    True
    """
    parts = path.split("/")
    if is_test(path):
        names = {part.removesuffix(".py").removeprefix("test_").lstrip("_") for part in parts}
        return next((h for h in HELD_OUT if any(name.startswith(h) for name in names)), None)
    top = parts[0].removesuffix(".py").lstrip("_")
    return next((h for h in HELD_OUT if top in (h, "py" + h)), None)


def _is_generated(path: str, text: str) -> bool:
    """Whether a program wrote the file as a table, or it describes one machine's build."""
    name = path.rsplit("/", 1)[-1]
    return (
        name.startswith("_sysconfigdata")
        or "decoding_table = (" in text
        or "lib2to3/tests/data" in path
    )


def _passages(text: str) -> set[tuple[str, ...]]:
    """All runs of 20 non-empty lines; two files that share one are partial copies."""
    lines = [line for line in text.splitlines() if line.strip()]
    return {tuple(lines[i : i + COPIED_LINES]) for i in range(len(lines) - COPIED_LINES + 1)}


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library below `root` (default: the running Python's) and split it.

    Other files that share 20 consecutive lines with a held-out module are excluded. This works
    without `Lib/test`, which slim images lack. The order is by path, so the result depends only on
    the Python version.

    Raises:
        FileNotFoundError: `root` lacks the code of a held-out module.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    corpus = Corpus([], [], [])
    for file in sorted(root.rglob("*.py"), key=lambda f: f.relative_to(root).as_posix()):
        path = file.relative_to(root).as_posix()
        if _SKIPPED_FOLDERS & set(path.split("/")):
            continue
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError:  # a few tests deliberately use other encodings
            continue
        if not text.strip() or _is_generated(path, text):
            continue
        if held_out_name(path) is None:
            (corpus.tests if is_test(path) else corpus.library).append(Document(path, text))
        elif not is_test(path):
            corpus.held_out.append(Document(path, text))
    held_out = set().union(*(_passages(document.text) for document in corpus.held_out))
    for documents in (corpus.library, corpus.tests):
        documents[:] = [d for d in documents if held_out.isdisjoint(_passages(d.text))]
    missing = set(HELD_OUT) - {held_out_name(document.path) for document in corpus.held_out}
    if missing:
        raise FileNotFoundError(f"{root} lacks the held-out modules {sorted(missing)}")
    return corpus


def write_held_out(documents: list[Document], folder: Path = DEMO_DIR) -> None:
    """Write the held-out text: `heldout.txt.xz` (all of it, `xz -9e`) and `heldout.json` (sizes).

    The size of the first file is also the figure that the target has to beat.
    """
    data = "".join(document.text for document in documents).encode("utf-8")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "heldout.txt.xz").write_bytes(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))
    index = [[document.path, len(document.text.encode("utf-8"))] for document in documents]
    (folder / "heldout.json").write_text(json.dumps(index, indent=0) + "\n", encoding="utf-8")


def read_held_out(folder: Path = DEMO_DIR) -> list[Document]:
    """The shipped held-out documents: the same text on every Python version."""
    data = lzma.decompress((folder / "heldout.txt.xz").read_bytes())
    documents, start = [], 0
    for path, size in json.loads((folder / "heldout.json").read_text(encoding="utf-8")):
        documents.append(Document(path, data[start : start + size].decode("utf-8")))
        start += size
    if start != len(data):
        raise ValueError(f"heldout.json describes {start} bytes, heldout.txt.xz holds {len(data)}")
    return documents


def heldout_prompts(n: int, seed: int = 0, folder: Path = DEMO_DIR) -> list[str]:
    """`n` prompts of held-out code, the same for the same seed on every Python version.

    Each starts at a `def` or `class` line, has 8, 16 or 32 whole lines in turn, and ends with a
    newline, like an editor's request. No two start at the same line.

    Raises:
        ValueError: there are fewer.
    """
    spans = [
        (document, start)
        for document in read_held_out(folder)
        for start, line in enumerate(document.text.splitlines())
        if line.lstrip().startswith(("def ", "class "))
    ]
    if n > len(spans):
        raise ValueError(f"asked for {n} prompts, the held-out text has {len(spans)}")
    prompts = []
    for number, (document, start) in enumerate(random.Random(seed).sample(spans, n)):
        lines = document.text.splitlines()[start : start + PROMPT_LINES[number % 3]]
        prompts.append("\n".join(lines) + "\n")
    return prompts


def write_prompts(folder: Path = DEMO_DIR, n: int = 200) -> None:
    """Write `heldout.jsonl`: prompts for tests and benchmarks, one object per line."""
    rows = [
        json.dumps({"id": f"code-{number:03d}", "category": "code", "prompt": prompt})
        for number, prompt in enumerate(heldout_prompts(n, folder=folder))
    ]
    (folder / "heldout.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")


def read_prompts(folder: Path = DEMO_DIR) -> list[str]:
    """The shipped prompts, in order."""
    lines = (folder / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["prompt"] for line in lines]
