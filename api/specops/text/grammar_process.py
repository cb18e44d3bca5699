"""Writes and tries grammars in a separate process, which runs `grammar_worker`."""

import atexit
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specops.request import Grammar
from specops.text.confined_process import ConfinedProcess, ProgramLimitExceeded, ProgramRefusal
from specops.text.grammar_source import MEMORY_BYTES, STACK_BYTES, GrammarError, IgnoredKeyword


@dataclass(frozen=True, slots=True)
class Tried:
    """A grammar in the library's form, compiled within the limits.

    Attributes:
        text: the grammar.
        ignored: keywords that answers need not follow.
        effort: how it was written.
        bytes: approximate memory of the compiled grammar.
    """

    text: str
    ignored: tuple[IgnoredKeyword, ...]
    effort: int
    bytes: int


class GrammarProcess(ConfinedProcess):
    """Tries grammars, one after the other. Thread-safe."""

    worker = "specops.text.grammar_worker"
    what = "grammars"
    seconds = 2.0  # the slowest known honest schema takes a sixth of it
    clock_seconds = 30.0

    def tried(self, grammar: Grammar, effort: int, marks: Mapping[str, int], size: int) -> Tried:
        """Write a grammar and compile it with a vocabulary of bytes.

        Args:
            grammar: the client's.
            effort: the first way of writing it to try.
            marks: the tokens that a grammar may name, by their texts.
            size: number of tokens in the model's vocabulary.

        Raises:
            GrammarError: it is wrong, or exceeds a limit.
            ProgramProcessError: no process could try it; a second try may succeed.
        """
        asked = {"grammar": asdict(grammar), "effort": effort, "marks": dict(marks), "size": size}
        try:
            answer: dict[str, Any] = json.loads(self.run(asked))
        except ProgramRefusal as refusal:
            told = json.loads(str(refusal))
            raise GrammarError(told["message"], in_tools=told["in_tools"]) from None
        except ProgramLimitExceeded as limit:
            raise GrammarError(
                f"it is too large, or nested too deeply, to be compiled: it exceeds a limit "
                f"({self.seconds:g} s, {MEMORY_BYTES >> 20} MiB of memory, {STACK_BYTES >> 20} MiB "
                f"of stack): {limit}"
            ) from None
        answer["ignored"] = tuple(IgnoredKeyword(*item) for item in answer["ignored"])
        return Tried(**answer)


SHARED = GrammarProcess()
"""This program's process for grammars."""
atexit.register(SHARED.close)
