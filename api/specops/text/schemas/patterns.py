"""Writes regular expressions for strings: formats, complements, and look-ahead.

llguidance enforces ten formats and regular expressions without look-around. A string may have to
match several expressions at once, so a look-ahead at the beginning of an expression becomes a
separate expression: `^(?=.*[0-9])[a-z0-9]+$` is `^.*[0-9]` and `^[a-z0-9]+$`. Negative look-aheads
are rewritten only in the few forms that schema writers produce.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

# The library enforces these.
ENFORCED_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri"})
# Wider formats, each with a subset that the library enforces.
NARROWED_FORMATS = {"idn-email": "email", "idn-hostname": "hostname", "iri": "uri", "url": "uri"}
_BASE64 = r"^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$"
_PATH = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=/]|%[0-9A-Fa-f]{2})*"
_UUID = "^[0-9a-f]{{8}}-[0-9a-f]{{4}}-{}[0-9a-f]{{3}}-[89ab][0-9a-f]{{3}}-[0-9a-f]{{12}}$"
# RFC 3339 without leap seconds, and from the year 1: clients cannot read earlier years.
_LEAP_YEAR = r"(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|0[48]|[13579][26])00)"
_DATE = (
    rf"(?:{_LEAP_YEAR}-02-29|"
    r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])-"
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|"
    r"(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8])))"
)
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
FORMAT_PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}[Tt]{_TIME}$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
    "json-pointer": r"^(?:/(?:[^~/]|~[01])*)*$",
    "relative-json-pointer": r"^(?:0|[1-9][0-9]*)(?:#|(?:/(?:[^~/]|~[01])*)*)$",
    # RFC 3986: without ports, users and colons in paths.
    "uri-reference": rf"^(?:[A-Za-z][A-Za-z0-9+.\-]*:)?{_PATH}"
    rf"(?:\?{_PATH})?(?:#{_PATH})?$",
    "byte": _BASE64,
    "base64": _BASE64,
    "base64url": r"^[A-Za-z0-9_\-]*={0,2}$",
    **{f"uuid{version}": _UUID.format(version) for version in range(1, 9)},
}
# Formats that allow any text. zod adds a pattern to the last three.
FREE_FORMATS = frozenset({"binary", "string", "text", "starts_with", "ends_with", "includes"})
# zod's formats, to each of which it adds an equivalent pattern.
SAID_BY_PATTERN = frozenset(
    {
        *("cidrv4", "cidrv6", "cuid", "cuid2", "e164", "emoji", "guid", "ksuid", "nanoid", "ulid"),
        *("lowercase", "uppercase", "xid"),
    }
)

_GROUP = re.compile(r"\^?\(\?([=!])")
_SIGN = r"\\[.^$*+?()\[\]{}|\\/\-]"
_LETTER = rf"(?:[^\\()\[\]{{}}|*+?.^$]|\\[dDsSwWfnrtv]|{_SIGN})"
_CLASS = rf"(?:\[\^?(?:\\.|[^\]\\])+\]|{_LETTER})"
_SEVERAL = re.compile(r"\\[dDsSwW]")  # an escape that stands for several characters


def split_lookahead(pattern: str) -> list[str] | None:
    """Return expressions that together are equivalent to `pattern`: a text must match all of them.

    None: the pattern has look-around that cannot be split off.

    >>> split_lookahead("^(?=.*[0-9])[a-z0-9]+$")
    ['^.*[0-9]', '^[a-z0-9]+$']
    """
    if not pattern.startswith("^") and "(?=" not in pattern and "(?!" not in pattern:
        return [pattern]
    rest, parts = pattern.removeprefix("^"), []
    anchored = pattern.startswith("^")
    while (group := _GROUP.match(rest)) is not None:
        end = _closing(rest, rest.index("("))
        if end is None or not (anchored or rest.startswith("^")):
            return None
        inner = rest[group.end() : end].removeprefix("^")
        part = f"^(?:{inner})" if "|" in inner else f"^{inner}"
        if group[1] == "!":
            refused = _refusing(inner)
            if refused is None:
                return None
            part = refused
        parts.append(part)
        anchored, rest = True, rest[end + 1 :]
    if re.search(r"\(\?(?:[=!]|<[=!])", rest) or (parts and _alternatives(rest)):
        return None
    parts.append(("^" + rest if anchored else rest) if rest != "" else "^")
    return parts


def _closing(text: str, opening: int) -> int | None:
    """Return the index of the parenthesis that closes the one at `opening`."""
    depths = _operators(text[opening:])
    return next((opening + at for at, sign, depth in depths if sign == ")" and not depth), None)


def _alternatives(text: str) -> bool:
    """Whether an expression has `|` outside groups."""
    return any(sign == "|" and not depth for _, sign, depth in _operators(text))


def _operators(text: str) -> Iterator[tuple[int, str, int]]:
    """Yield each parenthesis, `|`, `^` and `$` with its index and depth; groups add a level."""
    depth, in_class = 0, False
    for token in re.finditer(r"\\.|.", text, re.DOTALL):
        sign = token[0]
        if in_class:
            in_class = sign != "]"
        elif sign == "[":
            in_class = True
        elif sign in "()|^$":
            depth -= sign == ")"
            yield token.start(), sign, depth
            depth += sign == "("


_ANYTHING = r"(.|\n)*"


def whole(pattern: str, before: str = _ANYTHING, after: str = _ANYTHING) -> str | None:
    """Return an expression that matches the whole of any text in which `pattern` matches.

    None: the pattern has inner anchors.

    Args:
        pattern: a JSON schema's regular expression.
        before: expression of what may precede the match.
        after: expression of what may follow it.

    >>> whole("^ab|c$")
    '(ab(.|\\n)*|(.|\\n)*c)'
    """
    bars = [at for at, sign, depth in _operators(pattern) if sign == "|" and not depth]
    options = [
        _whole_option(pattern[start + 1 : end], before, after)
        for start, end in pairwise([-1, *bars, len(pattern)])
    ]
    known = [option for option in options if option is not None]
    return f"({'|'.join(known)})" if len(known) == len(options) else None


def _whole_option(option: str, before: str, after: str) -> str | None:
    if option.startswith("^"):
        option, before = option.lstrip("^"), ""
    signs = [*_operators(option)]
    while signs and signs[-1] == (len(option) - 1, "$", 0):
        option, after = option[:-1], ""
        signs.pop()
    group = re.match(r"\((?:\?:|\?P?<\w+>|(?!\?))", option)
    if group is not None and _closing(option, 0) == len(option) - 1:
        return whole(option[group.end() : -1], before, after)
    anchored = any(sign in "^$" for _, sign, _ in signs)
    return None if anchored else f"{before}{option}{after}"


def _refusing(inner: str) -> str | None:
    """Return an expression of the texts that do not begin with `inner`; None if it is complex."""
    if match := re.fullmatch(rf"({_CLASS})[*]\$", inner):
        return _negated_class(match[1])
    if match := re.fullmatch(rf"\.\*({_LETTER}{{1,2}})", inner):
        letters = re.findall(r"\\?.", match[1])
        alike = len({re.sub(r"\\(?=\W)", "", letter) for letter in letters}) == 1
        if alike or not any(map(_SEVERAL.match, letters)):  # else one may include the other
            return _without([letters[0]] * len(letters) if alike else letters)
    if re.fullmatch(_CLASS, inner):
        return f"^(?:$|{_negated_class(inner)})"
    return None


def _negated_class(letters: str) -> str:
    if letters.startswith("[^"):
        return "[" + letters[2:]
    return "[^" + letters[1:] if letters.startswith("[") else f"[^{letters}]"


def _without(letters: Sequence[str]) -> str:
    """Return an expression of the texts in which these one or two letters never occur in a row."""
    first, last = letters[0], letters[-1]
    if len(letters) == 1:
        return f"^[^{first}]*$"
    if first == last:
        return f"^(?:(?:{first})?[^{first}])*(?:{first})?$"
    return f"^(?:[^{first}]|{first}+[^{first}{last}])*{first}*$"


def complement(texts: Sequence[str]) -> str:
    """Return an expression of all texts but these.

    >>> re.search(complement(["ab"]), "ab"), bool(re.search(complement(["ab"]), "a"))
    (None, True)
    """
    return f"^{_other(sorted(set(texts)))}$"


def _other(texts: Sequence[str]) -> str:
    if not texts:
        return r"(?s:.*)"
    following: dict[str, list[str]] = {}
    for text in texts:
        if text:
            following.setdefault(text[0], []).append(text[1:])
    options = [] if "" in texts else [""]
    options += [f"{_letter(first)}{_other(rest)}" for first, rest in following.items()]
    others = f"[^{''.join(map(_letter, following))}]" if following else "(?s:.)"
    options.append(f"{others}(?s:.*)")
    return f"(?:{'|'.join(options)})"


def _letter(letter: str) -> str:
    return letter if letter.isalnum() else rf"\x{{{ord(letter):x}}}"
