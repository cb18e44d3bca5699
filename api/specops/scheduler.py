"""Which request gets the next forward pass. Moves requests; knows neither tensors nor HTTP.

`running[row]` is the sequence in that row of the cache: rows are kept compact, the last row takes
a finished one's place. One step is at most one chunk of one prompt, then one pass per sequence
that is past its prompt: those with guesses verify them row by row, the others share a pass.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby

from specops.controller import Controller
from specops.decoder import Decoder
from specops.drafters.base import Drafter
from specops.request import (
    FinishReason,
    GenerationRequest,
    Output,
    StepKind,
    StepResult,
    StepStats,
)
from specops.sequence import Sequence
from specops.speculation import Turn, jump, plan_round
from specops.tokenizer import Tokenizer


class Scheduler:
    """Owns the rows and the requests in flight. Used by one thread.

    Args:
        target: the model that answers.
        drafters: sources of guesses by name.
        controller: chooses how many guesses pay.
        tokenizer: the target's.
        end_tokens: tokens that end a text.
        prefill_chunk: prompt tokens per pass.
        exact_align: width of exact passes, see `exactness`.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self,
        target: Decoder,
        drafters: Mapping[str, Drafter],
        controller: Controller,
        tokenizer: Tokenizer,
        *,
        end_tokens: frozenset[int],
        prefill_chunk: int,
        exact_align: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.target = target
        self.drafters = drafters
        self.controller = controller
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._tokenizer = tokenizer
        self._end_tokens = end_tokens
        self._prefill_chunk = prefill_chunk
        self._exact_align = exact_align
        self._clock = clock

    @property
    def busy(self) -> bool:
        """There is something to do."""
        return bool(self.waiting or self.running)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request. Its length was checked against the context before."""
        self.waiting.append(
            Sequence(request, self._tokenizer, end_tokens=self._end_tokens, clock=self._clock)
        )

    def cancel(self, request_id: str) -> None:
        """End a request at the next step; one that is not here any more is no error."""
        for sequence in (*self.waiting, *self.running):
            if sequence.request.request_id == request_id:
                sequence.finish = FinishReason.CANCELLED

    def cancel_all(self) -> None:
        """End every request at the next step."""
        for sequence in (*self.waiting, *self.running):
            sequence.finish = FinishReason.CANCELLED

    def step(self) -> StepResult:
        """Drop who left or ran out of time, admit, prefill one chunk, decode one round."""
        self._expire()
        outputs = list(self._retire())
        self._admit()
        stats: list[StepStats] = []
        fresh: Sequence | None = None
        if prefilling := [row for row, item in enumerate(self.running) if item.prefilling]:
            oldest = min(prefilling, key=lambda row: self.running[row].request.arrival)
            fresh = self.running[oldest]
            stats.append(self._prefill(oldest))
        # Whoever has just got its first token shows it before it is given another pass.
        stats += self._decode_round(skip=fresh)
        for sequence in self.running:
            if not sequence.finish and (output := sequence.output()):
                outputs.append(output)
        outputs += self._retire()
        return StepResult(
            stats=tuple(stats),
            outputs=tuple(outputs),
            running=len(self.running),
            waiting=len(self.waiting),
            kv_tokens=self.target.cache.tokens,
        )

    def _expire(self) -> None:
        now = self._clock()
        for sequence in (*self.waiting, *self.running):
            if not sequence.finish and now > sequence.request.deadline:
                sequence.finish = FinishReason.TIMEOUT
        for sequence in self.waiting:
            if not sequence.finish and now > sequence.request.start_by:
                sequence.finish = FinishReason.TIMEOUT

    def _retire(self) -> Iterator[Output]:
        """Take out the finished, free their rows."""
        ended = [sequence for sequence in self.waiting if sequence.finish]
        for sequence in ended:
            self.waiting.remove(sequence)
        for row in reversed(range(len(self.running))):
            if self.running[row].finish:
                ended.append(self.running[row])
                self._free(row)
        for sequence in ended:
            output = sequence.output()
            if output is None:
                raise AssertionError("a finished sequence always has a last output")
            yield output

    def _free(self, row: int) -> None:
        last = self.running.pop()
        source = len(self.running)
        self.target.cache.truncate(row, 0)
        for drafter in self.drafters.values():
            drafter.release(row)
        if source == row:
            return
        self.running[row] = last
        self.target.cache.move(source, row)
        for drafter in self.drafters.values():
            drafter.move(source, row)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.target.cache.rows:
            sequence = self.waiting.popleft()
            sequence.start()
            self.running.append(sequence)

    def _prefill(self, row: int) -> StepStats:
        """Feed the next chunk of a prompt; the last one brings the first token."""
        sequence = self.running[row]
        prompt = sequence.request.prompt_tokens
        chunk = prompt[sequence.prefilled : sequence.prefilled + self._prefill_chunk]
        start = time.perf_counter()
        logits = self.target.prefill(row, chunk, align=self._exact_align)
        seconds = time.perf_counter() - start
        sequence.prefilled += len(chunk)
        emitted = 0
        if not sequence.prefilling:
            emitted = sequence.append([sequence.next_token(logits[-1])], 0, None, logits[-1:])
        drafter = self.drafters.get(sequence.request.drafter)
        if drafter is not None and not sequence.finish and self._worth_feeding(sequence):
            drafter.prefill(row, chunk)
        return StepStats(
            StepKind.PREFILL, seconds, 1, prompt_tokens=len(chunk), emitted_tokens=emitted
        )

    def _worth_feeding(self, sequence: Sequence) -> bool:
        """Whether a draft model should see the prompt before it is known to be asked."""
        request = sequence.request
        return request.k_draft > 0 and (
            not request.adaptive or self.controller.pays(request.drafter)
        )

    def _decode_round(self, skip: Sequence | None) -> Iterator[StepStats]:
        """One jump for every sequence that is past its prompt."""
        active = [
            (row, sequence)
            for row, sequence in enumerate(self.running)
            if not (sequence.prefilling or sequence.finish or sequence is skip)
        ]
        if not active:
            return
        shared: list[Turn] = []
        for turn in plan_round(active, self.drafters, self.controller, self._exact_align):
            if turn.draft.tokens or turn.candidate.alone:
                yield jump(turn, self.target, self.controller)
            else:
                shared.append(turn)
        # Adjacent rows have the same distance between row and place in the list.
        for _, run in groupby(enumerate(shared), key=lambda item: item[1].row - item[0]):
            yield self._decode([turn for _, turn in run])
        self.controller.round_ended(len(active))

    def _decode(self, turns: list[Turn]) -> StepStats:
        """One token for each of several adjacent rows, in one pass."""
        start = time.perf_counter()
        logits = self.target.decode(turns[0].row, [turn.sequence.tokens[-1] for turn in turns])
        seconds = time.perf_counter() - start
        emitted = 0
        for index, turn in enumerate(turns):
            sequence = turn.sequence
            token = sequence.next_token(logits[index])
            emitted += sequence.append([token], 0, None, logits[index : index + 1])
            sequence.count_step(asked=turn.asked)
        self.controller.decoded([turn.candidate for turn in turns], time.perf_counter() - start)
        return StepStats(
            StepKind.DECODE,
            seconds,
            len(turns),
            emitted_tokens=emitted,
            draft_seconds=sum(turn.seconds for turn in turns),
            missed_drafters=tuple(turn.drafter for turn in turns if turn.missed and turn.drafter),
            declined_drafters=tuple(turn.declined for turn in turns if turn.declined),
        )
