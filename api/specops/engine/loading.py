"""Loads models: from the settings to runners whose KV caches fit and whose passes are measured.

The order follows memory. Every graph is opened first, which maps its weights; then the memory plan
sizes the KV caches by what is left; only then can a graph run and its passes be timed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from specops.config import ConfigError, Settings
from specops.engine.model_info import Download, ModelState, Report
from specops.models.folder import ModelError, ModelFolder
from specops.models.graph.weight_cache import graph_key, prepacked_graph, used_bytes
from specops.models.head_folder import HeadFolder, is_head
from specops.models.prepare import Source, choose, prepare
from specops.presets import CHAT, chat_model
from specops.runtime import kernels
from specops.runtime.batch import Batch
from specops.runtime.calibration import FORMAT, calibrate
from specops.runtime.cost_model import CostModel
from specops.runtime.kv_cache import KvCache, PrefixCache
from specops.runtime.memory_plan import MemoryPlan, ModelSizes, plan_for_models
from specops.runtime.model_runner import DraftHead, ModelRunner, cache_shape
from specops.runtime.session import ModelLoadError, Session, open_session, share_threads
from specops.speculation.drafters.head import HeadDrafter
from specops.speculation.drafters.suffix import MEMORY_BYTES
from specops.system.cpus import compute_threads
from specops.text.tokenizer import Tokenizer, TokenizerError

log = logging.getLogger(__name__)

LOAD_ERRORS = (ConfigError, ModelError, ModelLoadError, TokenizerError)
"""Errors whose message says what the user can do. Any other error at loading is a bug."""
WARM_UP = "running a first pass"
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


class LoadedModels(NamedTuple):
    """All that a scheduler needs of the models, and the plan of their memory."""

    target: Model
    draft: Model | None
    head: HeadDrafter | None
    tokenizer: Tokenizer
    plan: MemoryPlan


def load_models(settings: Settings, report: Report) -> LoadedModels:
    """Prepare and open the settings' models.

    Args:
        settings: which models, and how much room they get.
        report: gets progress reports.

    Raises:
        ConfigError, ModelError, ModelLoadError, TokenizerError: the message says what to do.
    """
    target, draft = _prepared(settings, report)
    step = partial(report, ModelState.LOADING)
    step(f"opening {target.graph}")
    threads = compute_threads(settings.threads)
    share_threads(threads)
    log.info("%d threads compute with the kernels %s", threads, kernels.described())
    tokenizer = Tokenizer.load(target.path)
    folders, head_graph = [target], None
    if isinstance(draft, HeadFolder):
        head_graph, _ = _open(draft.graph, draft.path.resolve().name, settings, step)
    elif draft is not None:
        _check_vocabulary(tokenizer, Tokenizer.load(draft.path), draft)
        folders.append(draft)

    graphs = [_open(item.graph, f"{item.name}-{item.quant}", settings, step) for item in folders]
    sizes = [
        ModelSizes(
            cache_shape(session, settings.kv_dtype).bytes_per_token,
            mapped,
            folder.hidden_size,
            folder.vocab_size,
        )
        for folder, (session, mapped) in zip(folders, graphs, strict=True)
    ]
    plan = plan_for_models(settings, sizes, target.context_length, later_bytes=MEMORY_BYTES)

    runners = [
        _warm_runner(session, folder, settings, plan, step)
        for folder, (session, _) in zip(folders, graphs, strict=True)
    ]
    step("measuring what passes cost")
    models = [
        Model(folder, session, runner, calibrate(runner, _costs_file(folder, settings)))
        for folder, runner, (session, _) in zip(folders, runners, graphs, strict=True)
    ]
    head = None
    if isinstance(draft, HeadFolder) and head_graph is not None:
        head = _head_drafter(draft, head_graph, models[0])
    return LoadedModels(models[0], models[1] if len(models) > 1 else None, head, tokenizer, plan)


def _prepared(
    settings: Settings, report: Report
) -> tuple[ModelFolder, ModelFolder | HeadFolder | None]:
    """Find, download or convert the target and its draft, if it has one."""
    choice = choose(settings)
    if not (settings.model or settings.target):
        if choice.name == CHAT:
            log.info("SPECOPS_MODEL is empty: serving %s, the chat model in %s", CHAT, chat_model())
        else:
            log.warning("there is no chat model (%s): serving the demo pair", chat_model())

    def folder(model: str, source: Source, quant: str, name: str) -> ModelFolder:
        def downloading(detail: str, done: int, total: int) -> None:
            report(ModelState.DOWNLOADING, detail, Download(model, done, total))

        return prepare(
            source,
            quant,
            name=name,
            cache_dir=settings.cache_dir,
            report=partial(report, ModelState.CONVERTING),
            downloading=downloading,
        )

    target = folder("target", choice.target, choice.target_quant, choice.name)
    if choice.draft is None:
        return target, None
    if is_head(choice.draft):
        return target, HeadFolder.read(choice.draft)
    return target, folder("draft", choice.draft, choice.draft_quant, f"{choice.name}-draft")


def _open(
    graph: Path, name: str, settings: Settings, step: Callable[[str], None]
) -> tuple[Session, int]:
    """Open a graph in the form that the engine runs, its weights mapped; return the mapped bytes.

    The files hold more than that: the originals of packed weights, which no node reads.
    """
    path = prepacked_graph(graph, name, settings.cache_dir, step)
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
    cache = KvCache(
        cache_shape(session, settings.kv_dtype),
        num_blocks=plan.num_blocks,
        num_slots=plan.slots,
        context=min(plan.context, folder.context_length),
        reuse=PrefixCache(settings.prefix_cache),
    )
    # Every decoding request has room in each pass, with all of the longest draft.
    most = max(settings.max_batched_tokens, plan.slots * (settings.max_k_draft + 1))
    runner = ModelRunner(session, cache, max_tokens=most)
    step(WARM_UP)
    batch = Batch()
    batch.add(0, 0, [0, 0], 1)
    cache.begin(0, [0, 0])
    cache.reserve(0, 2)
    runner.forward(batch)
    cache.release(0)
    return runner


def _costs_file(folder: ModelFolder, settings: Settings) -> Path:
    """The file with the costs of a model's passes, by threads, kernels and cache elements."""
    build = crc32(kernels.LIBRARY.read_bytes())  # newer kernels have other costs
    kernel = f"{kernels.kernel().replace(' ', '-')}-{build:08x}"
    threads = compute_threads(settings.threads)
    key = f"{graph_key(folder.graph)}-{kernel}-{threads}-{settings.kv_dtype}-{FORMAT}"
    return settings.cache_dir / "costs" / f"{folder.name}-{key}.json"


