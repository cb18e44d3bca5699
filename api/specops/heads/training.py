"""Trains a head on texts of its target, and calibrates it. A stopped training can continue later.

The loss is the cross entropy to the target's distribution. Towards the end of the training, the
head also makes a second guess from its own state, as in use.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from specops.heads.examples import Examples
from specops.heads.network import HeadNetwork
from specops.system.folders import file_at_once

_BATCH = 512
_RATE, _WARM_UP = 1.5e-3, 0.03
_DECAY = 0.05
_UNROLL_FROM = 0.7  # share of the time after which second guesses are trained
_SECOND = 0.3  # weight of the loss of second guesses
_LEAST = 1e-4  # smallest share whose logarithm is taken
_REPORTED = 2048  # held-out positions that a progress line measures
_REPORT_SECONDS, _SAVE_SECONDS = 20.0, 60.0
_EDGE = 1e-6  # same value as in speculation/drafters/head.py
_FIT_STEPS = 50
_START = 0.3  # initial scale, relative to hidden states: the first guesses are uncertain


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Shares of correct first guesses, and of correct second guesses after a correct first one."""

    first: float
    second: float


def new_network(examples: Examples, rows: Tensor) -> HeadNetwork:
    """Make an untrained network."""
    torch.manual_seed(0)
    scale = float(examples.states[:4096].float().square().mean().sqrt())
    return HeadNetwork(rows, _START * scale)


