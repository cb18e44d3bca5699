"""Flags that are settings by another name, and the settings that they come to."""

from __future__ import annotations

import argparse
import dataclasses
import os

from specops.config import PREFIX, Settings


class CommandError(RuntimeError):
    """A command that cannot go on; the message says why."""


def add_settings(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add flags that stand for settings."""
    described = {item.name: item for item in dataclasses.fields(Settings)}
    for name in names:
        text = str(described[name].metadata["help"]).replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", help=text)


def settings_of(options: argparse.Namespace, **fixed: str) -> Settings:
    """Read the environment, the flags above it and the command's own values above both.

    Raises:
        ConfigError: see `Settings.from_env`.
    """
    return Settings.from_env(variables_of(options, **fixed))


def variables_of(options: argparse.Namespace, **fixed: str) -> dict[str, str]:
    """The environment with the flags above it and the command's own values above both."""
    names = {item.name for item in dataclasses.fields(Settings)}
    flags = {
        name: value
        for name, value in vars(options).items()
        if name in names and isinstance(value, str)
    }
    variables = {PREFIX + name.upper(): value for name, value in (flags | fixed).items()}
    return {**os.environ, **variables}
