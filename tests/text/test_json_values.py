"""JSON of models and clients becomes values that can be written, or an error."""

import json
from typing import Any

import pytest

from specops.text.json_values import DEEPEST, dumps, loads, writable

BIG = 10**40


def nested(depth: int) -> str:
    return '{"a":' * depth + "[]" + "}" * depth


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": "\\ud83d\\ude00"}', {"a": "😀"}),
        ('{"a": "x\\ud83d"}', {"a": "x\ufffd"}),
        ('{"\\udc00": 1}', {"\ufffd": 1}),
        (f'{{"a": {BIG}}}', {"a": BIG}),
    ],
)
def test_what_is_read_can_be_written(text: str, value: Any) -> None:
    assert loads(text) == value
    assert json.loads(dumps(loads(text))) == value


@pytest.mark.parametrize("text", ["", "{", nested(DEEPEST), nested(5_000), "1" * 5_000])
def test_what_cannot_be_used_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        loads(text)


def test_an_object_of_a_client_is_kept_or_refused() -> None:
    deep = json.loads(nested(DEEPEST - 1))
    assert writable(deep) is deep
    assert dumps({"around": [{"it": deep}]})
    with pytest.raises(ValueError, match=f"more than {DEEPEST} objects"):
        writable({"a": deep})
    for value in ({"a": ["\ud800"]}, {"\udfff": 1}):
        with pytest.raises(ValueError, match="unpaired surrogate"):
            writable(value)
