"""Draft, verify, accept: the turns of one round, and one jump of one sequence.

The target's pass takes the last token and all guesses at once, so its cache then also holds the
rejected ones; forgetting them is a length change.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from specops.controller import Candidate, Controller, kind_of_match
from specops.decoder import Decoder
from specops.drafters.base import NO_DRAFT, Draft, Drafter
from specops.request import StepKind, StepStats
from specops.sampling import Floats, filtered_probs
from specops.sequence import Sequence
from specops.verify import Verdict, verify_greedy, verify_sampled, verify_seeded


@dataclass(slots=True)
class Turn:
    """A sequence's part in a round.

    Attributes:
        row: the sequence's row of the cache.
        sequence: past its prompt.
        candidate: what the controller knows of it.
        draft: guesses to verify, maybe none.
        asked: a drafter was asked for guesses; a draft model that still reads the prompt is not.
        seconds: that guessing took.
    """

    row: int
    sequence: Sequence
    candidate: Candidate
    draft: Draft = NO_DRAFT
    asked: bool = False
    seconds: float = 0.0

    @property
    def drafter(self) -> str | None:
        """Who made the guesses; where there are none, who was asked; None where nobody was."""
        return (self.draft.origin or self.sequence.request.drafter) if self.asked else None

    @property
    def missed(self) -> bool:
        """A drafter was asked and had nothing."""
        return self.asked and not self.draft.tokens

    @property
    def declined(self) -> str | None:
        """Whose guesses, had or to be had, did not seem to pay; None where some are verified."""
        if self.draft.tokens or self.missed or self.candidate.drafter is None:
            return None
        return self.candidate.source or self.candidate.drafter


def plan_round(
    rows: Collection[tuple[int, Sequence]],
    drafters: Mapping[str, Drafter],
    controller: Controller,
    exact_align: int,
) -> list[Turn]:
    """Collect guesses as far as they pay.

    Looking guesses up costs little, so that is done first, and how good they look decides how many
    are verified; a draft model is asked only for as many as pay.

    Args:
        rows: the sequences that decode, by row.
        drafters: by name.
        controller: chooses how many guesses each gets.
        exact_align: width of exact passes, see `exactness`.
    """
    start = time.perf_counter()
    controller.begin(len(rows))
    turns = [
        _look_up(row, sequence, drafters, controller, exact_align if sequence.request.exact else 1)
        for row, sequence in rows
    ]
    lengths = controller.choose([turn.candidate for turn in turns])
    asking = [turn for turn in turns if turn.asked and not turn.candidate.fixed]
    if asking:
        seconds = (time.perf_counter() - start) / len(asking)
        for turn in asking:
            controller.asked(turn.candidate.outlook, turn.sequence.request.drafter, seconds)
    for turn, length in zip(turns, lengths, strict=True):
        if turn.candidate.paid:
            _propose(turn, length, drafters)
        elif length < len(turn.draft.tokens):
            turn.draft = replace(turn.draft, tokens=turn.draft.tokens[:length])
            turn.asked = length > 0  # nothing was missing: it did not pay
    return turns


def reader(
    sequence: Sequence, drafters: Mapping[str, Drafter], controller: Controller
) -> Drafter | None:
    """The draft model that has to read the request's prompt before it guesses, or to read on.

    None where it has read it, and where its guesses have not paid of late: should they come to
    be asked for, it catches up.
    """
    request = sequence.request
    drafter = drafters.get(request.drafter)
    if drafter is None or not drafter.runs_model:
        return None
    if min(request.k_draft, sequence.remaining - 1) < 1:
        return None
    if request.adaptive and not controller.pays(drafter.name):
        return None
    # A backlog is 1 where nothing is missing.
    return drafter if drafter.backlog(sequence.slot, len(request.prompt_tokens)) > 1 else None


def _look_up(
    row: int,
    sequence: Sequence,
    drafters: Mapping[str, Drafter],
    controller: Controller,
    align: int,
) -> Turn:
    """Ask the request's drafter for what it has at hand."""
    request, outlook = sequence.request, sequence.outlook
    candidate = Candidate(outlook, align=align, alone=request.exact)
    turn = Turn(row, sequence, candidate)
    drafter = drafters.get(request.drafter)
    # The target adds a token of its own to the accepted guesses: the last is never guessed.
    most = min(request.k_draft, sequence.remaining - 1)
    if drafter is None or most < 1:
        return turn
    candidate.drafter, candidate.fixed = drafter.name, not request.adaptive
    if request.adaptive and not controller.asks(outlook, drafter.name):
        return turn
    turn.asked = True
    start = time.perf_counter()
    turn.draft = drafter.look_up(sequence.slot, sequence.tokens, most)
    turn.seconds = time.perf_counter() - start
    candidate.most = len(turn.draft.tokens)
    candidate.source = turn.draft.origin
    candidate.kind = kind_of_match(turn.draft.match_length)
    if candidate.most or not drafter.runs_model:
        return turn
    if not reader(sequence, drafters, controller):
        candidate.paid, candidate.most, candidate.source = True, most, None
        candidate.backlog = drafter.backlog(sequence.slot, len(sequence.tokens))
    elif candidate.source is None:  # the model cannot guess yet, and there was no lookup
        turn.asked, candidate.drafter = False, None
    return turn


