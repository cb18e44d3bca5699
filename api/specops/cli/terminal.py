"""Shows the text of `generate` and `chat` as it is generated, and figures after it.

A model's text may contain control sequences, which could rewrite the screen or read the clipboard:
a terminal gets them spelt out. A file or a pipe gets the text unchanged.
"""

import os
import sys
from typing import TextIO

from specops.request import GenerationStats, Output

# Colours of accepted draft tokens, by their origin. Tokens of the target get no colour.
_COLOURS = {"draft": "\x1b[32m", "head": "\x1b[33m", "suffix": "\x1b[36m", "grammar": "\x1b[35m"}
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
# Control characters of ASCII and Latin-1, except tab and line feed, spelt like `\x1b`.
_SPELT_OUT = {
    code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\t\n"
}


def printable(text: str) -> str:
    """Return a text without control characters: `a<ESC>[2J` becomes `a\\x1b[2J`."""
    return text.translate(_SPELT_OUT)


class Terminal:
    """Standard output and standard error. `plain`: never use colours."""

    def __init__(self, *, plain: bool = False) -> None:
        self._plain = plain
        self._colours = _COLOURS if self._wants_colour(sys.stdout) else {}

    def _wants_colour(self, stream: TextIO) -> bool:
        return stream.isatty() and not self._plain and not os.environ.get("NO_COLOR")

    def show(self, output: Output) -> None:
        """Print new text at once, accepted draft tokens in the colour of their origin."""
        for piece in output.pieces:
            colour = self._colours.get(piece.origin, "")
            text = printable(piece.text) if sys.stdout.isatty() else piece.text
            sys.stdout.write(f"{colour}{text}{_RESET}" if colour else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a line on standard error."""
        dim, reset = (_DIM, _RESET) if self._wants_colour(sys.stderr) else ("", "")
        print(f"{dim}{printable(text)}{reset}", file=sys.stderr)


def figures(stats: GenerationStats) -> str:
    """Return the figures of a request as one line."""
    parts = [
        f"{stats.prompt_tokens} + {stats.generated_tokens} tokens",
        f"{stats.tokens_per_second:.1f} tokens/s",
        f"first token after {stats.queue_seconds + stats.prefill_seconds:.2f} s",
        f"{stats.tokens_per_pass:.2f} tokens per pass",
    ]
    if stats.draft_tokens:
        share = stats.accepted_tokens / stats.draft_tokens
        parts.append(
            f"{stats.accepted_tokens} of {stats.draft_tokens} draft tokens accepted ({share:.0%})"
        )
    return " · ".join(parts)
