"""A loaded model, ready to generate: puts the parts together, for a thread or for a script."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specops.config import ConfigError, Settings
from specops.engine.draft_heads import head_drafter, load_head
from specops.engine.model_info import Download, ModelInfo, ModelState, Report
from specops.engine.open_models import open_models
from specops.engine.request_queue import FairShares, FirstComeFirstServed
from specops.engine.scheduler import Scheduler
from specops.models.head_folder import HeadFolder, is_head
from specops.models.prepare import ModelError, ModelFolder, Source, choose, prepare
from specops.presets import CHAT, chat_model
from specops.request import GenerationRequest, Output, PromptTooLong
from specops.runtime import kernels
from specops.runtime.kv_cache import PrefixCache
from specops.runtime.memory_plan import MemoryPlan
from specops.runtime.session import ModelLoadError, share_threads
from specops.sampling_defaults import SamplingDefaults
from specops.speculation.controller import Controller
from specops.speculation.drafters.base import Drafter
from specops.speculation.drafters.registry import make_drafters
from specops.system.cpus import compute_threads
from specops.text.chat_template import ChatTemplate, ChatTemplateError, system_of
from specops.text.grammar import Grammars
from specops.text.tokenizer import Tokenizer, TokenizerError
from specops.text.tools.formats import Tool

log = logging.getLogger(__name__)

NO_DRAFTER = "none"
LOAD_ERRORS = (ConfigError, ModelError, ModelLoadError, TokenizerError)
"""Errors whose message says what the user can do. Any other error at loading is a bug."""


class UnknownToken(ValueError):  # noqa: N818 - named as what it says
    """The prompt has a token that the tokenizer knows and the model does not."""


PROMPT_ERRORS = (PromptTooLong, UnknownToken)
"""What `Engine.admit` raises."""


class Engine:
    """Target, drafters, tokenizer and scheduler of one model. Used by one thread."""

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        *,
        empty_prompt: tuple[int, ...],
        plan: MemoryPlan,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.info = info
        self.plan = plan
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self._empty_prompt = empty_prompt

    @classmethod
    def load(cls, settings: Settings, report: Report | None = None) -> Engine:
        """Prepare and load the settings' models.

        Args:
            settings: which models, and how much room they get.
            report: gets progress reports.

        Raises:
            ConfigError, ModelError, ModelLoadError, TokenizerError: the message says what to do.
        """
        report = report or (lambda state, detail, download=None: None)
        choice = choose(settings)
        if not (settings.model or settings.target):
            _tell_the_default(choice.name)

        def prepared(model: str, source: Source, quant: str, name: str) -> ModelFolder:
            return prepare(
                source,
                quant,
                name=name,
                cache_dir=settings.cache_dir,
                report=lambda detail: report(ModelState.CONVERTING, detail),
                downloading=_downloading(model, report),
            )

        target = prepared("target", choice.target, choice.target_quant, choice.name)
        draft: ModelFolder | HeadFolder | None = None
        if is_head(choice.draft):
            draft = HeadFolder.read(choice.draft)
        elif choice.draft is not None:
            draft = prepared("draft", choice.draft, choice.draft_quant, f"{choice.name}-draft")
        report(ModelState.LOADING, f"opening {target.graph}")
        return _assemble(settings, target, draft, lambda text: report(ModelState.LOADING, text))

    @property
    def computes_with(self) -> str:
        """The kernels' name, and why they are not faster ones where that is known."""
        return kernels.described()

    @property
    def grammars(self) -> Grammars:
        """Compiles grammars for the model's vocabulary, on any thread."""
        return self.scheduler.grammars

    def encode(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt, at least one."""
        return self.tokenizer.encode(text) or self._empty_prompt

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Tool] = (),
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt of a conversation, as `ChatTemplate.render` writes it.

        Raises:
            ChatTemplateError: there is no template, or it does not take these messages.
        """
        if self.chat_template is None:
            raise ChatTemplateError(
                f"{self.info.name} has no chat template that can be used: ask /v1/completions, or "
                "put a chat_template.jinja into the model's folder"
            )
        return self.chat_template.render(messages, tools, options)

    def encode_chat(self, prompt: str) -> tuple[int, ...]:
        """Tokens of a rendered conversation, at least one: the special tokens are written in it."""
        return self.tokenizer.encode(prompt, special_tokens=False) or self._empty_prompt

    def admit(self, request: GenerationRequest) -> GenerationRequest:
        """Fit a request into the context: `max_new_tokens` is cut to what is left.

        Raises:
            PromptTooLong: the prompt leaves no room for one token, which embeddings do not need.
            UnknownToken: the prompt has a token that the model does not have.
        """
        longest = max(map(len, request.prompts))
        room = self.info.context - longest
        if room < (0 if request.embed else 1):
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


def _tell_the_default(name: str) -> None:
    if name == CHAT:
        log.info("SPECOPS_MODEL is empty: serving %s, the chat model in %s", name, chat_model())
    else:
        log.warning("there is no chat model (%s): serving the %s pair", chat_model(), name)


def _downloading(model: str, report: Report) -> Callable[[str, int, int], None]:
    def tell(detail: str, done: int, total: int) -> None:
        report(ModelState.DOWNLOADING, detail, Download(model, done, total))

    return tell


def _assemble(
    settings: Settings,
    target: ModelFolder,
    given: ModelFolder | HeadFolder | None,
    report: Callable[[str], None],
) -> Engine:
    threads = compute_threads(settings.threads)
    share_threads(threads)
    log.info("%d threads compute with the kernels %s", threads, kernels.described())
    tokenizer = Tokenizer.load(target.path)
    draft = given if isinstance(given, ModelFolder) else None
    head = given if isinstance(given, HeadFolder) else None
    head_graph = load_head(head, settings, report) if head else None
    if draft is not None:
        _check_vocabulary(tokenizer, Tokenizer.load(draft.path), draft)
    plan, models = open_models(settings, [target] if draft is None else [target, draft], report)
    runner, costs = models[0].runner, models[0].costs
    draft_runner, draft_costs = (models[1].runner, models[1].costs) if draft else (None, None)
    drafters = make_drafters(
        runner.vocab_size,
        draft_runner,
        draft_costs,
        reuse=PrefixCache(settings.prefix_cache),
        head=head_drafter(head, head_graph, runner, costs) if head and head_graph else None,
    )
    scheduler = Scheduler(
        runner,
        drafters,
        Controller(costs, draft_costs, settings.max_k_draft),
        costs,
        tokenizer,
        draft_cost_model=draft_costs,
        end_tokens=target.end_tokens,
        max_batched_tokens=runner.max_tokens,
        max_inter_token_latency=settings.max_inter_token_latency,
        waiting=FairShares() if settings.queue_order == "clients" else FirstComeFirstServed(),
    )
    chat_template = _chat_template(target.path)
    info = ModelInfo(
        name=target.name,
        quant=target.quant,
        parameters=target.parameters,
        draft_parameters=draft.parameters if draft else None,
        draft_quant=draft.quant if draft else None,
        drafters=(*drafters, NO_DRAFTER),
        default_drafter=_default_drafter(settings, drafters),
        vocab_size=runner.vocab_size,
        context=plan.context,
        slots=plan.slots,
        kv_tokens=plan.kv_tokens,
        kv_bytes=sum(model.runner.cache.nbytes for model in models),
        kv_dtype=settings.kv_dtype,
        threads=threads,
        kernels=kernels.kernel(),
        foreign_products=models[0].foreign_products,
        chat=chat_template is not None and chat_template.marks_turns(),
        sampling=SamplingDefaults.load(settings.sampling, target.path),
        system=system_of(settings.system, target.path, chat_template),
        embedding_size=runner.hidden_size,
        weight_bytes=plan.demand.mapped_weights,
    )
    begin = target.bos_token if target.bos_token is not None else min(target.end_tokens, default=0)
    return Engine(
        info,
        scheduler,
        tokenizer,
        empty_prompt=(begin,),
        plan=plan,
        chat_template=chat_template,
    )


def _chat_template(folder: Path) -> ChatTemplate | None:
    try:
        return ChatTemplate.load(folder)
    except ChatTemplateError as error:
        log.warning("there will be no chat: %s", error)
        return None


def _default_drafter(settings: Settings, drafters: dict[str, Drafter]) -> str:
    if not settings.drafter:
        return "cascade" if "head" in drafters else next(iter(drafters))
    if settings.drafter not in (*drafters, NO_DRAFTER):
        raise ConfigError(
            f"SPECOPS_DRAFTER is {settings.drafter}, but no such draft is set: SPECOPS_DRAFT"
        )
    return settings.drafter


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