def _head_drafter(head: HeadFolder, graph: Session, target: Model) -> HeadDrafter:
    """Have a draft head read the target's hidden states.

    Raises:
        ModelError, ModelLoadError: it was made for another model.
    """
    runner = target.runner
    states = runner.output_hidden_states()
    sizes = head.vocab_size, head.hidden_size
    if sizes != (runner.vocab_size, runner.hidden_size):
        raise ModelError(
            f"the draft head {head.path} was made for {head.target}, a model of {sizes[0]} tokens "
            f"and hidden states of {sizes[1]}; this one has {runner.vocab_size} and "
            f"{runner.hidden_size}. Make one with `specops draft make`, or set SPECOPS_DRAFT=none"
        )
    runs = DraftHead(
        graph,
        num_slots=runner.cache.num_slots,
        hidden_size=head.hidden_size,
        table_size=len(head.tokens),
    )
    return HeadDrafter(runs, states, head.tokens, head.calibration)


def _check_vocabulary(target: Tokenizer, draft: Tokenizer, folder: ModelFolder) -> None:
    """A draft token is an id: both models must mean the same by it."""
    expected = {token_id: token for token, token_id in target.vocabulary().items()}
    theirs = {token_id: token for token, token_id in draft.vocabulary().items()}
    differing = [
        f"{token_id}: {expected.get(token_id)!r} and {theirs.get(token_id)!r}"
        for token_id in sorted(expected.keys() & theirs.keys())
        if expected[token_id] != theirs[token_id]
    ]
    if differing:
        raise ModelError(
            f"the draft {folder.path} has another vocabulary than the target: {len(differing)} "
            f"ids differ, first {'; '.join(differing[:3])}. Choose a draft of the same family."
        )
