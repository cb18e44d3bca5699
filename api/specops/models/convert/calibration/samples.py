"""Text for calibration, written by the model itself in its own languages and formats.

An 8-bit conversion of the same checkpoint writes the text with the kernels that serve. They are
fast and map the weights, so this works for models larger than memory too.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from specops.models.errors import ExportError, ModelError
from specops.models.folder import ModelFolder
from specops.models.graph.weight_cache import prepacked_graph
from specops.request import SamplingParams
from specops.runtime.batch import Batch
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.runtime.sampling import draw, filtered_probs
from specops.runtime.session import ModelLoadError, load, plain_options
from specops.text.chat_template import ChatTemplate, ChatTemplateError
from specops.text.tokenizer import Tokenizer

_LENGTH = 128  # tokens of a sample
_SAMPLES = 64
_STATES_BYTES = 1 << 30  # for states of the samples that are written together
_SEED = 17  # the same checkpoint gives the same weights
_WHOLE = SamplingParams(temperature=1.0)  # the model's own distribution

Tokens = NDArray[np.int64]


def draw_samples(folder: Path, scratch: Path, on_token: Callable[[int, int], None]) -> Tokens:
    """Lets a model write from the start of a text and, if it has a chat template, of a chat.

    Tokens are sampled from the model's whole distribution, at a temperature of 1.

    Args:
        folder: an exported model.
        scratch: a folder for the graph in the form that the kernels run.
        on_token: called with the number of finished tokens, and their total.

    Returns:
        [samples, tokens of each]; the model's context may shorten the samples.

    Raises:
        ExportError: this machine cannot run the graph; the message says why.
    """
    model = ModelFolder.read(folder, "calibration")
    length = min(_LENGTH, model.context_length)
    beginnings = _beginnings(model)
    each = _SAMPLES // len(beginnings)
    texts = [list(start[: length - 1]) for start in beginnings for _ in range(each)]
    try:
        graph = prepacked_graph(model.graph, model.name, scratch, lambda _: None)
        session = load(graph, plain_options())
    except (ModelError, ModelLoadError) as error:
        raise ExportError(f"the model cannot write text for calibration: {error}") from error
    shape = cache_shape(session, "fp16")
    fitting = max(1, _STATES_BYTES // shape.slot_bytes) if shape.slot_bytes else len(texts)
    groups = [texts[first : first + fitting] for first in range(0, len(texts), fitting)]
    slots = len(groups[0])
    cache = KvCache(
        shape,
        num_blocks=slots * -(-length // BLOCK_TOKENS),
        num_slots=slots,
        context=length,
        reuse=PrefixSharing.OFF,
    )
    runner = ModelRunner(session, cache, max_tokens=slots * max(len(text) for text in texts))
    for index, group in enumerate(groups):
        rng = np.random.default_rng((_SEED, index))  # the first one is _SEED's alone
        for finished in _write(group, length, runner, rng):
            on_token(index * length + finished, len(groups) * length)
    return np.array(texts, np.int64)


def _write(
    texts: Sequence[list[int]], length: int, runner: ModelRunner, rng: np.random.Generator
) -> Iterator[int]:
    """Continues all texts together, up to a length.

    Yields:
        After each pass, the number of finished tokens of each.
    """
    cache = runner.cache
    for slot in range(len(texts)):
        cache.allocate(slot, [0])
    unfinished = set(range(len(texts)))
    while unfinished:
        batch = Batch()
        for slot in sorted(unfinished):
            held = cache.length(slot)
            cache.reserve(slot, len(texts[slot]))
            batch.add(slot, held, texts[slot][held:], 1)
        odds = filtered_probs(runner.forward(batch), _WHOLE)
        for span, row in zip(batch.spans, odds, strict=True):
            text = texts[span.slot]
            cache.commit(span.slot, text, len(text))
            text.append(draw(row, rng))
            if len(text) == length:
                unfinished.remove(span.slot)
        yield min(len(text) for text in texts)
    for slot in range(len(texts)):
        cache.release(slot)


def _beginnings(model: ModelFolder) -> list[Sequence[int]]:
    """The tokens before the first token of a text and, if any, before a user's first message."""
    ends = sorted(model.end_tokens) or [0]
    start = ends[0] if model.bos_token is None else model.bos_token
    found: list[Sequence[int]] = [[start]]
    with suppress(ChatTemplateError):  # without a usable template, all samples are plain text
        template = ChatTemplate.load(model.path)
        if template is not None and template.opening:
            tokenizer = Tokenizer.load(model.path)
            found.append(tokenizer.encode(template.opening, special_tokens=False))
    return found
