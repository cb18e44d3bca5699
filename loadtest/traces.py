"""Reads a file of requests line by line: prompts, or a trace of real traffic with only lengths.

The fields of a line determine its format:

    hash_ids, input_length, output_length, timestamp  Mooncake: milliseconds, blocks of 512 tokens
    the same with chat_id or parent_chat_id           Bailian: seconds, blocks of 16 tokens
    TIMESTAMP,ContextTokens,GeneratedTokens           Azure's traces of 2023 and 2024
    Timestamp,…,Request tokens,Response tokens        BurstGPT: seconds
    prompt or messages; output_tokens, timestamp      our own: seconds
    conversations                                     ShareGPT, often as one JSON list

Unusable lines are skipped and reported with their numbers and reasons. The file may be larger than
memory.
"""

import codecs
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO

MAX_LINE = 1 << 24  # bytes
_READ = 1 << 16
_CHARACTERS = 4  # per token, roughly: for the length of an answer that is given as text
_SHOWN = 3  # maximum number of skipped lines in a report


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: a user's texts, or the length of a prompt.

    Attributes:
        turns: the user's texts; empty if only the length is known.
        answers: tokens of the answer to each turn; 0: unknown.
        system: the system message.
        length: tokens of the prompt.
        blocks: an id for each `block` tokens of the prompt; equal ids are equal texts.
        block: tokens of a block.
        at: seconds after the first line, if the file has times.
    """

    turns: tuple[str, ...] = ()
    answers: tuple[int, ...] = (0,)
    system: str = ""
    length: int = 0
    blocks: tuple[int, ...] = ()
    block: int = 0
    at: float | None = None


@dataclass(frozen=True, slots=True)
class Survey:
    """A summary of a file.

    Attributes:
        entries: number of usable lines.
        left_out: number of skipped lines.
        seconds: time from the first to the last line; None: the file has no times.
        reasons: why the first skipped lines are unusable.
    """

    entries: int
    left_out: int
    seconds: float | None
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        if not self.left_out:
            return f"{self.entries:,} lines"
        more = self.left_out - len(self.reasons)
        reasons = "; ".join([*self.reasons, *([f"and {more:,} more"] if more else [])])
        return f"{self.entries:,} lines, {self.left_out:,} more skipped: {reasons}"


def survey(path: Path) -> Survey:
    """Read a whole file once; the result is cached until the file changes.

    Raises:
        ValueError: it cannot be read or has no usable line; the message is one line.
    """
    try:
        status = path.stat()
        return _survey(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise ValueError(f"the data set {path} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=4)
def _survey(path: Path, *_: int) -> Survey:
    used, left_out, seconds, reasons = 0, 0, None, list[str]()
    for number, entry in _lines(path):
        if isinstance(entry, Entry):
            used += 1
            seconds = seconds if entry.at is None else max(seconds or 0.0, entry.at)
        else:
            left_out += 1
            reasons += [f"line {number}: {entry}"] if left_out <= _SHOWN else []
    found = Survey(used, left_out, seconds, tuple(reasons))
    if not used:
        why = "; ".join(reasons) or "it is empty"
        raise ValueError(f"the data set {path} cannot be read: {why}")
    return found


def entries(path: Path, index: int = 0, processes: int = 1) -> Iterator[Entry]:
    """The entries for process number `index`: each line of the file goes to one process."""
    usable = (entry for _, entry in _lines(path) if isinstance(entry, Entry))
    return islice(usable, index, None, processes) if index < processes else iter(())


def _lines(path: Path) -> Iterator[tuple[int, Entry | str]]:
    """Yield each line's number, and its entry or the reason why it is unusable."""
    first: float | None = None
    with path.open("rb") as file:
        begin = file.read(1 << 10).lstrip()[:1]
        file.seek(0)
        rows = _listed(file) if begin == b"[" else _objects(file) if begin == b"{" else _table(file)
        for number, row in rows:
            try:
                if isinstance(row, ValueError):
                    raise row
                entry = _entry(row)
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
                yield number, _reason(error)
                continue
            if entry.at is not None:
                first = entry.at if first is None else first
                entry = replace(entry, at=max(0.0, entry.at - first))
            yield number, entry


