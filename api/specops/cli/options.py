"""Flags that several commands share: settings by other names, and the options of an answer."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import TYPE_CHECKING

from specops.config import PREFIX, ConfigError, Settings
from specops.sampling_defaults import RANGES

if TYPE_CHECKING:
    from specops.engine.engine import Engine
    from specops.request import GenerationRequest

_MAX_REQUEST = 1 << 20  # tokens of an answer


class CommandError(RuntimeError):
    """A command cannot go on; the message says why."""


def add_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add flags for these settings."""
    described = {item.name: item for item in dataclasses.fields(Settings)}
    for name in names:
        text = str(described[name].metadata["help"]).replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", help=text)


def settings_of(options: argparse.Namespace, **fixed: str) -> Settings:
    """Read the settings: `fixed` ones override flags, which override the environment.

    Raises:
        ConfigError: see `Settings.from_env`.
    """
    return Settings.from_env(variables_of(options, **fixed))


def variables_of(options: argparse.Namespace, **fixed: str) -> dict[str, str]:
    """Return the environment, overridden by the flags and by the `fixed` settings."""
    names = {item.name for item in dataclasses.fields(Settings)}
    flags = {
        name: value
        for name, value in vars(options).items()
        if name in names and isinstance(value, str)
    }
    variables = {PREFIX + name.upper(): value for name, value in (flags | fixed).items()}
    return {**os.environ, **variables}


def add_generation(parser: argparse.ArgumentParser, *, most: int) -> None:
    """Add the flags of an answer; `most` is the default maximum of its tokens."""
    parser.add_argument(
        "--system", help="system message, as in SPECOPS_SYSTEM; default: the chat model's"
    )
    parser.add_argument("--max-new-tokens", type=int, default=most, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--seed", type=int, help="same seed, same output")
    parser.add_argument("--no-color", action="store_true", help="as with NO_COLOR=1")
    parser.add_argument("--k-draft", type=int, help="a fixed number of draft tokens")


def check_generation(options: argparse.Namespace, settings: Settings) -> None:
    """Check the flags of an answer before anything is loaded.

    Raises:
        ConfigError: a flag has a wrong value.
    """
    if not 1 <= options.max_new_tokens <= _MAX_REQUEST:
        raise ConfigError(f"--max-new-tokens must be 1 to {_MAX_REQUEST}")
    if options.temperature not in RANGES["temperature"]:
        raise ConfigError("--temperature must be 0 to 2")
    if options.seed is not None and options.seed < 0:
        raise ConfigError("--seed must be a whole number, 0 or above")
    if options.k_draft is not None and not 0 <= options.k_draft <= settings.max_k_draft:
        raise ConfigError(f"--k-draft must be 0 to {settings.max_k_draft} (SPECOPS_MAX_K_DRAFT)")


def request_of(
    options: argparse.Namespace, settings: Settings, engine: Engine
) -> GenerationRequest:
    """Return the options of an answer as a request without a prompt."""
    from specops.request import GenerationRequest, SamplingParams  # noqa: PLC0415

    return GenerationRequest(
        request_id="cli",
        prompt_tokens=(),
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingParams(temperature=options.temperature, seed=options.seed),
        drafter=engine.info.default_drafter,
        k_draft=settings.max_k_draft if options.k_draft is None else options.k_draft,
        adaptive=options.k_draft is None,
    )
