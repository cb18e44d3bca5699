"""The types that all layers share: a request, its output, statistics of requests and steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate, takewhile, zip_longest
from operator import mul
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, get_args

if TYPE_CHECKING:  # the command line reads these words before it needs arrays
    import numpy as np
    import numpy.typing as npt

DrafterName = Literal["draft", "head", "suffix", "cascade", "none"]
DRAFTERS: tuple[str, ...] = get_args(DrafterName)[:-1]  # without "none"
GRAMMAR = "grammar"  # the origin of tokens that the grammar forced
SOURCES = (*DRAFTERS, GRAMMAR)  # all origins of draft tokens
_LOOKUP = ("suffix", "cascade")  # their draft tokens come from a lookup or from another source
LOOKUP_PLACES = ("text", "history", "table")  # where the suffix lookup looks, in its kernel's order
PLACES = (*LOOKUP_PLACES, *(name for name in SOURCES if name not in _LOOKUP))  # of accepted tokens

SUGGESTION = -1  # the priority of text for a gap: somebody waits for it at a keyboard
PRIORITY_SECONDS = 10.0  # of waiting per step of priority: so no request starves
FIXED_K_DRAFT = 3  # draft tokens per step of a request that is not adaptive and names no number


class PromptTooLong(ValueError):  # noqa: N818 - the name says enough
    """The prompt leaves no room for an answer. Both lengths are in tokens."""

    def __init__(self, prompt_tokens: int, context: int, *, at_least: bool = False) -> None:
        super().__init__(
            f"the prompt has {'at least ' * at_least}{prompt_tokens} tokens; the model's context "
            f"is {context} tokens, prompt and answer together: shorten the prompt to at most "
            f"{context - 1}"
        )
        self.prompt_tokens = prompt_tokens
        self.context = context


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"  # an end token or a stop string
    LENGTH = "length"  # max_new_tokens or predict_seconds reached, or a line below min_indent
    CANCELLED = "cancelled"  # the client left
    TIMEOUT = "timeout"  # the request's deadline passed
    GRAMMAR = "grammar"  # its grammar was too complex to follow further
    ERROR = "error"  # the engine failed


class StepKind(StrEnum):
    """What a forward pass of the target was for."""

    PREFILL = "prefill"  # prompts only
    DECODE = "decode"  # no prompt, no draft tokens
    VERIFY = "verify"  # no prompt, with draft tokens
    MIXED = "mixed"  # prompts and decoding requests


class GrammarKind(StrEnum):
    """The language of a grammar's text."""

    JSON_OBJECT = "json_object"  # a JSON schema that allows every object
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # a JSON list of strings
    LARK = "lark"  # in llguidance's dialect, or GBNF


@dataclass(frozen=True, slots=True)
class ToolArguments:
    """A rule of a Lark grammar: a tool's arguments by their schema, as JSON or text."""

    rule: str
    tool: str
    schema: str
    strict: bool  # see `Grammar`; otherwise a wrong schema allows any arguments
    path: str = ""  # JSON pointer of this part of the tool's schema
    form: str = ""  # for a text that is not JSON: a terminal, in which `@text` is the text


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of an answer. Equal grammars are compiled once."""

    kind: GrammarKind
    text: str
    said: Grammar | None = None  # replaces `@said` in a Lark grammar's text
    arguments: tuple[ToolArguments, ...] = ()  # rules that a Lark grammar's text does not define
    strict: bool = False  # of a JSON schema: refuse keywords that cannot be enforced

    @property
    def size(self) -> int:
        """Number of characters, schemas of tools included."""
        said = self.said.size if self.said else 0
        return len(self.text) + said + sum(len(tool.schema + tool.form) for tool in self.arguments)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a token is drawn from the target's logits; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    seed: int | None = None
    grammar: Grammar | None = None  # the whole answer follows it; None: any text
    min_p: float = 0.0  # minimum probability, as a share of the likeliest token's
    presence_penalty: float = 0.0  # subtracted from the logits of the answer's tokens
    frequency_penalty: float = 0.0  # subtracted from them once per occurrence
    repetition_penalty: float = 1.0  # divides the logits of the prompt's and answer's tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # added to tokens' logits
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the answer must not have
    allowed_tokens: tuple[int, ...] = ()  # the only tokens that the answer may have; (): all

    @property
    def penalizes(self) -> bool:
        """Whether tokens of the text so far become less likely."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def adjusts(self) -> bool:
        """Whether tokens are chosen by changed logits instead of the target's."""
        return bool(self.penalizes or self.logit_bias or self.bad_words or self.allowed_tokens)


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """How a model marks the reasoning before an answer, and how many tokens it may take."""

    opening: str
    closing: str
    starts_in_reasoning: bool  # the prompt ends within reasoning
    unshown: tuple[tuple[int, str], ...]  # tokens of the marks that decoded texts leave out
    closing_tokens: tuple[int, ...]
    most: int | None = None  # tokens; None: as many as the answer


