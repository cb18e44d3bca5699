"""Makes a model's table of n-grams: conversations, the table, measurements, the model card.

All intermediate files stay in a folder next to the new one. So a call can continue after an
interruption, and a later call with more time continues the work of earlier ones.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specops.config import Settings
from specops.engine.engine import Engine
from specops.models.errors import ModelError
from specops.models.head_folder import NGRAMS
from specops.models.hub import CONFIG
from specops.models.prepare import choose, prepare
from specops.models.progress import every
from specops.ngrams.card import card
from specops.ngrams.conversations import Writer
from specops.ngrams.evaluation import Evaluation, evaluate
from specops.ngrams.storage import Conversation, ConversationStore
from specops.ngrams.table import make_table
from specops.system.folders import atomic_file, atomic_folder

_WRITING = 0.9  # share of the time; the rest is for measurements
_SLOTS, _CONTEXT = 24, 512  # for writing; measuring uses the same context
_HELD_OUT = 19  # every 19th conversation is held out; this covers all temperatures
_REPORT_SECONDS, _SAVE_SECONDS = 20.0, 60.0
_NOTHING = (  # formatted with their number
    "the model's first {} texts repeat themselves or end at once, so their n-grams say nothing: "
    "look at its answers (`specops generate`), and take other weights or another model"
)

Tell = Callable[[str], None]


def make_ngrams(
    settings: Settings,
    out: Path,
    minutes: float,
    tell: Tell,
    *,
    more: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> list[Evaluation]:
    """Make a model's table of n-grams; return its measurements, one per temperature.

    Args:
        settings: name the model; the draft settings are ignored.
        out: the folder to write; `out` with the suffix `.making` keeps the intermediate files.
        minutes: duration of the whole work, over all calls, without loading.
        tell: called with progress lines.
        more: add the minutes to those of earlier calls.
        clock: returns seconds.

    Raises:
        ModelError, ModelLoadError, ConfigError, TokenizerError: the message says what to do.
        PromptTooLong: the model's context is shorter than the start of a conversation.
        OSError: a folder cannot be written, or `out` contains anything but a table.
    """
    out = out.resolve()
    if (out / CONFIG).exists():
        raise ModelError(f"{out} is the folder of a model or a draft head: choose another --out")
    with atomic_folder(out, NGRAMS) as path:
        work = out.with_name(f"{out.name}.making")
        progress = Progress(work / "progress.json", clock)
        try:
            made = _make(settings, path, progress, tell, minutes=minutes, more=more)
        except OSError as error:  # errors of writing to an open file do not name it
            code = error.errno or errno.ENOSPC  # numpy's error for a full disk has no number
            raise OSError(code, os.strerror(code), error.filename or str(work)) from error
    progress.known["finished"] = True  # only now, after it has replaced an earlier table
    progress.save()
    return made


def _make(
    settings: Settings, path: Path, progress: Progress, tell: Tell, *, minutes: float, more: bool
) -> list[Evaluation]:
    """Make a table in the folder `path`; intermediate files go to the folder of `progress`."""
    alone = replace(settings, draft="none", drafter="none", slots=_SLOTS, context=_CONTEXT)
    choice = choose(alone)
    folder = prepare(
        choice.target, choice.target_quant, name=choice.name, cache_dir=alone.cache_dir, report=tell
    )
    progress.keep_to(choice.name, folder.source_digest, folder.hidden_size)
    minutes = progress.plan(minutes, more=more)
    conversations = _written(
        lambda first: Writer(Engine.load(alone), first), progress, 60 * _WRITING * minutes, tell
    )
    unseen = [item for item in conversations if item.number % _HELD_OUT == 0]
    texts = [item for item in conversations if item.number % _HELD_OUT]
    if not texts or not unseen:
        raise ModelError(
            f"{choice.name} has written too little to count ({len(conversations)} texts; those "
            "that repeat themselves or end at once do not count): the same command with more "
            "--minutes continues from here"
        )
    np.save(path / NGRAMS, make_table(texts))
    own = choose(replace(settings, draft="")).draft
    before = "none"
    if isinstance(own, Path) and (own / NGRAMS).is_file():
        before = str(own)
        tell(f"{choice.name} comes with a table: the new one is measured against it")
    left = 60 * (1 - _WRITING) * minutes
    tell(f"measuring the table on held-out conversations, for about {max(1, left / 60):.0f} min")
    # In the context in which they were written: they might not fit into a shorter one.
    served = replace(settings, draft=str(path), drafter="", context=_CONTEXT)
    evaluations = evaluate(served, before, unseen, left, progress.clock)
    text = card(
        choice.name,
        evaluations,
        conversations=conversations,
        minutes=progress.known["written"] / 60,
        before="no table" if before == "none" else "the preset's table",
    )
    (path / "README.md").write_text(text, encoding="utf-8")
    return evaluations


class Progress:
    """The state of the work on a table, saved in a file.

    Args:
        file: the file; its folder is created if missing.
        clock: returns seconds.

    Attributes:
        folder: the folder of the file.
        conversations: the file with the model's texts.
        known: the content: seconds of writing so far (`written`), and the methods' additions.

    Raises:
        ModelError: the file is damaged or from another version.
    """

    def __init__(self, file: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._file, self.folder, self.clock = file, file.parent, clock
        self.conversations = self.folder / "conversations.i32"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.known: dict[str, Any] = {"written": 0.0}
        if file.exists():
            try:
                self.known |= json.loads(file.read_text(encoding="utf-8"))
            except (ValueError, TypeError) as error:
                raise ModelError(
                    f"{self.folder} was left by an earlier version, or is damaged ({error}): "
                    "remove it, or choose another --out"
                ) from error

    def save(self) -> None:
        """Write the file."""
        with atomic_file(self._file) as partial:
            partial.write_text(json.dumps(self.known) + "\n", encoding="utf-8")

    def keep_to(self, name: str, source_digest: str, hidden_size: int) -> None:
        """Record the model of the conversations. Its quantization does not matter.

        Args:
            name: name of the model.
            source_digest: digest of its source; empty: unknown.
            hidden_size: width of its layers.

        Raises:
            ModelError: the folder's conversations are from another model.
        """
        if not self.conversations.exists():  # an earlier model left nothing
            self.known.pop("target", None)
        own = {"source_digest": source_digest or name, "hidden_size": hidden_size}
        known = self.known.setdefault("target", {"name": name, **own})
        if any(known[key] != own[key] for key in own):
            raise ModelError(
                f"{self.folder} has conversations of another model or another download of it, "
                f"{known['name']}: choose another --out, or remove that folder"
            )
        self.save()

    def plan(self, minutes: float, *, more: bool) -> float:
        """The minutes of the whole work. An unfinished call, repeated, keeps its total.

        Fewer minutes never shorten finished work; `more` adds to it.
        """
        asked = {"minutes": minutes, "more": more}
        before, finished = self.known.get("minutes", 0.0), self.known.get("finished", True)
        if finished or self.known["asked"] != asked:
            planned = before + minutes if more else max(minutes, before if finished else 0.0)
            self.known |= {"minutes": planned, "asked": asked, "finished": False}
            self.save()
        whole: float = self.known["minutes"]
        return whole


def _written(
    open_writer: Callable[[int], Writer], progress: Progress, seconds: float, tell: Tell
) -> list[Conversation]:
    """All conversations, after writing more until all calls together have taken `seconds`.

    Args:
        open_writer: loads the engine; takes the number of the first new conversation.
        progress: the state so far, updated.
        seconds: time for writing, over all calls.
        tell: called with progress lines.

    Raises:
        ModelError: the model writes nothing useful.
    """
    store = ConversationStore(progress.conversations)
    found = store.read()
    before = spent = progress.known["written"]
    if spent >= seconds:
        return found
    writer = open_writer(1 + max((item.number for item in found), default=-1))
    tokens, begun = 0, progress.clock()
    tell_due, save_due = every(_REPORT_SECONDS), every(_SAVE_SECONDS)

    def keep(conversations: list[Conversation]) -> None:
        for conversation in conversations:
            store.add(conversation)
            found.append(conversation)

    try:
        while spent < seconds:
            new = writer.write()
            spent = before + progress.clock() - begun
            keep(new)
            tokens += sum(len(item.tokens) for item in new)
            if writer.writes_nothing and not found:
                raise ModelError(_NOTHING.format(writer.ended.total()))
            if tell_due():
                tell(
                    f"writing: {tokens:,} tokens, {tokens / (spent - before):,.0f} tokens/s, "
                    f"{writer.kept:,} of {writer.ended.total():,} texts kept, "
                    f"about {max(0.0, seconds - spent) / 60:.0f} min of writing left"
                )
            if save_due():
                progress.known["written"] = spent
                progress.save()
    finally:
        keep(writer.unfinished())
        progress.known["written"] = spent
        progress.save()
    return found