def _reason(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"no {error}"
    if isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
        return "not JSON" if isinstance(error, json.JSONDecodeError) else "not UTF-8"
    return str(error).partition("\n")[0]


Rows = Iterator[tuple[int, Any]]  # line number, and its object or a ValueError


def _texts(file: BinaryIO) -> Rows:
    """Yield the lines that are not blank."""
    number = 0
    while line := file.readline(MAX_LINE):
        number += 1
        if not line.endswith(b"\n") and len(line) == MAX_LINE:
            while (rest := file.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                pass
            yield number, ValueError(f"longer than {MAX_LINE:,} bytes")
        elif line.strip():
            try:
                yield number, line.decode("utf-8-sig").rstrip("\r\n")
            except UnicodeDecodeError as error:
                yield number, error


def _objects(file: BinaryIO) -> Rows:
    """Yield objects from lines of JSON."""
    for number, line in _texts(file):
        yield number, line if isinstance(line, ValueError) else _decoded(line)


def _decoded(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        return error
    except RecursionError:
        return ValueError("nested too deeply")


def _table(file: BinaryIO) -> Rows:
    """Yield objects from CSV, whose first line names the fields."""
    names: list[str] = []
    for number, line in _texts(file):
        if isinstance(line, ValueError):
            yield number, line
            continue
        values = [value.strip(' "') for value in line.split(",")]
        if not names and not {"ContextTokens", "Request tokens"} & {*values}:
            yield number, ValueError("neither JSON nor the fields of a known trace")
            return
        if not names:
            names = values
        elif len(values) != len(names):
            yield number, ValueError(f"{len(values)} fields instead of {len(names)}")
        else:
            yield number, dict(zip(names, values, strict=True))


def _listed(file: BinaryIO) -> Rows:
    """Yield the objects of one JSON list, numbered as if each were a line."""
    decoder, number = json.JSONDecoder(), 1
    reader = codecs.getreader("utf-8-sig")(file)
    text = reader.read(_READ).lstrip().removeprefix("[")
    while not (text := text.lstrip(" \t\r\n,")).startswith("]"):
        try:
            row, end = decoder.raw_decode(text)
        except (ValueError, RecursionError):
            try:  # the object may be incomplete
                more = reader.read(max(_READ, len(text))) if len(text) <= MAX_LINE else ""
            except UnicodeDecodeError:
                more = ""
            if not more:
                yield number, ValueError("not JSON, so the rest is skipped")
                return
            text += more
            continue
        yield number, row
        number, text = number + 1, text[end:]


def _entry(row: Mapping[str, Any]) -> Entry:
    """The entry of a line.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the line is unusable.
    """
    if not isinstance(row, Mapping):
        raise TypeError("not an object")
    if "hash_ids" in row:
        bailian = "chat_id" in row or "parent_chat_id" in row
        block, unit = (16, 1.0) if bailian else (512, 0.001)
        length, ids = _whole(row, "input_length"), row["hash_ids"]
        if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
            raise ValueError("hash_ids is not a list of whole numbers")
        answers, at = (_whole(row, "output_length"),), _seconds(row["timestamp"]) * unit
        return Entry((), answers, "", length, tuple(ids), block, at)
    if "ContextTokens" in row:
        answers, length = (_whole(row, "GeneratedTokens"),), _whole(row, "ContextTokens")
        time = datetime.fromisoformat(row["TIMESTAMP"])
        at = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
        return Entry((), answers, "", length, at=at)
    if "Request tokens" in row:
        if _seconds(row["Response tokens"]) == 0:
            raise ValueError("a request that failed: 0 response tokens")
        answers, length = (_whole(row, "Response tokens"),), _whole(row, "Request tokens")
        return Entry((), answers, "", length, at=_seconds(row["Timestamp"]))
    at = _seconds(row["timestamp"]) if "timestamp" in row else None
    said = [(turn["from"], turn["value"]) for turn in row.get("conversations", ())]
    said = said or [(turn["role"], turn["content"]) for turn in row.get("messages", ())]
    name = "output_tokens" if "output_tokens" in row else "output_tokens_count"
    known = _whole(row, name) if name in row else 0
    said = said or [("user", row["prompt"])]
    turns, answers = list[str](), list[int]()
    for (who, text), (_, answer) in pairwise([*said, ("", "")]):
        if not isinstance(text, str) or not isinstance(answer, str):
            raise TypeError("a text is not a string")
        if who in ("human", "user") and text:
            turns.append(text)
            answers.append(known or -(-len(answer) // _CHARACTERS))
    if not turns:
        raise ValueError("no text of a user")
    system = "\n\n".join(text for who, text in said if who in ("system", "developer"))
    return Entry(tuple(turns), tuple(answers), system, at=at)


def _whole(row: Mapping[str, Any], name: str) -> int:
    """A number of tokens."""
    number = _seconds(row[name], name)
    if number < 1 or number != int(number):
        raise ValueError(f"{name} is {row[name]!r}, not a number of tokens")
    return int(number)


def _seconds(value: Any, name: str = "timestamp") -> float:
    if isinstance(value, bool | list | dict | None):
        raise TypeError(f"{name} is not a number")
    try:
        number = float(value)
    except ValueError:
        raise ValueError(f"{name} is {value!r:.20}, not a number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}")
    return number
