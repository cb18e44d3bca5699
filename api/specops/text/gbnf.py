"""Translates GBNF, the language of llama.cpp's grammars, to the grammar library's Lark.

The library has a translator. This module first rewrites what the translator would misread: codes of
characters, `.` for any character, and a rule named like Lark's first one.
"""

import re

from llguidance.gbnf_to_lark import gbnf_to_lark

# Lark has no line that begins like a rule of GBNF.
_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_PART = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^]\\])*\]|#.*|[\w-]+|\.')
_CODE = re.compile(r"\\(?:x(..)|u(.{4})|U(.{8}))")
_WIDE_CODE = re.compile(
    r"\\(?:u(.{4})|U(.{8}))"
)  # of the others, regular expressions know the form


def is_gbnf(text: str) -> bool:
    """Return whether a grammar is written in GBNF rather than in Lark."""
    return _RULE.search(text) is not None


def to_lark(text: str) -> str:
    """Return a grammar in GBNF as Lark; the rule `root` becomes `start`.

    Lark's terminals are greedy: `[a-z]*` as a separate rule also takes the `x` of a following
    `"x"`. So answers follow the grammar, but some texts that it allows never occur.

    Raises:
        ValueError: it is not GBNF; the message says where.
    """
    try:
        lark = gbnf_to_lark(_PART.sub(_spelled, text))
        lark.encode()
    except MemoryError:
        raise
    except Exception as error:  # the library raises errors of any kind
        raise ValueError(f"this GBNF cannot be read: {error or type(error).__name__}") from None
    return lark


def _spelled(match: re.Match[str]) -> str:
    part = match[0]
    if part[0] in '"[':
        return (_CODE if part[0] == '"' else _WIDE_CODE).sub(_letter, part)
    return {".": r"[^\x00]", "start": "start-of-client"}.get(part, part)


def _letter(match: re.Match[str]) -> str:
    letter = chr(int(next(filter(None, match.groups())), 16))
    return f"\\{letter}" if letter in '"\\[]' else letter
