"""Limits for chat templates: a template that takes too much time or memory is refused.

A chat template comes from strangers, with the model's weights. Jinja's sandbox keeps the template
away from Python, but would let it loop for days or write terabytes of text. So loops, calls and
operators check the time here, and a value is made only if its largest possible size is allowed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Characters and items of a value. A request has at most 1 MiB, and a template adds little to it.
_MOST = 4 << 20
_MOST_SAID = 4 * _MOST  # characters of output, also of output that goes into another value
_SECONDS = 1.0  # CPU time of one rendering
_WIDTH = re.compile(r"\d{4}|\*")  # large width in a format
_MADE = (nodes.List, nodes.Dict, nodes.Tuple, nodes.Concat)
_state: ContextVar[_State] = ContextVar("state")


@dataclass(slots=True)
class _State:
    """One rendering: its deadline in CPU seconds of the thread, and characters of output so far."""

    end: float
    said: int = 0


@contextmanager
def limited() -> Iterator[None]:
    """Limit the rendering in this block; a template that exceeds the limits gets SecurityError."""
    token = _state.set(_State(time.thread_time() + _SECONDS))
    try:
        yield
    finally:
        _state.reset(token)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Compiles templates that check the limits when they are rendered in `limited`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, filters: Mapping[str, Callable[..., Any]], **options: Any) -> None:
        super().__init__(**options)
        known = {**self.filters, **filters}
        self.filters = {name: _watched(name, function) for name, function in known.items()}
        self.filters |= {"_turns": _turns, "_made": _require_small, "_said": _said}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """Send loops, new collections and output through filters that check the limits."""
        tree = super()._parse(source, name, filename)
        for node in [tree, *tree.find_all(nodes.Node)]:
            for field, value in node.iter_fields():
                made = [_through_filters(one) for one in value] if isinstance(value, list) else None
                setattr(node, field, made or _through_filters(value))
            if isinstance(node, nodes.For):
                node.iter = _filtered(node.iter, "_turns")
            if isinstance(node, nodes.Output):
                node.nodes = [_filtered(_value(one), "_said") for one in node.nodes]
        return tree

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Make a call of a template."""
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `format`
        given = [getattr(method, "__self__", None), *args, *kwargs.values()]
        _require_modest(getattr(obj, "__name__", ""), given)
        return _require_small(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator whose result may be large."""
        if operator == "**":
            _require(_size(left) * _times(right))
        elif operator == "*":
            numbers = isinstance(left, int) and isinstance(right, int)
            _require(_size(left) + _size(right) if numbers else _times(left) * _times(right))
        elif operator == "%":
            _require_modest("format", [left])
        value = super().call_binop(context, operator, left, right)
        _require(len(value) if hasattr(value, "__len__") else _size(value))
        return value


def _through_filters(value: Any) -> Any:
    stored = getattr(value, "ctx", "load") != "load"
    return _filtered(value, "_made") if isinstance(value, _MADE) and not stored else value


def _value(node: nodes.Node) -> nodes.Node:
    """Turn plain text of a template into an expression."""
    if isinstance(node, nodes.TemplateData):
        return nodes.Const(node.data, lineno=node.lineno)
    return node


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def filtered(*args: Any, **kwargs: Any) -> Any:
        args = tuple(_collected(one) if isinstance(one, Iterator) else one for one in args)
        _require_modest(name, [*args, *kwargs.values()])
        return _require_small(function(*args, **kwargs))

    return filtered


def _turns(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _require(0)
        yield item


def _collected(items: Iterator[Any]) -> list[Any]:
    found: list[Any] = []
    size = 0
    for item in items:
        size += _size(item)
        _require(size)
        found.append(item)
    return found


@pass_context  # else Jinja would call it when it compiles the template
def _said(_context: Context, value: Any) -> Any:
    _require(0)
    if (state := _state.get(None)) is not None:
        state.said += len(value) if isinstance(value, str) else _size(value)
        if state.said > _MOST_SAID:
            raise SecurityError("it says too much")
    return value


def _require(size: int) -> None:
    """Raise SecurityError if a value of this size is too large, or if time is up."""
    if size > _MOST:
        raise SecurityError("it makes too large a value")
    if (state := _state.get(None)) is not None and time.thread_time() > state.end:
        raise SecurityError("it takes too long")


def _require_small(value: Any) -> Any:
    _require(_size(value))
    return value


def _require_modest(name: str, given: list[Any]) -> None:
    """Raise SecurityError if the largest possible result of a call is too large.

    A number may be a width of each line and item, and a text may be put between any two others.
    """
    texts = [one for one in given if isinstance(one, str)]
    if name == "translate" or (name == "format" and any(map(_WIDTH.search, texts))):
        raise SecurityError(f"{name} may make too much of it")
    factors = [abs(one) for one in given if isinstance(one, int)]
    if name in ("replace", "join"):
        factors += map(len, texts[1:] if isinstance(given[0], str) else texts)
    _require(sum(map(_size, given)) * max(1, *factors, 1))


def _times(value: Any) -> int:
    """Return the number of repetitions, or the size of the repeated value."""
    return abs(value) if isinstance(value, int) else _size(value)


def _size(value: Any) -> int:
    """Count characters, bytes or digits of a value and of all values in it."""
    size, todo = 0, [value]
    while todo and size <= _MOST:
        one = todo.pop()
        size += 1
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, int):
            size += one.bit_length() // 3
        elif isinstance(one, dict):
            todo += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            todo += one
    return size
