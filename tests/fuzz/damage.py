"""Damages the content of files, of JSON or any other kind; random numbers choose how."""

import json
import math
import random
from typing import Any

VALUES: list[Any] = [None, True, -1, 0, 1, 3, 2**31, 2**63, 2**64, 10**400, 1e308, -0.5]
VALUES += [math.inf, math.nan, "", "x", "../x", "\ud800", "x" * 5000, [], {}, [[]], [None]]
VALUES += [{"": None}, ["x", 1], [-1, 2**62], {"x": {"x": []}}]


def damaged(content: bytes, chance: random.Random, is_json: bool) -> bytes:
    """A damaged copy of a file's content; most damages are small."""
    if is_json and chance.random() < 0.7:
        value = json.loads(content)
        for _ in range(chance.choice([1, 1, 2, 5])):
            value = _replaced(value, chance)
        if chance.random() < 0.02:
            return b'{"a":' * 100_000
        return json.dumps(value).encode()
    found = bytearray(content)
    for _ in range(chance.choice([1, 1, 2, 8])):
        _damage(found, chance)
    return bytes(found)


def _damage(content: bytearray, chance: random.Random) -> None:
    at = chance.randrange(len(content) + 1)
    if chance.random() < 0.6:  # the front, where headers are
        at = min(at, chance.choice([4, 16, 64, 512, 4096]))
    length = chance.choice([1, 1, 2, 4, 8, 64])
    match chance.randrange(6):
        case 0:
            content[at : at + 1] = bytes([chance.randrange(256)])
        case 1:
            del content[at : at + length]
        case 2:
            content[at:at] = chance.randbytes(length)
        case 3:
            number = chance.choice([0, 1, -1, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, -(2**63)])
            content[at : at + 8] = number.to_bytes(8, "little", signed=True)
        case 4:
            start = chance.randrange(len(content) + 1)
            content[at : at + length] = content[start : start + length]
        case 5 if chance.random() < 0.2:
            del content[at:]
        case _ if content:
            at = min(at, len(content) - 1)
            content[at] ^= 1 << chance.randrange(8)


def _replaced(value: Any, chance: random.Random) -> Any:
    """A value in which one inner value is replaced or missing."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        key = chance.choice(list(value))
        if chance.random() < 0.15:
            return {name: item for name, item in value.items() if name != key}
        return {**value, key: _replaced(value[key], chance)}
    if isinstance(value, list) and value and chance.random() < 0.9:
        place = chance.randrange(len(value))
        if chance.random() < 0.15:
            return value[:place] + value[place + 1 :]
        return [*value[:place], _replaced(value[place], chance), *value[place + 1 :]]
    return chance.choice(VALUES)