class RequestObserver(Protocol):
    """Follows a client's requests through the engine, as traces do."""

    trace_id: str

    def submitted(self, request: GenerationRequest) -> None:
        """Note a request that was submitted to the engine."""

    def finished(
        self, request: GenerationRequest, reason: FinishReason, stats: GenerationStats | None
    ) -> None:
        """Note a request's end; without statistics, it never ran."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One prompt to continue. Times are seconds of `time.monotonic()`.

    `request_id` is the engine's name for it; the part before the last slash is the client's name.
    With `max_new_tokens` 0 the prompt is only computed, for later requests.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    max_new_tokens: int
    sampling: SamplingParams = SamplingParams()
    drafter: str = "none"
    k_draft: int = 0  # maximum draft tokens per step
    adaptive: bool = False  # the controller may choose fewer draft tokens if that is faster
    logprobs: int | None = None  # number of likeliest tokens to report; None: no probabilities
    drawn_logprobs: bool = False  # report the probabilities after penalties and filters
    logprob_tokens: tuple[int, ...] = ()  # to report, with the chosen one, instead of the likeliest
    prompt_logprobs: int | None = None  # the same as `logprobs` for the prompt's tokens
    embed: bool = False  # return the prompts' embeddings instead of an answer
    more_prompts: tuple[tuple[int, ...], ...] = ()  # prompts to embed after the first one
    stop: tuple[str, ...] = ()  # after the reasoning
    reasoning: ReasoningMarks | None = None  # None: the model does not reason
    include_stop: bool = False  # the stop string that ends the answer is part of it
    stop_token_ids: tuple[int, ...] = ()  # further tokens that end the answer
    min_tokens: int = 0  # minimum number of tokens before an end token
    ignore_eos: bool = False
    client: str = ""  # name of the client's key, for the queue's shares and the prefix cache
    stream: bool = True  # the client reads each step's output, not only the last one's
    step_stats: bool = False  # each output has the statistics so far
    prompt_progress: bool = False  # there is an output for each computed part of the prompt
    arrival: float = 0.0
    deadline: float = float("inf")  # for the whole answer, the wait for a slot included
    priority: int = 0  # lower numbers go first: each step is worth `PRIORITY_SECONDS` of waiting
    predict_seconds: float | None = None  # limit from the first token's pass on
    min_indent: int | None = None  # the answer ends before a line with fewer spaces and tabs
    trace: RequestObserver | None = field(default=None, compare=False)

    @property
    def prompts(self) -> tuple[tuple[int, ...], ...]:
        """All prompts: one, or several to embed."""
        return (self.prompt_tokens, *self.more_prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(map(len, self.prompts))

    @property
    def tokens(self) -> int:
        """Maximum tokens of KV cache that the request takes: a prompt and the longest answer."""
        return max(map(len, self.prompts)) + self.max_new_tokens

    @property
    def turn(self) -> float:
        """When it is the request's turn: of waiting requests, the earliest goes first."""
        return self.arrival + PRIORITY_SECONDS * self.priority

    @property
    def client_id(self) -> str:
        """The client's name for the request."""
        return self.request_id.rpartition("/")[0] or self.request_id


