"""Compiles thousands of schemas in a process of its own, so that a crash or a hang is a result."""

import json
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from specops.models.folder import ModelFolder
from specops.request import Grammar, GrammarKind
from specops.text.grammar import Grammars
from specops.text.grammar_source import GrammarError
from specops.text.tokenizer import Tokenizer

COMPILED, REFUSED, CRASHED, SLOW = "compiled", "refused", "crashed", "too slow"
_HANG_SECONDS = 60.0  # after which a compilation is ended


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one schema.

    Attributes:
        file: the schema's file.
        kind: compiled, refused, crashed or too slow.
        reason: why it is not compiled.
        left_out: JSON pointers of keywords that are not enforced.
        seconds: of the processor, so that other work on the machine does not count.
    """

    file: Path
    kind: str
    reason: str = ""
    left_out: tuple[str, ...] = ()
    seconds: float = 0.0


def grammar_of(file: Path) -> Grammar:
    """Return the grammar of a file's schema, as a client's library sends it."""
    schema = json.loads(file.read_text())
    text = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def compile_all(files: Sequence[Path], folder: ModelFolder, limit: float) -> Iterator[Result]:
    """Compile the schemas of files for a model's vocabulary, one after the other.

    Args:
        limit: seconds that a schema may take.
    """
    waiting = list(files)
    while waiting:
        with _worker(folder) as worker:
            while waiting:
                result = _compiled(worker, waiting.pop(0), limit)
                yield result
                if result.kind == CRASHED:
                    break


def _compiled(worker: Connection, file: Path, limit: float) -> Result:
    worker.send(file)
    if not worker.poll(_HANG_SECONDS):
        return Result(file, CRASHED, f"no end in {_HANG_SECONDS:g} seconds")
    try:
        result: Result = worker.recv()
    except EOFError:
        return Result(file, CRASHED, "the process ended")
    if result.seconds > limit:
        return Result(file, SLOW, f"{result.seconds:.1f} seconds", (), result.seconds)
    return result


@contextmanager
def _worker(folder: ModelFolder) -> Iterator[Connection]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, folder), daemon=True)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        process.kill()
        process.join()


def _work(asked: Connection, folder: ModelFolder) -> None:
    grammars = Grammars(Tokenizer.load(folder.path), folder.vocab_size, folder.end_tokens)
    grammars.matcher(Grammar(GrammarKind.JSON_SCHEMA, "{}"))  # reads the vocabulary
    while True:
        try:
            file: Path = asked.recv()
        except EOFError:
            return
        asked.send(_result(file, grammars))


def _result(file: Path, grammars: Grammars) -> Result:
    grammar = grammar_of(file)
    start = time.process_time()
    try:
        matcher = grammars.matcher(grammar)
    except GrammarError as error:
        return Result(file, REFUSED, str(error), (), time.process_time() - start)
    left_out = tuple(item.path for item in matcher.ignored)
    return Result(file, COMPILED, "", left_out, time.process_time() - start)
