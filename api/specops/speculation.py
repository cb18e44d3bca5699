"""Draft, verify, accept: one jump of one sequence.

The target's pass takes the last token and all guesses at once, so its cache then also holds the
rejected ones; forgetting them is a length change.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from specops.decoder import Decoder
from specops.drafters.base import NO_DRAFT, Draft, Drafter
from specops.request import StepKind, StepStats
from specops.sampling import filtered_probs
from specops.sequence import Sequence
from specops.verify import verify_greedy, verify_sampled


@dataclass(frozen=True, slots=True)
class Proposal:
    """A drafter's answer. `drafter` is None where none was asked."""

    draft: Draft = NO_DRAFT
    drafter: str | None = None
    seconds: float = 0.0


def propose(row: int, sequence: Sequence, drafters: Mapping[str, Drafter]) -> Proposal:
    """Ask the request's drafter how the sequence goes on.

    The target adds a token of its own to the accepted guesses, so the last token that may be
    generated is never guessed.
    """
    request = sequence.request
    count = min(request.k_draft, sequence.remaining - 1)
    drafter = drafters.get(request.drafter)
    if drafter is None or count < 1:
        return Proposal()
    start = time.perf_counter()
    draft = drafter.propose(row, sequence.tokens, count, request.sampling, sequence.rng)
    return Proposal(draft, drafter.name, time.perf_counter() - start)


def jump(
    row: int, sequence: Sequence, proposal: Proposal, target: Decoder, *, align: int
) -> StepStats:
    """Verify the guesses in one pass and append what stands, with the target's own token after it.

    Args:
        row: the sequence's row; the target's cache holds all its tokens but the last.
        sequence: is appended to.
        proposal: guesses, maybe none.
        target: runs one pass.
        align: the pass's width is a multiple of it; see `exactness`.
    """
    request, draft = sequence.request, proposal.draft
    guesses = len(draft.tokens)
    held = target.cache.lengths[row]
    start = time.perf_counter()
    logits = target.extend(
        row,
        [sequence.tokens[-1], *draft.tokens],
        align=align,
    )
    seconds = time.perf_counter() - start
    if request.sampling.temperature == 0:
        verdict = verify_greedy(logits, draft.tokens)
    else:
        target_probs = filtered_probs(logits, request.sampling)
        verdict = verify_sampled(target_probs, draft.tokens, draft.probs, sequence.rng)
    target.cache.truncate(row, held + 1 + verdict.accepted)
    tokens = [*draft.tokens[: verdict.accepted], verdict.next_token]
    emitted = sequence.append(tokens, verdict.accepted, proposal.drafter)
    # A stop inside of the accepted guesses: what came after it never was output.
    accepted = min(verdict.accepted, emitted)
    asked = proposal.drafter is not None
    sequence.count_step(asked=asked, draft_tokens=guesses, accepted=accepted)
    return StepStats(
        kind=StepKind.VERIFY if guesses else StepKind.DECODE,
        seconds=seconds,
        rows=1,
        emitted_tokens=emitted,
        drafter=proposal.drafter,
        draft_seconds=proposal.seconds,
        draft_tokens=guesses,
        accepted_per_position=(1,) * accepted,
        missed_drafters=(proposal.drafter,) if proposal.drafter and not guesses else (),
        exact=request.exact,
    )