TARGET = "target"  # the origin of a token that no drafter proposed


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's log-probability (natural) by the target, before temperature and filters.

    `top` has the likeliest tokens at its position, likeliest first, or the requested ones. `rank`
    counts from 1, the likeliest; 0: unknown, as for an answer's tokens.
    """

    chosen: float
    top: tuple[tuple[int, float], ...]
    rank: int = 0


class TokenOutput(NamedTuple):
    """One generated token and the text it completed.

    `text` is empty while a UTF-8 character is incomplete; the token that completes it has the whole
    character. `origin` is `target`, the drafter's name for an accepted draft token, or `grammar`
    for a forced token.
    """

    token: int
    text: str
    origin: str
    logprob: Logprob | None = None


@dataclass(slots=True)
class SourceStats:
    """Counts of one source's draft tokens for one request; item i counts the token i + 1."""

    verified_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    reached_per_position: list[int] = field(default_factory=list)  # those before were accepted

    def add(self, verified: int, accepted: int, count: int = 1) -> None:
        """Count drafts.

        Args:
            verified: number of each draft's verified tokens.
            accepted: number of its accepted tokens.
            count: number of such drafts.
        """
        for counts, length in (
            (self.verified_per_position, verified),
            (self.accepted_per_position, accepted),
            (self.reached_per_position, accepted + 1),
        ):
            counts.extend([0] * (verified - len(counts)))
            for position in range(min(verified, length)):
                counts[position] += count

    def __add__(self, other: SourceStats) -> SourceStats:
        """Both together, position by position."""
        pairs = (
            (self.verified_per_position, other.verified_per_position),
            (self.accepted_per_position, other.accepted_per_position),
            (self.reached_per_position, other.reached_per_position),
        )
        return SourceStats(*([*map(sum, zip_longest(*pair, fillvalue=0))] for pair in pairs))

    @property
    def acceptance(self) -> list[float]:
        """By position, the accepted share of tokens whose predecessors were accepted."""
        pairs = zip(self.accepted_per_position, self.reached_per_position, strict=True)
        return [accepted / reached for accepted, reached in pairs if reached]


@dataclass(frozen=True, slots=True)
class GenerationStats:
    """What one request cost. Seconds are wall time; steps are the target's forward passes.

    The first token comes from the prompt's pass, so `generated_tokens - 1` tokens were decoded, in
    `sequence_steps` steps. `sources` counts draft tokens by their origin: a step may verify tokens
    of a drafter and of the grammar.
    """

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0  # those that an earlier request computed
    generated_tokens: int = 0
    sequence_steps: int = 0  # passes in which this request decoded
    drafts: int = 0  # steps with at least one draft token
    draft_misses: int = 0  # steps in which the drafter was asked but proposed nothing
    sources: Mapping[str, SourceStats] = field(default_factory=dict)
    accepted_found_in: Mapping[str, int] = field(default_factory=dict)  # see `PLACES`
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0  # from leaving the queue to the first token
    decode_seconds: float = 0.0  # from the first token to the last
    estimated_speedup: float = 1.0  # over plain decoding, by the measured costs of the passes
    preemptions: int = 0  # how often the request gave up its KV blocks and was computed again

    @property
    def draft_tokens(self) -> int:
        """Number of verified draft tokens."""
        return sum(sum(source.verified_per_position) for source in self.sources.values())

    @property
    def accepted_tokens(self) -> int:
        """Number of draft tokens that became part of the output."""
        return sum(self.accepted_per_position)

    @property
    def accepted_per_position(self) -> list[int]:
        """Accepted tokens of all sources, by position."""
        return sum(self.sources.values(), SourceStats()).accepted_per_position

    @property
    def tokens_per_pass(self) -> float:
        """Decoded tokens per sequence step, steps without a draft included; 0 without a step."""
        if not self.sequence_steps:
            return 0.0
        return (self.generated_tokens - 1) / self.sequence_steps

    @property
    def draft_length(self) -> float:
        """Draft tokens per sequence step, steps without a draft included; 0 without a step."""
        return self.draft_tokens / self.sequence_steps if self.sequence_steps else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens per draft, steps without a draft excluded; 0 without a draft."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first; 0 if only one was generated."""
        if self.generated_tokens < 2 or self.decode_seconds <= 0:
            return 0.0
        return (self.generated_tokens - 1) / self.decode_seconds


