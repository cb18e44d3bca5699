"""Makes a head for a model: conversations, training, calibration, the folder, and measurements.

All intermediate files stay in a folder beside the new one. So a call can continue after an
interruption, and a call with more minutes continues the work of an earlier one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from specops.config import Settings
from specops.engine.engine import Engine
from specops.heads.card import card
from specops.heads.conversations import Writer
from specops.heads.evaluation import Evaluation, evaluate
from specops.heads.examples import Examples, frequent_tokens, held_out
from specops.heads.export import write_head
from specops.heads.storage import Conversation, ConversationStore
from specops.heads.target_rows import output_rows
from specops.heads.training import Training, acceptance, calibrate, new_network
from specops.models.folder import ModelError
from specops.models.head_folder import HEAD_MANIFEST, HeadFolder
from specops.models.prepare import choose, prepare
from specops.models.progress import every
from specops.system.folders import file_at_once, folder_at_once
from specops.system.memory import page_cache_room

_TOKENS = 4096  # size of the table: 97 % of what a chat model of 49,152 tokens writes
_WRITING, _TRAINING = 0.55, 0.4  # shares of the time; the rest is for measurements
_SLOTS, _CONTEXT = 24, 512  # while conversations are written
_UNSEEN = 400  # held-out texts: with 100,000 tokens a share of 0.4 is known within 0.003
_REPORT_SECONDS, _SAVE_SECONDS = 20.0, 60.0
# Bytes of memory that the training takes for each byte of conversations. For the demo pair's 5.9 GB
# it took 12.6 GB before the first step, and the page cache needs room, too.
_TRAINING_BYTES = 3

Tell = Callable[[str], None]


def make_head(settings: Settings, out: Path, minutes: float, tell: Tell) -> Evaluation:
    """Make a draft head.

    Args:
        settings: name the target; settings of drafts are ignored.
        out: the folder to write; `out` with the suffix `.making` keeps the intermediate files.
        minutes: duration of the whole call.
        tell: called with progress lines.

    Raises:
        ModelError, ModelLoadError, ConfigError, TokenizerError: the message says what to do.
        PromptTooLong: the model's context is shorter than the start of a conversation.
        OSError: a folder cannot be written, or `out` is something else than a head.
    """
    out = out.resolve()
    with folder_at_once(out, HEAD_MANIFEST) as path:
        return _make(settings, path, out.with_name(f"{out.name}.making"), minutes, tell)


def _make(settings: Settings, path: Path, work: Path, minutes: float, tell: Tell) -> Evaluation:
    """Make a head in the folder `path`; `work` keeps the intermediate files."""
    alone = replace(settings, draft="none", drafter="none", slots=_SLOTS, context=_CONTEXT)
    choice = choose(alone)
    folder = prepare(
        choice.target, choice.target_quant, name=choice.name, cache_dir=alone.cache_dir, report=tell
    )
    engine = Engine.load(alone)
    size = engine.scheduler.target.hidden_size
    work.mkdir(parents=True, exist_ok=True)
    _keep_to(work, choice.name, folder.source_digest, size)
    store = ConversationStore(work / "conversations")
    _write(engine, store, work / "progress.json", 60 * _WRITING * minutes, tell)
    if store.nbytes > (most := page_cache_room() // _TRAINING_BYTES):
        tell(f"learning from {most / store.nbytes:.0%} of it: more would not fit into memory")
    conversations = list(store.first(most))
    learnt, kept = ([c for c in conversations if held_out(c) is unseen] for unseen in (False, True))
    if not learnt or not kept:
        raise ModelError(
            f"{engine.info.name} has written too little to learn from ({len(conversations)} "
            "texts): the same command with more --minutes continues from here"
        )
    written = sum(len(item.tokens) for item in conversations)
    tell(f"preparing {len(conversations):,} texts, {written:,} tokens")
    tokens = _tokens(learnt, work / "tokens.json")
    rows = output_rows(folder.graph, tokens, size)
    examples, unseen = (Examples.of(part, tokens, rows) for part in (learnt, kept[:_UNSEEN]))
    network = new_network(examples, torch.from_numpy(rows))
    training = Training(
        network,
        examples,
        unseen,
        seconds=60 * _TRAINING * minutes,
        checkpoint=work / "training.pt",
        tell=tell,
    )
    training.run()
    state = network.state_dict()
    weights = {name: state[name].numpy() for name in state if name.endswith(".weight")}
    weights["table"] = network.table.detach().numpy()
    head = HeadFolder(
        path, choice.name, engine.info.vocab_size, size, tuple(tokens), calibrate(network, unseen)
    )
    write_head(head, weights)
    tell("measuring it on conversations that it was not trained on")
    # In the context that they were written in: in a shorter one they might not fit.
    measured = replace(settings, draft=str(path), drafter="", context=_CONTEXT)
    evaluation = evaluate(measured, kept)
    (path / "README.md").write_text(
        card(head, evaluation, written, acceptance(network, unseen)), encoding="utf-8"
    )
    return evaluation


def _keep_to(work: Path, name: str, source_digest: str, hidden_size: int) -> None:
    """Note whose conversations a folder keeps. Another quantization of the model is the same one.

    Raises:
        ModelError: it keeps those of another model.
    """
    file = work / "target.json"
    own = {"name": name, "source_digest": source_digest or name, "hidden_size": hidden_size}
    if not file.exists():
        with file_at_once(file) as partial:
            partial.write_text(json.dumps(own) + "\n", encoding="utf-8")
    known = json.loads(file.read_text(encoding="utf-8"))
    if any(known[key] != own[key] for key in ("source_digest", "hidden_size")):
        raise ModelError(
            f"{work} keeps conversations of another model, {known['name']}, and a head for {name} "
            "cannot learn from them: choose another --out, or remove that folder"
        )


def _write(
    engine: Engine, store: ConversationStore, file: Path, seconds: float, tell: Tell
) -> None:
    """Write conversations until they have taken `seconds`, over all calls."""
    spent = json.loads(file.read_text(encoding="utf-8")) if file.exists() else 0.0
    tokens = 0
    began = time.monotonic()
    tell_due, save_due = every(_REPORT_SECONDS), every(_SAVE_SECONDS)
    with closing(Writer(engine).conversations(store.next_number)) as written:
        try:
            while (now := time.monotonic()) - began + spent < seconds:
                if (conversation := next(written)) is not None:
                    store.add(conversation)
                    tokens += len(conversation.tokens)
                if tell_due():
                    left = (seconds - spent - now + began) / 60
                    rate = tokens / (now - began)
                    tell(
                        f"writing: {tokens:,} tokens, {rate:,.0f} tokens/s, "
                        f"about {left:.0f} min left"
                    )
                if save_due():
                    file.write_text(json.dumps(spent + now - began), encoding="utf-8")
                    if store.nbytes * _TRAINING_BYTES > page_cache_room():
                        tell("writing ends here: training on more would not fit into memory")
                        return
        finally:
            file.write_text(json.dumps(spent + time.monotonic() - began), encoding="utf-8")


def _tokens(conversations: list[Conversation], file: Path) -> list[int]:
    """Return the tokens of the table; a continued training keeps its first ones."""
    if not file.exists():
        file.write_text(json.dumps(frequent_tokens(conversations, _TOKENS)), encoding="utf-8")
    chosen: list[int] = json.loads(file.read_text(encoding="utf-8"))
    return chosen
