"""A request inside the engine: its tokens, its text, its counts."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto
from functools import cached_property
from typing import TypeVar

import numpy as np

from specops.engine.prompt_pooler import PromptPooler
from specops.request import (
    GRAMMAR,
    TARGET,
    Draft,
    FinishReason,
    GenerationRequest,
    GenerationStats,
    Logprob,
    Output,
    SourceStats,
    TokenOutput,
)
from specops.runtime.logits_processor import LogitsProcessor
from specops.runtime.sampling import Floats, NotFinite, drawn_logprob, logprob, mask
from specops.speculation.credit import SpeculationState
from specops.speculation.drafters.base import Drafter
from specops.text.grammar import Grammars, Matcher
from specops.text.grammar_source import GrammarError
from specops.text.reasoning import ReasoningBudget
from specops.text.text_stream import TextStream
from specops.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_GATHER_SECONDS = 0.02  # in which tokens are gathered that no client reads as they come
Drafters = tuple[Drafter, ...]
T = TypeVar("T")


class Status(Enum):
    """What a request does."""

    WAITING = auto()  # for a slot, for the first time or after it was preempted
    PREFILL = auto()  # its prompt is computed, or all that a preemption took
    DECODE = auto()
    FINISHED = auto()  # it leaves with the next step


class RequestState:
    """One request in flight. Owned by the engine thread.

    Attributes:
        request: the client's request.
        drafters: whom it may ask for draft tokens, in their order.
        chain: the drafters among them that have begun its slot.
        tokens: prompt and generated tokens.
        num_computed: number of tokens that the target's cache holds.
        more_tokens: number of tokens of the prompts to embed after this one.
        num_cached_tokens: number of prompt tokens that another request had computed.
        was_scheduled: a pass has computed tokens of it since it got its slot.
        slot: its row in the caches' block tables; below 0 while it has none.
        preemptions: how often it gave its KV blocks up.
        finish: why the request ended; None while it goes on.
        error: the message of the error that ended it.
        adjusts: tokens are chosen from other logits than the target's.
        last_token: when the latest tokens came; None before the first ones.
        speculation: what speculation has brought to it.
        reader: reads the prompt for embeddings and probabilities; None where neither is wanted.
        rng: random numbers of a request without noise.
        noise: seed of the noise by which its tokens are drawn; None: by `rng`, or not at all.
        choosing_seconds: mean time that it takes to adjust a pass's logits and draw tokens.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        *,
        end_tokens: frozenset[int],
        clock: Callable[[], float],
        grammars: Grammars,
        drafters: Drafters = (),
    ) -> None:
        self.request = request
        self.drafters: Drafters = drafters if request.k_draft and not request.embed else ()
        self.chain: Drafters = ()
        self.tokens = list(request.prompt_tokens)
        self.num_computed = self.num_cached_tokens = 0
        self.more_tokens = sum(map(len, request.more_prompts))
        self.was_scheduled = False
        self.slot = -1
        self.preemptions = 0
        self.finish: FinishReason | None = None
        self.error: str | None = None
        self.speculation = SpeculationState(request.adaptive, request.sampling.temperature > 0)
        self.rng = np.random.default_rng()
        self.noise: int | None = None
        if request.sampling.temperature:
            seed = request.sampling.seed
            draws = any(drafter.draws for drafter in self.drafters)
            self.noise = int(self.rng.integers(1 << 63)) if draws and seed is None else seed
        self.choosing_seconds = 0.0
        reads = request.embed or request.prompt_logprobs is not None
        self.reader = PromptPooler(request) if reads else None
        self._prompt_length = len(request.prompt_tokens)
        self._most_tokens = self._prompt_length + request.max_new_tokens
        # A grammar ends the answer by an end token, so the request cannot ignore it.
        goes_on = request.ignore_eos and request.sampling.grammar is None
        self._end_tokens = frozenset() if goes_on else end_tokens
        if request.stop_token_ids:
            self._end_tokens |= set(request.stop_token_ids)
        self._processor: LogitsProcessor | None = None
        if request.sampling.adjusts or request.min_tokens:
            self._processor = LogitsProcessor(
                request.sampling,
                request.prompt_tokens,
                end_tokens=self._end_tokens,
                min_tokens=request.min_tokens,
            )
        self._budget: ReasoningBudget | None = None
        if (reasoning := request.reasoning) is not None and reasoning.most is not None:
            self._budget = ReasoningBudget(reasoning, tokenizer)
        changes = (request.sampling.grammar, self._processor, self._budget)
        self.adjusts = any(change is not None for change in changes)
        self._tokenizer = tokenizer
        self._grammars = grammars
        self._pieces: list[TokenOutput] = []  # not handed out yet
        self._stop: str | None = None  # the stop string that was found
        self._told = 0  # tokens of the prompt of whose computation the client knows
        self._steps = self._drafts = self._draft_misses = 0
        # Number of drafts by drafter, and by the numbers of verified and accepted tokens.
        self._sources: defaultdict[tuple[str, int, int], int] = defaultdict(int)
        self._found_in: defaultdict[str, int] = defaultdict(int)
        self._clock = clock
        self._started: float | None = None
        self._first_token: float | None = None
        self.last_token: float | None = None
        self._next_output = 0.0  # when to hand out tokens again

    @property
    def status(self) -> Status:
        """What it does now."""
        if self.finish:
            return Status.FINISHED
        if self.slot < 0:
            return Status.WAITING
        return Status.PREFILL if self.num_uncomputed_tokens else Status.DECODE

    def may_draft(self, now: float) -> bool:
        """Whether its drafters, if it has any, may be asked now, or its grammar may force tokens.

        `now` is the controller's time.
        """
        return self.speculation.due <= now or self.request.sampling.grammar is not None

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of tokens to compute before it decodes: prompt tokens, or all after a preemption.

        The pass over a prompt's last token brings the first token of the answer. A sequence with
        generated tokens decodes once all but the last of them are computed.
        """
        length = len(self.tokens)
        return length - self.num_computed - (length > self._prompt_length)

    @property
    def generated(self) -> int:
        """Number of generated tokens."""
        return len(self.tokens) - self._prompt_length

    @property
    def remaining(self) -> int:
        """Number of tokens that may still be generated."""
        return self._most_tokens - len(self.tokens)

    @cached_property
    def _text(self) -> TextStream:
        request = self.request
        return TextStream(
            *(self._tokenizer, request.prompt_tokens, request.stop, request.min_indent or 0),
            request.reasoning,
            include_stop=request.include_stop,
        )

    @cached_property
    def matcher(self) -> Matcher | None:
        """The answer's place in its grammar; None without a grammar.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        grammar = self.request.sampling.grammar
        if grammar is None:
            return None
        client = self.request.client
        known = self._grammars.compiled(grammar, client, worn=True)
        return self._grammars.matcher(grammar, client) if known is None else known

    def settle(self, seconds: float) -> None:
        """End the request if its grammar takes more than a share of passes such as this one.

        Args:
            seconds: that the target's pass took.
        """
        if not self.finish and (matcher := vars(self).get("matcher")) is not None:
            try:
                matcher.settle(seconds)
            except GrammarError as error:
                self.fail(error)

    def start(self) -> None:
        """The request leaves the queue, for the first time or after it was preempted."""
        if self._started is None:
            self._started = self._clock()

    def guarded(self, work: Callable[..., T], *arguments: object) -> T | None:
        """What a part of this request's work returns; None if it fails, which ends the request."""
        try:
            return work(*arguments)
        except Exception as error:
            self.fail(error)
            return None

    def fail(self, error: Exception) -> None:
        """End this request alone with an error. Called where the error is handled."""
        if isinstance(error, GrammarError):
            self.finish, self.error = FinishReason.GRAMMAR, str(error)
            return
        fields = {"request_id": self.request.client_id}
        foreseen = isinstance(error, NotFinite)
        log.error(
            "a request failed in the engine",
            exc_info=None if foreseen else error,
            extra={"fields": fields | ({"reason": str(error)} if foreseen else {})},
        )
        self.finish, self.error = FinishReason.ERROR, str(error) or repr(error)

    def adjusted(
        self, logits: Floats, draft: tuple[int, ...], forced: tuple[int, ...] = ()
    ) -> Floats:
        """The logits that the request's tokens are chosen from.

        Args:
            logits: [k + 1, V] of the target; changed in place unless their own
                probabilities are wanted.
            draft: [k], the draft tokens before them.
            forced: tokens that the grammar puts before the draft.

        Returns:
            [k + 1, V] with penalties and biases, -inf where a token must not come.
        """
        if not self.adjusts:
            return logits
        keeps = self.request.logprobs is not None and not self.request.drawn_logprobs
        adjusted = logits.copy() if keeps else logits
        if self.matcher is not None:
            mask(adjusted, self.matcher.masks(draft, forced))
        if self._processor is not None:
            self._processor.apply(adjusted, forced + draft)
        if self._budget is not None:
            due = self._budget.due(forced + draft, len(adjusted))
            for row, token in enumerate(due):
                if token is not None:
                    adjusted[row] = -np.inf
                    adjusted[row, token] = 0
        return adjusted

    def append(
        self,
        tokens: Sequence[int],
        drafter: str,
        logits: Floats | None,
        now: float,
        forced: int = 0,
    ) -> int:
        """Append one pass's tokens up to where the request ends.

        Args:
            tokens: forced tokens, accepted draft tokens, then the target's own token.
            drafter: origin of the draft tokens.
            logits: [n, V], the logits of each of the n tokens; None: no probabilities are wanted.
            now: when they came.
            forced: number of forced tokens.

        Returns:
            The number of tokens that are part of the output.
        """
        if self._first_token is None:
            self._first_token = now
        self.last_token = now
        text, adjusts, ends = self._text, self.adjusts, self._end_tokens
        kept, last, left = self.tokens, len(tokens) - 1, self.remaining
        for position, token in enumerate(tokens):
            origin = TARGET if position == last else drafter if position >= forced else GRAMMAR
            kept.append(token)
            prob = None if logits is None else self._logprob(logits[position], token, origin)
            self._pieces += text.push(token, origin, prob)
            if token in ends or text.stopped is not None or (adjusts and self._note(token)):
                self.finish, self._stop = FinishReason.STOP, text.stopped
                return position + 1
            if text.dedented or position + 1 >= left:
                self.finish = FinishReason.LENGTH
                return position + 1
        allowed = self.request.predict_seconds
        if allowed is not None and now - self._first_token >= allowed:
            self.finish = FinishReason.LENGTH
        return len(tokens)

    def _note(self, token: int) -> bool:
        """Note a new token in what adjusts logits; returns whether the answer is complete."""
        if self._processor is not None:
            self._processor.append(token)
        if self._budget is not None:
            self._budget.push(token)
        if self.matcher is None:
            return False
        self.matcher.advance(token)
        return self.matcher.complete

    def _logprob(self, logits: Floats, token: int, origin: str) -> Logprob:
        most = self.request.logprobs or 0
        if not self.request.drawn_logprobs:
            return logprob(logits, token, most, self.request.logprob_tokens)
        certain = origin == GRAMMAR
        return drawn_logprob(logits, token, most, None if certain else self.request.sampling)

    def next_prompt(self) -> bool:
        """Go on with the next prompt to embed, or end.

        Returns:
            Whether there is a next prompt; nothing of it is computed yet.
        """
        following = self.reader and self.reader.next_prompt()
        if not following:
            self.finish = FinishReason.STOP
            return False
        self.tokens, self._prompt_length = list(following), len(following)
        self.more_tokens -= len(following)
        self.num_computed = 0
        return True

    def count_step(self, drafts: Collection[Draft] = (), *, missed: bool = False) -> None:
        """Count one pass in which the request decoded.

        Args:
            drafts: the verified drafts, at most one of each source.
            missed: a drafter was asked for draft tokens and had none.
        """
        self._steps += 1
        self._draft_misses += missed
        if not drafts:
            return
        self._drafts += 1
        for draft in drafts:
            self._sources[draft.drafter, len(draft.tokens), draft.accepted] += 1
            if draft.accepted:
                self._found_in[draft.found_in or draft.drafter] += draft.accepted

    def output(self, now: float) -> Output | None:
        """The output since the last call; None if there is none, or none yet for its client."""
        request = self.request
        computed = self._progress() if request.prompt_progress else 0
        due = self._pieces and (request.stream or now >= self._next_output)
        if not (self.finish or due or computed):
            return None
        self._next_output = now + _GATHER_SECONDS
        if self.finish and self.generated and self.error is None:
            try:
                self._pieces += self._text.flush()
            except Exception as error:
                self.fail(error)
        pieces, self._pieces = tuple(self._pieces), []
        output = Output(request.request_id, pieces)
        if self.finish or request.step_stats or computed:
            output.finish, output.error, output.stop = self.finish, self.error, self._stop
            output.stats, output.prompt_computed = self._stats(), computed
        return output if self.reader is None else self.reader.add(output)

    def _progress(self) -> int:
        """Number of the prompt's tokens that are computed, if that is news for the client."""
        computed = min(self.num_computed, self._prompt_length)
        if computed <= self._told:
            return 0
        self._told = computed
        return computed

    def _stats(self) -> GenerationStats:
        now = self._clock()
        started = self._started if self._started is not None else now
        first = self._first_token if self._first_token is not None else now
        last = self.last_token if self.last_token is not None else now
        sources: dict[str, SourceStats] = {}
        for (drafter, verified, accepted), count in self._sources.items():
            sources.setdefault(drafter, SourceStats()).add(verified, accepted, count)
        speedup = 1.0
        if self._steps and last > first:  # draft tokens are not free, whatever was estimated
            saved = 1 + self.speculation.saved / (last - first)
            speedup = min(saved, (self.generated - 1) / self._steps)
        return GenerationStats(
            prompt_tokens=self.request.num_prompt_tokens,
            cached_prompt_tokens=self.num_cached_tokens,
            generated_tokens=self.generated,
            sequence_steps=self._steps,
            drafts=self._drafts,
            draft_misses=self._draft_misses,
            sources=sources,
            accepted_found_in=dict(self._found_in),
            queue_seconds=started - self.request.arrival,
            prefill_seconds=first - started,
            decode_seconds=last - first,
            estimated_speedup=speedup,
            preemptions=self.preemptions,
        )
