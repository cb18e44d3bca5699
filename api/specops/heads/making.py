"""Makes a head for a model: conversations, training, calibration, the checkpoint, measurements.

All intermediate files stay in a folder beside the new one. So a call can continue after an
interruption, and a later call with more time continues the work of earlier ones.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specops.config import Settings
from specops.engine.engine import Engine
from specops.heads.card import card
from specops.heads.checkpoint import CONFIG, write_head
from specops.heads.conversations import Writer
from specops.heads.convert import target_of
from specops.heads.evaluation import Evaluation, evaluate
from specops.heads.network import HeadNetwork, layers_read, new_config
from specops.heads.ngrams import make_table
from specops.heads.on_gpu import TorchTeacher, TorchWriter, load_target
from specops.heads.storage import Conversation, ConversationStore
from specops.heads.target_rows import output_rows
from specops.heads.teacher import LENGTH, EngineTeacher, Teacher, graph_with_states
from specops.heads.training import Training, acceptance, calibrate, rounds
from specops.models.folder import ModelError
from specops.models.head_folder import NGRAMS, is_head_checkpoint, refuse_former_head
from specops.models.prepare import choose, located, prepare
from specops.models.progress import every
from specops.system.cpus import available_threads
from specops.system.folders import file_at_once, folder_at_once

_TOKENS = 8192  # that a head can guess: 94 % of what a chat model of 49,152 tokens writes
_WRITING, _TRAINING = 0.35, 0.6  # shares of the time; the rest is for measurements
_SLOTS = 24  # while conversations are written
_HELD_OUT = 19  # one conversation of so many is used for measuring only; of all temperatures
_UNSEEN = 400  # of which so many: with 80,000 tokens a share of 0.4 is known within 0.004
_REPORT_SECONDS, _SAVE_SECONDS = 20.0, 60.0
_NOTHING = (  # with their number
    "the model's first {} texts repeat themselves or end at once, so no head can learn from them: "
    "look at its answers (`specops generate`), and take other weights or another model"
)

Tell = Callable[[str], None]


def make_head(
    settings: Settings,
    out: Path,
    minutes: float,
    tell: Tell,
    *,
    more: bool = False,
    device: str = "cpu",
    clock: Callable[[], float] = time.monotonic,
) -> list[Evaluation]:
    """Make a draft head; return what was measured of it, by temperature.

    Args:
        settings: name the target; settings of drafts are ignored.
        out: the folder to write; `out` with the suffix `.making` keeps the intermediate files.
        minutes: duration of the whole work, over all calls; loading is not counted.
        tell: called with progress lines.
        more: add the minutes to what earlier calls were given.
        device: where the target writes and the head learns. "cpu": on the engine, and beside it;
            another one of torch's: there, the target's checkpoint by transformers.
        clock: returns seconds.

    Raises:
        ModelError, ModelLoadError, ConfigError, TokenizerError: the message says what to do.
        PromptTooLong: the model's context is shorter than the start of a conversation.
        OSError: a folder cannot be written, or `out` is something else than a head.
    """
    out = out.resolve()
    refuse_former_head(out)
    if (out / CONFIG).exists() and not is_head_checkpoint(out):
        raise ModelError(f"{out} is a model's folder: choose another --out")
    with folder_at_once(out, CONFIG) as path:
        work = out.with_name(f"{out.name}.making")
        progress = Progress(work / "progress.json", clock)
        try:
            made = _make(settings, path, progress, device, tell, minutes=minutes, more=more)
        except OSError as error:  # who writes to an open file does not name it
            code = error.errno or errno.ENOSPC  # of which numpy has words of its own
            raise OSError(code, os.strerror(code), error.filename or str(work)) from error
    progress.known["finished"] = True  # now that it has taken the place of an earlier one
    progress.save()
    return made


def _make(
    settings: Settings,
    path: Path,
    progress: Progress,
    device: str,
    tell: Tell,
    *,
    minutes: float,
    more: bool,
) -> list[Evaluation]:
    """Make a head in the folder `path`; intermediate files lie beside that of `progress`."""
    alone = replace(settings, draft="none", drafter="none", slots=_SLOTS, context=LENGTH)
    choice = choose(alone)
    folder = prepare(
        choice.target, choice.target_quant, name=choice.name, cache_dir=alone.cache_dir, report=tell
    )
    progress.keep_to(choice.name, folder.source_digest, folder.hidden_size)
    target = target_of(folder.graph, folder.context_length)
    if folder.hidden_size not in (0, target.hidden_size):
        raise ModelError(
            f"{choice.name} cannot have a draft head: its layers' states have "
            f"{folder.hidden_size} values, and its embedding {target.hidden_size}"
        )
    if folder.mtp is not None:
        tell(
            f"{choice.name} has an MTP block, which serves as its draft head already; the new head "
            "would take its place, and is not compared with it"
        )
    minutes = progress.plan(minutes, more=more)
    source = located(choice.target, alone.cache_dir)
    model = None if device == "cpu" else load_target(source, torch.device(device))

    def open_writer(first: int) -> Writer:
        engine = Engine.load(alone)
        if model is None:
            return Writer(engine, first)
        return TorchWriter(engine, first, model, folder.end_tokens)

    layers = layers_read(target)
    if model is None:  # made before an hour of writing: not every graph can give states
        graph_with_states(folder, layers, alone.cache_dir)
    conversations = _written(open_writer, progress, 60 * _WRITING * minutes, tell)
    unseen = [item for item in conversations if item.number % _HELD_OUT == 0]
    texts = [item for item in conversations if item.number % _HELD_OUT]
    if not texts or not unseen:
        raise ModelError(
            f"{choice.name} has written too little to learn from ({len(conversations)} texts; what "
            "repeats itself or ends at once does not count): the same command with more --minutes "
            "continues from here"
        )
    tokens = _frequent(texts)
    config = new_config(target, len(tokens))
    rows = output_rows(folder.graph, tokens, target.hidden_size)
    network = HeadNetwork(config, torch.from_numpy(rows).to(device))
    teacher: Teacher
    if model is None:
        # The engine reads the next texts meanwhile: threads that share cores would wait for it.
        torch.set_num_threads(max(1, available_threads() // 2))
        teacher = EngineTeacher(folder, layers, tokens, alone.cache_dir)
    else:
        teacher = TorchTeacher(model, layers, tokens)
    training = Training(
        network,
        teacher,
        texts,
        unseen,
        seconds=60 * _TRAINING * minutes,
        checkpoint=progress.folder / "training.pt",
        tell=tell,
        clock=progress.clock,
    )
    training.run()
    found = rounds(network, teacher, unseen[:_UNSEEN])
    config["calibration"] = calibrate(found)
    weights = {name: values.detach().cpu().numpy() for name, values in network.weights.items()}
    write_head(path, config, weights, tokens)
    own_table = _write_table(path / NGRAMS, texts, choose(replace(settings, draft="")).draft)
    left = 60 * (1 - _WRITING - _TRAINING) * minutes
    tell(
        "measuring it on conversations that it was not trained on, for about "
        f"{max(1, left / 60):.0f} min"
    )
    # In the context that they were written in: in a shorter one they might not fit.
    served = replace(settings, draft=str(path), drafter="", context=LENGTH)
    evaluations = evaluate(served, unseen, left, progress.clock)
    text = card(
        choice.name,
        evaluations,
        conversations=conversations,
        seen=training.seen,
        minutes=(progress.known["written"] + training.spent) / 60,
        own_table=own_table,
        rows=len(tokens),
        reached={
            "all": acceptance(found),
            "that no lookup finds": acceptance(found, repeated=False),
        },
    )
    (path / "README.md").write_text(text, encoding="utf-8")
    return evaluations


class Progress:
    """What is known of a head that is being made, in a file of its own.

    Args:
        file: the file; its folder is made if missing.
        clock: returns seconds.

    Attributes:
        folder: keeps the file.
        conversations: the file that keeps the target's texts.
        known: seconds of writing so far (`written`), and what the methods add.

    Raises:
        ModelError: the file is none of this version's.
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
        with file_at_once(self._file) as partial:
            partial.write_text(json.dumps(self.known) + "\n", encoding="utf-8")

    def keep_to(self, name: str, source_digest: str, hidden_size: int) -> None:
        """Note whose conversations these are. Another quantization of a model is the same one.

        Raises:
            ModelError: they are those of another model.
        """
        if not self.conversations.exists():  # nothing of the earlier model's is there
            self.known.pop("target", None)
        own = {"source_digest": source_digest or name, "hidden_size": hidden_size}
        known = self.known.setdefault("target", {"name": name, **own})
        if any(known[key] != own[key] for key in own):
            raise ModelError(
                f"{self.folder} keeps conversations of another model or another download of it, "
                f"{known['name']}: choose another --out, or remove that folder"
            )
        self.save()

    def plan(self, minutes: float, *, more: bool) -> float:
        """The minutes of the whole work. An unfinished call, repeated, has the same end.

        A finished one is not taken back by fewer minutes: `more` counts from what was done.
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
    """All conversations; writes more of them until they have taken `seconds`, over all calls.

    Raises:
        ModelError: nothing that the model writes is of use.
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
                    f"{writer.kept:,} of {writer.ended.total():,} texts of use, "
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


def _write_table(file: Path, texts: Sequence[Conversation], draft: object) -> bool:
    """Write n-grams of the texts, or copy those of a preset's draft that counts more texts.

    Returns:
        Whether they are those of the texts.
    """
    np.save(file, make_table(texts))
    other = draft / NGRAMS if isinstance(draft, Path) else file
    if not other.exists() or other.stat().st_size <= file.stat().st_size:
        return True
    shutil.copyfile(other, file)
    return False


def _frequent(conversations: Iterable[Conversation]) -> list[int]:
    """The most frequent tokens of answers, in ascending order."""
    counts = Counter[int]()
    for conversation in conversations:
        counts.update(conversation.tokens.tolist())
    return sorted(token for token, _ in counts.most_common(_TOKENS))
