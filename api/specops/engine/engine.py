"""A loaded model that generates: for the service's thread, the command line and scripts.

`loading` opens the models; the scheduler runs them.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from specops.config import ConfigError, Settings
from specops.engine.loading import LoadedModels, load_models
from specops.engine.model_info import ModelInfo, Report
from specops.engine.scheduler import Scheduler
from specops.request import GenerationRequest, Output, PromptTooLong
from specops.runtime import kernels
from specops.runtime.kvcache.prefix_cache import PrefixSharing
from specops.runtime.memory_plan import MemoryPlan
from specops.sampling_defaults import SamplingDefaults
from specops.speculation.controller import Controller
from specops.speculation.drafters.registry import make_drafters
from specops.system.allocator import close_holes
from specops.system.cpus import compute_threads
from specops.text.chat_template import ChatTemplate, ChatTemplateError, system_of
from specops.text.cuts import UncutText
from specops.text.grammar import Grammars
from specops.text.grammar_vocabulary import UnsupportedTokenizer, grammar_bytes
from specops.text.tokenizer import Tokenizer
from specops.text.tools.formats import Tool

log = logging.getLogger(__name__)

NO_DRAFTER = "none"


class UnknownToken(ValueError):  # noqa: N818 - named as what it says
    """The prompt has a token that the tokenizer knows and the model does not."""


PROMPT_ERRORS = (PromptTooLong, UnknownToken, UncutText)
"""What `Engine.admit` and `Engine.encode` raise."""


@dataclass(eq=False)
class Engine:
    """Target, drafters, tokenizer and scheduler of one model. Used by one thread."""

    info: ModelInfo
    scheduler: Scheduler
    tokenizer: Tokenizer
    empty_prompt: tuple[int, ...]  # tokens of an empty text
    plan: MemoryPlan
    chat_template: ChatTemplate | None = None

    @classmethod
    def load(cls, settings: Settings, report: Report | None = None) -> Engine:
        """Prepare and load the settings' models.

        Args:
            settings: which models, and how much room they get.
            report: gets progress reports.

        Raises:
            ConfigError, ModelError, ModelLoadError, TokenizerError: the message says what to do.
        """
        models = load_models(settings, report or (lambda state, detail, download=None: None))
        target, draft, head, ngrams, tokenizer, chat_template, plan = models
        drafters = make_drafters(
            target.runner.vocab_size,
            (draft.runner, draft.costs) if draft else None,
            reuse=PrefixSharing(settings.prefix_cache),
            head=head.drafter if head else None,
            ngrams=ngrams,
        )
        drafting = draft or (head.drafter if head else None)
        draft_costs = drafting.costs if drafting else None
        scheduler = Scheduler(
            target.runner,
            drafters,
            Controller(target.costs, settings.max_k_draft),
            target.costs,
            tokenizer,
            draft_cost_model=draft_costs,
            end_tokens=target.folder.end_tokens,
            max_batched_tokens=target.runner.max_tokens,
            most_rows=plan.required.rows,
            max_inter_token_latency=settings.max_inter_token_latency,
        )
        scheduler.grammars.most_bytes = plan.compiled_bytes
        if not plan.required.grammar_bytes:
            scheduler.grammars.vocabulary.refused = _no_grammars(plan, target.runner.vocab_size)
        begin = target.folder.bos_token
        if begin is None:
            begin = min(target.folder.end_tokens, default=0)
        return cls(
            _info(settings, models, drafters),
            scheduler,
            tokenizer,
            empty_prompt=(begin,),
            plan=plan,
            chat_template=chat_template,
        )

    @property
    def computes_with(self) -> str:
        """The kernels' name, and why they are not faster ones where that is known."""
        return kernels.kernel()

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for the model's vocabulary, on any thread."""
        return self.scheduler.grammars

    def prepare(self) -> None:
        """Make the grammars' vocabulary before the first request: it holds up the interpreter."""
        with suppress(UnsupportedTokenizer):
            self.grammars.vocabulary.get()
        close_holes()

    def encode(self, text: str, *, any_length: bool = False) -> tuple[int, ...]:
        """Tokens of a prompt, at least one.

        Args:
            text: the prompt.
            any_length: encode what no context holds, too.

        Raises:
            PromptTooLong: no context holds it; no more is encoded than shows this.
            UncutText: see `Tokenizer.parts`.
        """
        return self.collected(self.tokenizer.parts(text), any_length=any_length)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
        *,
        asks: bool = True,
    ) -> str:
        """The prompt of a conversation, as `ChatTemplate.render` writes it.

        Raises:
            ChatTemplateError: there is no template, or it does not take these messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                f"{self.info.name} has no usable chat template: use /v1/completions, or "
                "put a chat_template.jinja next to the model's weights and restart the server"
            )
        return self.chat_template.render(messages, tools, options, asks=asks)

    def encode_chat(
        self, prompt: str, *, begins: bool = True, any_length: bool = False
    ) -> tuple[int, ...]:
        """Tokens of a rendered conversation, at least one.

        The special tokens are written in it, but for the one that begins all texts of a model:
        a template may leave that to the tokenizer.

        Args:
            begins: the conversation begins here.

        Raises:
            PromptTooLong, UncutText: see `encode`.
        """
        parts = self.tokenizer.parts(prompt, special_tokens=False)
        tokens = self.collected(parts, any_length=any_length)
        begin = self.tokenizer.begin if begins else ()
        return tokens if tokens[: len(begin)] == begin else (*begin, *tokens)

    def collected(
        self, parts: Iterable[Sequence[int]], *, any_length: bool = False
    ) -> tuple[int, ...]:
        """Collect the tokens of a prompt's parts; see `encode`."""
        tokens, context = array("I"), self.info.context
        for part in parts:
            if len(tokens) > context and not any_length:
                raise PromptTooLong(len(tokens), context, at_least=True)
            tokens.extend(part)
        return tuple(tokens) or self.empty_prompt

    def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Fit a request into the context: `max_new_tokens` is cut to the rest.

        Raises:
            PromptTooLong: the prompt leaves no room for a token, where the request generates any.
            UnknownToken: the prompt has a token that the model does not have.
        """
        longest = max(map(len, request.prompts))
        room = self.info.context - longest
        if room < (1 if request.max_new_tokens and not request.embed else 0):
            raise PromptTooLong(longest, self.info.context)
        largest = max(max(prompt, default=0) for prompt in request.prompts)
        if largest >= self.info.vocab_size:
            raise UnknownToken(
                f"the prompt has token {largest}, but the model has {self.info.vocab_size} tokens: "
                "leave out what its tokenizer reads as this one"
            )
        return replace(request, max_new_tokens=min(request.max_new_tokens, room))

    def generate(self, request: GenerationRequest) -> Generator[Output, None, None]:
        """Run one request alone, output by output.

        Raises:
            PromptTooLong, UnknownToken: see `admit`.
        """
        self.scheduler.add(replace(self.admit(request), arrival=time.monotonic()))
        try:
            while self.scheduler.busy:
                yield from self.scheduler.step().outputs
        finally:  # the caller stopped early
            if self.scheduler.busy:
                self.scheduler.cancel(request.request_id)
                self.scheduler.step()


def _info(
    settings: Settings,
    models: LoadedModels,
    drafters: Collection[str],
) -> ModelInfo:
    target, draft, head, ngrams, _, chat_template, plan = models
    folder, kept = target.folder, target.runner.cache.recurrent
    return ModelInfo(
        name=folder.name,
        quant=folder.quant,
        parameters=folder.parameters,
        draft_parameters=draft.folder.parameters if draft else None,
        draft_quant=draft.folder.quant if draft else None,
        drafters=(*drafters, NO_DRAFTER),
        default_drafter=_default_drafter(settings, drafters),
        vocab_size=target.runner.vocab_size,
        context=plan.context,
        slots=plan.slots,
        kv_tokens=plan.kv_tokens,
        kv_bytes=sum(
            item.runner.cache.nbytes for item in (target, draft, head and head.drafter) if item
        ),
        kv_dtype=settings.kv_dtype,
        threads=compute_threads(settings.threads),
        kernels=kernels.kernel(),
        ort_matmuls=target.ort_matmuls,
        chat=chat_template is not None and chat_template.marks_turns(),
        sampling=SamplingDefaults.load(settings.sampling, folder.path),
        system=system_of(settings.system, folder.path, chat_template),
        embedding_size=target.runner.hidden_size,
        end_tokens=folder.end_tokens,
        state_bytes=kept.nbytes if kept else 0,
        snapshot_bytes=kept.snapshot_bytes if kept else 0,
        weight_bytes=plan.required.mapped_weights,
        reading=target.costs.reading,
        head=head.path if head else None,
        ngrams=ngrams.path if ngrams else None,
        head_agreement=head.agreement if head else None,
    )


def _no_grammars(plan: MemoryPlan, tokens: int) -> str:
    reason = (
        f"structured output needs {grammar_bytes(tokens) / 1e6:,.0f} MB for this model's "
        f"{tokens:,} tokens, which do not fit below the memory limit of "
        f"{plan.available.reading.limit / 1e6:,.0f} MB: raise it"
    )
    log.warning("%s", reason)
    return reason


def _default_drafter(settings: Settings, drafters: Collection[str]) -> str:
    if not settings.drafter:
        return "cascade" if {"draft", "head"}.intersection(drafters) else "suffix"
    if settings.drafter not in (*drafters, NO_DRAFTER):
        kind = "draft model" if settings.drafter == "draft" else "draft head"
        raise ConfigError(
            f"SPECOPS_DRAFTER={settings.drafter} needs a {kind}, and there is none: set "
            f"SPECOPS_DRAFT to one, or SPECOPS_DRAFTER to one of {', '.join(drafters)}, "
            f"{NO_DRAFTER} or nothing"
        )
    return settings.drafter
