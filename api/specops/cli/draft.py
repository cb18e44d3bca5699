"""`specops draft make`: a draft head for a model, made on this machine of the model's own words."""

from __future__ import annotations

import argparse
import math
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from specops.cli.options import CommandError, add_settings, settings_of
from specops.config import ConfigError

if TYPE_CHECKING:
    Commands = argparse._SubParsersAction[argparse.ArgumentParser]

_MINUTES = 60.0


def add_draft(commands: Commands) -> None:
    """Add the command."""
    draft = commands.add_parser("draft", help="make draft tokens cheaper")
    actions = draft.add_subparsers(required=True, metavar="WHAT")
    make = actions.add_parser("make", help="train a draft head for a model on its own words")
    make.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    make.add_argument(
        "--minutes", type=float, default=_MINUTES, metavar="N", help="default: %(default)g"
    )
    add_settings(make, "model", "target", "quant", "threads")
    make.set_defaults(command=_make)


def _make(options: argparse.Namespace) -> int:
    if not 0 < options.minutes < math.inf:
        raise ConfigError("--minutes takes a number above 0")
    if find_spec("torch") is None:
        raise CommandError(
            "making a head needs torch, which serving does not: install it with "
            "`pip install 'specops[train]'`, in a clone `pip install -e '.[train]'`"
        )
    from specops.heads.making import make_head  # noqa: PLC0415

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        found = make_head(settings_of(options), options.out, options.minutes, tell)
    except RuntimeError as error:
        raise CommandError(error) from error
    print(f"{options.out}: {found.verdict}")
    return 0
