"""Prompts of four kinds, made from the demo pair's held-out text, which neither model has seen.

The kinds differ in how much a text repeats itself; the docstring of each function says how it makes
its kind. The same seed gives the same prompts on every Python version.
"""

import ast
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from specops.request import SamplingParams
from training.corpus import Document, heldout_prompts, read_held_out
from training.corpus import read_prompts as shipped_prompts

GREEDY = SamplingParams()
CODE, STRUCTURED, EXTRACTIVE, CREATIVE = "code", "structured", "extractive", "creative"
CATEGORIES = (CODE, STRUCTURED, EXTRACTIVE, CREATIVE)
OWN = "own"
# Greedy prose of such a small model soon repeats itself, which would favour lookup drafters.
_CREATIVE_TEMPERATURE = 0.8

_RECORDS = 10  # in a structured prompt
_PASSAGE_LINES = 16  # in an extractive prompt
_REPEATED_LINES = 2
_MIN_PROSE, _MAX_PROSE = 30, 120  # words of a paragraph


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, and the sampling parameters of its answer."""

    category: str
    text: str
    sampling: SamplingParams = GREEDY
    output: int | None = None  # tokens of the answer; None: the benchmark chooses


def by_category(each: int, categories: tuple[str, ...] = CATEGORIES) -> list[Prompt]:
    """`each` prompts of every category, category by category."""
    return [
        Prompt(category, text, _sampling(category, number))
        for category in categories
        for number, text in enumerate(_MAKERS[category](each))
    ]


def code(count: int) -> list[Prompt]:
    """Prompts of held-out code: the first lines of a function or class."""
    return [Prompt(CODE, text) for text in _code(count)]


def from_file(path: Path) -> list[Prompt]:
    """Read prompts from JSON lines with `prompt` and optionally `category` and
    `output_tokens_count`."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
    return [
        Prompt(row.get("category", OWN), row["prompt"], output=row.get("output_tokens_count"))
        for row in rows
    ]


def _sampling(category: str, seed: int) -> SamplingParams:
    if category != CREATIVE:
        return GREEDY
    return SamplingParams(temperature=_CREATIVE_TEMPERATURE, top_p=0.95, seed=seed)


def _code(count: int) -> list[str]:
    """The first 8, 16 or 32 lines of a function or a class: the shipped prompts, or more."""
    shipped = shipped_prompts()
    return shipped[:count] if count <= len(shipped) else heldout_prompts(count)


def _structured(count: int) -> list[str]:
    """JSON records of a module's functions, one per line. The model continues the list."""
    prompts = []
    for document in read_held_out():
        functions = _functions(document)
        for start in range(0, len(functions) - _RECORDS + 1, _RECORDS):
            records = functions[start : start + _RECORDS]
            prompts.append("".join(json.dumps(record) + ",\n" for record in records))
    return _some(prompts, count, STRUCTURED)


def _functions(document: Document) -> list[dict[str, object]]:
    walked = ast.walk(ast.parse(document.text))
    nodes = [node for node in walked if isinstance(node, ast.FunctionDef)]
    return [
        {"module": document.path, "name": node.name, "line": node.lineno}
        | {"args": [argument.arg for argument in node.args.args]}
        for node in sorted(nodes, key=lambda node: node.lineno)
    ]


def _extractive(count: int) -> list[str]:
    """16 lines of a function, then its first 2 lines again. The model repeats the rest."""
    prompts = []
    for document in read_held_out():
        lines = document.text.splitlines()
        for start, line in enumerate(lines):
            passage = lines[start : start + _PASSAGE_LINES]
            if line.startswith("    def ") and len(passage) == _PASSAGE_LINES:
                again = passage[:_REPEATED_LINES]
                lines_of = [*passage, "", "    # The same again:", "", *again]
                prompts.append("\n".join(lines_of) + "\n")
    return _some(prompts, count, EXTRACTIVE)


def _creative(count: int) -> list[str]:
    """Half of a docstring's paragraph, of 30 to 120 words and mostly prose; sampled answers."""
    prompts = []
    for document in read_held_out():
        for node in ast.walk(ast.parse(document.text)):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                continue
            for paragraph in re.split(r"\n\s*\n", ast.get_docstring(node) or ""):
                if _is_prose(paragraph):
                    words = paragraph.split(" ")
                    prompts.append('"""' + " ".join(words[: len(words) // 2]))
    return _some(prompts, count, CREATIVE)


def _is_prose(paragraph: str) -> bool:
    words = paragraph.split()
    if not _MIN_PROSE <= len(words) <= _MAX_PROSE:
        return False
    return sum(word.strip(".,;:()").isalpha() for word in words) > 0.85 * len(words)


def _some(prompts: list[str], count: int, category: str) -> list[str]:
    unique = sorted(set(prompts))
    if count > len(unique):
        raise ValueError(f"the held-out text has {len(unique)} {category} prompts, not {count}")
    return random.Random(0).sample(unique, count)


_MAKERS: dict[str, Callable[[int], list[str]]] = {
    CODE: _code,
    STRUCTURED: _structured,
    EXTRACTIVE: _extractive,
    CREATIVE: _creative,
}