@dataclass(slots=True)
class Output:
    """One step's result for one request; the last one has `finish`, and, as some others, `stats`.

    Do not change one. It is not frozen because making it would take four times as long.
    """

    request_id: str
    pieces: tuple[TokenOutput, ...] = ()
    finish: FinishReason | None = None
    stats: GenerationStats | None = None
    error: str | None = None
    stop: str | None = None  # the stop string that ended it
    prompt: Sequence[Logprob | None] = ()  # of the prompt's tokens, with the first output
    embeddings: npt.NDArray[np.float32] | None = None  # [prompts, size], with the last output
    prompt_computed: int = 0  # tokens of the prompt so far, with `prompt_progress`

    @property
    def text(self) -> str:
        """The text of all pieces."""
        return "".join([piece.text for piece in self.pieces])

    @property
    def reported_tokens(self) -> int:
        """Number of reported tokens: new ones, the prompt's, and the alternatives of each."""
        last = self.prompt[-1] if self.prompt else None  # all but the first have as many
        reported = len(self.prompt) * (1 + len(last.top) if last else 1)
        likely = [len(piece.logprob.top) for piece in self.pieces if piece.logprob]
        return reported + len(self.pieces) + sum(likely)


@dataclass(slots=True)
class Draft:
    """Draft tokens of one request in one step, from the drafter to the metrics.

    Attributes:
        tokens: [k], their numbers.
        probs: [k, V], the distribution that each token was drawn from; None if no token was drawn
            (greedy, or looked up), or if the request has a seed: verification then compares tokens.
        drafter: the name of their source; the engine fills it in.
        accept_probs: [k], the calibrated probability that each token is accepted, given that those
            before it are. After verification, only of the tokens up to the first rejected one.
        accepted: number of tokens that became output.
        adaptive: whether the controller chose the number of tokens.
        found_in: where a lookup found them, one of `PLACES`; empty: see `drafter`.
    """

    tokens: tuple[int, ...] = ()
    probs: npt.NDArray[np.float32] | None = None
    drafter: str = ""
    accept_probs: tuple[float, ...] = ()
    accepted: int = 0
    adaptive: bool = False
    found_in: str = ""

    @property
    def expected(self) -> float:
        """Expected number of accepted tokens, by the drafter's estimate."""
        return float(sum(accumulate(self.accept_probs, mul)))

    def cut(self, count: int) -> Draft:
        """Return the draft's first `count` tokens."""
        return Draft(
            self.tokens[:count],
            self.probs,
            self.drafter,
            self.accept_probs[:count],
            found_in=self.found_in,
        )

    def likely(self, count: int, min_reach: float) -> Draft:
        """Return its first tokens, at most `count`, that are reached with at least `min_reach`."""
        reached = accumulate(self.accept_probs[:count], mul)
        return self.cut(sum(1 for _ in takewhile(lambda reach: reach >= min_reach, reached)))


@dataclass(slots=True)
class Step:
    """What one `Scheduler.step()` did: one forward pass of the target, or none.

    `seconds` is the time of the target's pass alone, `draft_seconds` that of drafting; `ended` is
    when the pass ended.
    """

    kind: StepKind | None = None  # None: nothing was computed
    seconds: float = 0.0
    decoding: int = 0  # requests that decoded in it, one sequence step each
    prompt_tokens: int = 0  # prompt tokens that it computed
    budget_tokens: int = 0  # prompt tokens that it had room for; 0 if no prompt waited
    cached_tokens: int = 0  # prompt tokens that needed no pass; counted in the prompt's first pass
    emitted_tokens: int = 0  # generated tokens, requests' first ones included
    first_tokens: int = 0  # requests that got their first token
    client_tokens: dict[str, int] = field(default_factory=dict)  # generated tokens, by client
    intervals: dict[float, int] = field(default_factory=dict)  # seconds between tokens: tokens
    drafts: list[Draft] = field(default_factory=list)  # verified drafts
    draft_seconds: float = 0.0
    missed_drafters: Sequence[str] = ()  # one per request without a proposal
    declined_drafters: Sequence[str] = ()  # one per request whose drafting did not pay
    failed_drafters: Sequence[str] = ()  # switched off by an error
    preempted: int = 0  # requests that gave up their KV blocks
    # After the pass:
    ended: float = 0.0
    outputs: list[Output] = field(default_factory=list)
    running: int = 0  # requests that hold a slot
    snapshots: Mapping[str, int] = field(default_factory=dict)  # numbers taken, used and dropped

    @property
    def draft_tokens(self) -> int:
        """Number of verified draft tokens."""
        return sum(len(draft.tokens) for draft in self.drafts)

    @property
    def accepted_tokens(self) -> int:
        """Number of draft tokens that became output."""
        return sum(draft.accepted for draft in self.drafts)
