"""`python -m tests.text.template_cost [FOLDER]`: rendering in the process, and with plain Jinja.

For each template of the tests, or each `*.jinja` in a folder: milliseconds of both for long
conversations, the best of several runs in turns, and whether the texts are the same.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from specops.text.confined_process import ProgramRefusal
from specops.text.template_process import TemplateProcess
from specops.text.template_worker import environment
from tests.text.test_chat_template import TEMPLATES, TOKENS
from tests.text.tools import scripts

LENGTHS = (201, 401, 601)
ROUNDS = 15
MOST_FACTOR, MOST_MORE = 1.25, 0.010
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
# With and without a system message; some templates are only for conversations with tools.
WAYS: tuple[tuple[bool, dict[str, Any]], ...] = (
    (True, {"tools": None}),
    (False, {"tools": None}),
    (False, {"tools": [TOOL], "functions": "weather", "datetime": "today"}),
)


def conversation(messages: int, *, system: bool) -> list[dict[str, Any]]:
    """A conversation of short messages that ends with the user's."""
    roles = ("user", "assistant")
    turns = [
        {"role": roles[i % 2], "content": f"short message number {i}"} for i in range(messages)
    ]
    if system:
        turns[0] = {"role": "system", "content": "Be brief."}
        turns[1:] = [turn | {"role": roles[i % 2]} for i, turn in enumerate(turns[1:])]
    return turns if turns[-1]["role"] == "user" else turns[:-1]


def seconds(call: Callable[[], str]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def compare(process: TemplateProcess, source: str, messages: int) -> tuple[float, float]:
    """Return seconds with plain Jinja and in the process.

    Raises:
        ProgramRefusal: the template takes no such conversation.
    """
    plain = environment(TOKENS).from_string(source)
    refusal = None
    for system, tools in WAYS:
        turns = conversation(messages, system=system)
        values = {"messages": turns, "add_generation_prompt": True, **tools}
        try:
            text = process.render(source, TOKENS, values)
        except ProgramRefusal as error:
            refusal = refusal or error
            continue
        assert text == plain.render(values)
        here = partial(plain.render, values)
        there = partial(process.render, source, TOKENS, values)
        pairs = [(seconds(here), seconds(there)) for _ in range(ROUNDS)]
        return min(one for one, _ in pairs), min(one for _, one in pairs)
    assert refusal is not None
    raise refusal


def main(arguments: list[str]) -> int:
    """Print a line for each template; return 1 if one costs too much."""
    sources = {**TEMPLATES, **scripts.TEMPLATES}
    if arguments:
        files = sorted(Path(arguments[0]).glob("*.jinja"))
        sources = {path.stem: path.read_text(encoding="utf-8") for path in files}
    process = TemplateProcess()
    late = compared = 0
    for name, source in sources.items():
        try:
            pairs = [compare(process, source, length) for length in LENGTHS]
        except ProgramRefusal as error:
            print(f"{name[:48]:48} takes no such conversation: {str(error)[:60]}")
            continue
        compared += 1
        late += any(there > MOST_FACTOR * here + MOST_MORE for here, there in pairs)
        shown = "   ".join(f"{here * 1e3:6.1f} {there * 1e3:6.1f}" for here, there in pairs)
        print(f"{name[:48]:48} {shown}", flush=True)
    process.close()
    print(
        f"{compared} templates, ms with plain Jinja and in the process, "
        f"for {', '.join(map(str, LENGTHS))} messages; "
        f"{late} cost more than {MOST_FACTOR} times plain Jinja and {MOST_MORE * 1e3:g} ms"
    )
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