def _propose(turn: Turn, length: int, drafters: Mapping[str, Drafter]) -> None:
    """Let the draft model guess."""
    if not length:
        turn.asked = False
        return
    sequence = turn.sequence
    drafter = drafters[sequence.request.drafter]
    start = time.perf_counter()
    turn.draft = drafter.propose(
        sequence.slot, sequence.tokens, length, sequence.request.sampling, sequence.rng
    )
    turn.seconds += time.perf_counter() - start


def jump(turn: Turn, target: Decoder, controller: Controller) -> StepStats:
    """Verify the guesses in one pass and append what stands, with the target's own token after it.

    Args:
        turn: the target's cache holds all of the sequence's tokens but the last.
        target: runs one pass.
        controller: is told what came of it.
    """
    row, sequence, draft = turn.row, turn.sequence, turn.draft
    request, guesses = sequence.request, len(draft.tokens)
    held = target.cache.lengths[row]
    start = time.perf_counter()
    logits = target.extend(row, [sequence.tokens[-1], *draft.tokens], align=turn.candidate.align)
    seconds = time.perf_counter() - start
    verdict = _verify(sequence, draft, logits)
    target.cache.truncate(row, held + 1 + verdict.accepted)
    tokens = [*draft.tokens[: verdict.accepted], verdict.next_token]
    emitted = sequence.append(tokens, verdict.accepted, turn.drafter, logits)
    # A stop inside of the accepted guesses: what came after it never was output.
    accepted = min(verdict.accepted, emitted)
    sequence.count_step(asked=turn.asked, draft_tokens=guesses, accepted=accepted)
    controller.verified(
        turn.candidate, guesses, verdict.accepted, time.perf_counter() - start, turn.seconds
    )
    return StepStats(
        kind=StepKind.VERIFY if guesses else StepKind.DECODE,
        seconds=seconds,
        rows=1,
        emitted_tokens=emitted,
        drafter=turn.drafter,
        draft_seconds=turn.seconds,
        draft_tokens=guesses,
        accepted_per_position=(1,) * accepted,
        missed_drafters=(turn.drafter,) if turn.missed and turn.drafter else (),
        declined_drafters=(turn.declined,) if turn.declined else (),
        exact=request.exact,
    )


def _verify(sequence: Sequence, draft: Draft, logits: Floats) -> Verdict:
    """What stands of the guesses, by the request's rule; `logits` are [k + 1, V]."""
    sampling = sequence.request.sampling
    if sampling.temperature == 0:
        return verify_greedy(logits, draft.tokens)
    if sampling.seed is not None:
        return verify_seeded(logits, draft.tokens, sampling, len(sequence.tokens))
    probs = filtered_probs(logits, sampling)
    return verify_sampled(probs, draft.tokens, draft.probs, sequence.rng)