class Training:
    """A training of a given duration.

    Args:
        network: the network; it is trained in place.
        examples: the examples to learn from.
        held_out: examples for progress lines.
        seconds: duration of the training, over all calls.
        checkpoint: file with the state of the training.
        tell: called with progress lines.
        clock: returns seconds.
    """

    def __init__(
        self,
        network: HeadNetwork,
        examples: Examples,
        held_out: Examples,
        *,
        seconds: float,
        checkpoint: Path,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network, self._examples, self._held_out = network, examples, held_out
        self._seconds, self._file, self._tell = seconds, checkpoint, tell
        self._optimizer = torch.optim.AdamW(
            network.parameters(), lr=_RATE, betas=(0.9, 0.98), weight_decay=_DECAY
        )
        self._clock = clock
        self._spent, self._seen = 0.0, 0
        if checkpoint.exists():
            self._load()

    def run(self) -> None:
        """Train until the time is used up."""
        reported = saved = self._clock()
        try:
            while self._spent < self._seconds:
                begun = self._clock()
                self._step(self._spent / self._seconds)
                now = self._clock()
                self._spent += now - begun
                if now - reported > _REPORT_SECONDS:
                    self._report()
                    reported = now
                if now - saved > _SAVE_SECONDS:
                    self._save()
                    saved = now
        finally:
            self._save()
        self._report()

    def _step(self, progress: float) -> None:
        rate = _RATE * min(1.0, progress / _WARM_UP + 0.01)
        for group in self._optimizer.param_groups:
            group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * progress))
        batch = torch.randint(len(self._examples), (_BATCH,))
        with torch.autocast("cpu", torch.bfloat16):
            loss = self._loss(batch, unroll=progress >= _UNROLL_FROM)
        self._optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._network.parameters(), 1.0)
        self._optimizer.step()
        self._seen += len(batch)

    def _loss(self, batch: Tensor, *, unroll: bool) -> Tensor:
        data = self._examples
        logits, states = self._network(data.codes[batch], data.states[batch].float())
        loss = _cross_entropy(logits, data.labels[batch], data.probs[batch])
        if unroll:
            on = data.followed[batch]
            after = batch[on] + 1
            logits, _ = self._network(data.codes[after], states[on])
            loss = loss + _SECOND * _cross_entropy(logits, data.labels[after], data.probs[after])
        return loss

    def _report(self) -> None:
        reached = acceptance(self._network, self._held_out, _REPORTED)
        left = max(0.0, self._seconds - self._spent) / 60
        self._tell(
            f"training: {self._seen / max(self._spent, 1e-9):,.0f} tokens/s, "
            f"{self._seen / len(self._examples):.1f} epochs, first guess right "
            f"{reached.first:.1%}, second {reached.second:.1%}, about {left:.0f} min left"
        )

    def _save(self) -> None:
        state = {
            "network": self._network.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "spent": self._spent,
            "seen": self._seen,
        }
        with file_at_once(self._file) as partial:
            torch.save(state, partial)

    def _load(self) -> None:
        state = torch.load(self._file, weights_only=True)
        self._network.load_state_dict(state["network"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._spent, self._seen = state["spent"], state["seen"]
        self._tell(f"training continues after {self._spent / 60:.1f} minutes")


def _cross_entropy(logits: Tensor, labels: Tensor, probs: Tensor) -> Tensor:
    """Return the mean over [n] rows; the rest of each distribution counts as one more token."""
    logs = logits.float().log_softmax(-1).gather(1, labels)
    rest = (1 - probs.sum(-1)).clamp_min(0)
    rest_logs = (1 - logs.exp().sum(-1)).clamp_min(_LEAST).log()
    return -((probs * logs).sum(-1) + rest * rest_logs).mean()


def guesses(
    network: HeadNetwork, examples: Examples, most: int | None = None
) -> tuple[Tensor, Tensor]:
    """Guess twice at each position whose next two tokens are known, or at the first `most`.

    Returns:
        [m, 2] probabilities of the two guesses, the second one if the first is right, and [m, 2]
        whether the guesses are right.
    """
    at = examples.followed.nonzero().squeeze(1)[:most]
    sure, right = [], []
    with torch.no_grad():
        for part in at.split(_BATCH):
            codes, states = examples.codes[part], examples.states[part].float()
            for guessed in (part, part + 1):
                logits, states = network(codes, states)
                best = logits[:, :-1].float().softmax(-1).max(-1)
                known = 1 - logits.float().softmax(-1)[:, -1]
                codes = examples.chosen[guessed]
                sure.append(best.values * known)
                right.append(best.indices == codes)
    pairs = [torch.cat(values) for values in (sure[::2], sure[1::2], right[::2], right[1::2])]
    return torch.stack(pairs[:2], 1), torch.stack(pairs[2:], 1)


def acceptance(network: HeadNetwork, examples: Examples, most: int | None = None) -> Acceptance:
    """Measure how often the guesses are right."""
    _, right = guesses(network, examples, most)
    first, both = right[:, 0].float().mean(), right.all(1).float().mean()
    return Acceptance(float(first), float(both / first.clamp_min(1e-9)))


def calibrate(network: HeadNetwork, examples: Examples) -> tuple[tuple[float, float], ...]:
    """Fit factor and summand of the logits of each guess, so that its probabilities are true.

    The second guess is fitted where the first one is right. (Platt 1999, Probabilistic outputs for
    support vector machines.)

    Args:
        network: the trained network.
        examples: examples that it was not trained on.
    """
    sure, right = guesses(network, examples)
    first = right[:, 0]
    return _fit(sure[:, 0], first), _fit(sure[first, 1], right[first, 1])


def _fit(sure: Tensor, right: Tensor) -> tuple[float, float]:
    """Fit sigmoid(factor * logit(sure) + summand) [n] to `right` [n]; the identity for n = 0."""
    line = torch.tensor([1.0, 0.0], requires_grad=True)
    if len(sure):
        logits = torch.logit(sure, _EDGE)
        optimizer = torch.optim.LBFGS([line], max_iter=_FIT_STEPS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            # The small term bounds the fit if there are few examples, all of them right.
            loss = functional.binary_cross_entropy_with_logits(
                line[0] * logits + line[1], right.float()
            )
            loss = loss + (line - torch.tensor([1.0, 0.0])).square().sum() / len(sure)
            loss.backward()
            return loss

        optimizer.step(closure)
    factor, summand = line.tolist()
    return factor, summand
