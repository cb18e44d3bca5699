"""Trains a head on texts of its target, and calibrates it. A stopped training can continue later.

The head is unrolled from the start: it guesses several tokens in a row from its own states, as when
serving, and later guesses count less. So do tokens that a lookup finds, because no head is asked
for them. The loss is at first the cross entropy to the target's distribution, later mostly the
total variation.
"""

from __future__ import annotations

import errno
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from pickle import PickleError  # nosec B403: nothing is unpickled by it

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim import Muon

from specops.heads.network import DistillationLoss, HeadNetwork
from specops.heads.storage import Conversation
from specops.heads.teacher import Lesson, Teacher
from specops.models.folder import ModelError
from specops.models.progress import every
from specops.system.folders import file_at_once

GUESSES = 3  # in a row
_FADING = 0.8  # weight of each guess, relative to the one before
_REPEATED = 0.1  # weight of a token that a lookup finds
_RATE, _LAST_RATE = 2e-3, 0.03  # and its share at the end
_WARM_UP = 100  # steps
_DECAY = 0.02
_VARIATION = 3.0  # weight of the total variation beside the cross entropy
_LEAST_MIX, _MIXED_AFTER = 0.1, 0.5  # last share of the cross entropy; when it is reached
_NEIGHBOURS = 64  # lessons whose texts are sorted by length
_REPORTED = 16  # held-out texts that a progress line measures
_REPORT_SECONDS, _SAVE_SECONDS = 60.0, 120.0
_EDGE = 1e-6  # same value as in speculation/drafters/calibration.py
_FIT_STEPS = 50

# For each guess in a row [n] how sure it is; [n] whether it is right, 0 or 1; and [n] whether a
# lookup finds the token.
Found = Sequence[Sequence[Tensor]]


class Training:
    """A training of a given duration.

    Args:
        network: the head; it is trained in place.
        teacher: reads the texts.
        texts: to learn from.
        unseen: texts for progress lines.
        seconds: duration of the training, over all calls.
        checkpoint: file with the state of the training.
        tell: called with progress lines.
        clock: returns seconds.

    Raises:
        ModelError: the file is damaged.

    Attributes:
        spent: seconds so far, over all calls.
        seen: number of tokens that it has been trained on so far.
    """

    def __init__(
        self,
        network: HeadNetwork,
        teacher: Teacher,
        texts: Sequence[Conversation],
        unseen: Sequence[Conversation],
        *,
        seconds: float,
        checkpoint: Path,
        tell: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._network, self._teacher, self._texts = network, teacher, texts
        self._unseen, self._seconds, self._file = unseen[:_REPORTED], seconds, checkpoint
        self._tell, self._clock = tell, clock
        self._parameters = list(network.weights.values())
        matrices = [values for values in self._parameters if values.ndim == 2]
        vectors = [values for values in self._parameters if values.ndim == 1]
        # Muon with steps scaled to AdamW's, whose rates these are: it learns more per token.
        self._optimizers = [
            Muon(matrices, weight_decay=_DECAY, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, betas=(0.9, 0.98), weight_decay=0.0),
        ]
        self.spent, self._steps, self.seen, self._mix = 0.0, 0, 0, 1.0
        if checkpoint.exists():
            self._load()

    def run(self) -> None:
        """Train until the time is used up."""
        tell_due, save_due = every(_REPORT_SECONDS), every(_SAVE_SECONDS)
        batches = self._batches()
        # The next texts are read while the head learns from the ones before.
        with ThreadPoolExecutor(1) as reader:
            texts = next(batches)
            lesson = reader.submit(self._teacher.lesson, texts)
            try:
                while self.spent < self._seconds:
                    begun = self._clock()
                    learned = texts, lesson.result()
                    texts = next(batches)
                    lesson = reader.submit(self._teacher.lesson, texts)
                    self._step(*learned, self.spent / self._seconds)
                    self.spent += self._clock() - begun
                    if tell_due():
                        wait([lesson])  # reports read texts, too
                        self._report()
                    if save_due():
                        self._save()
            finally:
                self._save()
        self._report()

    def _batches(self) -> Iterator[list[Conversation]]:
        """The texts in random order, again and again; those of a lesson are about as long."""
        chosen = random.Random(self._steps)  # nosec B311: an order of texts
        while True:
            order = list(self._texts)
            chosen.shuffle(order)
            count = self._teacher.texts
            for start in range(0, len(order), _NEIGHBOURS * count):
                part = sorted(
                    order[start : start + _NEIGHBOURS * count],
                    key=lambda item: len(item.prompt) + len(item.tokens),
                )
                lessons = [part[at : at + count] for at in range(0, len(part), count)]
                chosen.shuffle(lessons)
                yield from lessons

    def _step(self, texts: list[Conversation], lesson: Lesson, progress: float) -> None:
        self._steps += 1
        falling = _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = _RATE * min(1.0, self._steps / _WARM_UP) * falling
        mix = 1 - (1 - _LEAST_MIX) * progress / _MIXED_AFTER
        self._mix = max(_LEAST_MIX, min(self._mix, mix))  # more time does not raise it again
        loss = self._loss(lesson)
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer in self._optimizers:
            optimizer.step()
        self.seen += sum(len(item.tokens) for item in texts)

    def _loss(self, lesson: Lesson) -> Tensor:
        rows, precision = self._network.rows, self._network.precision
        total = torch.zeros((), device=rows.device)
        mass = torch.where(lesson.repeated, _REPEATED, 1.0) * lesson.mass
        for guess, states in enumerate(guessed(self._network, lesson)):
            here, at = lesson.places(guess)
            target = lesson.shares[at] if guess else lesson.shares, mass[at]
            factors = self._mix, (1 - self._mix) * _VARIATION
            loss = DistillationLoss.apply(states[here].to(precision), rows, target, factors)
            total = total + _FADING**guess * loss
        return total

    def _report(self) -> None:
        found = rounds(self._network, self._teacher, self._unseen)
        reached, new = acceptance(found), acceptance(found, repeated=False)[0]
        left = max(0.0, self._seconds - self.spent) / 60
        self._tell(
            f"training: {self.seen:,} tokens, {self.seen / max(self.spent, 1e-9):,.0f} "
            f"tokens/s, guesses right {', '.join(f'{share:.1%}' for share in reached)} "
            f"({new:.1%} of first ones that no lookup finds), about {left:.0f} min of training left"
        )

    def _save(self) -> None:
        state = {
            "weights": self._network.weights,
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "counts": (self.spent, self._steps, self.seen, self._mix),
        }
        with file_at_once(self._file) as partial:
            try:
                torch.save(state, partial)
            except RuntimeError as error:  # all that torch says of a full disk
                full = errno.ENOSPC
                raise OSError(full, os.strerror(full), str(self._file)) from error

    def _load(self) -> None:
        try:
            state = torch.load(self._file, self._network.rows.device, weights_only=True)
            with torch.no_grad():
                for name, value in self._network.weights.items():
                    value.copy_(state["weights"][name])
            for optimizer, kept in zip(self._optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(kept)
            self.spent, self._steps, self.seen, self._mix = state["counts"]
        except (RuntimeError, EOFError, LookupError, TypeError, ValueError, PickleError) as error:
            raise ModelError(
                f"{self._file} is damaged, or was left by another version: remove it, and the "
                "training begins anew on the texts that are already written"
            ) from error
        self._tell(f"training continues after {self.spent / 60:.1f} minutes")


def guessed(network: HeadNetwork, lesson: Lesson) -> list[Tensor]:
    """The states [B, T, hidden] of each guess in a lesson."""
    halves = network.precision is torch.bfloat16
    with torch.autocast(network.rows.device.type, torch.bfloat16, enabled=halves):
        return list(network.guess(lesson.embeddings, lesson.states, GUESSES))


def rounds(network: HeadNetwork, teacher: Teacher, texts: Sequence[Conversation]) -> Found:
    """Guess tokens of texts as in use, beginning at each.

    Returns:
        The guesses; of later ones in a row, those behind right ones.
    """
    parts: list[list[list[Tensor]]] = [[[torch.zeros(0)] * 3] for _ in range(GUESSES)]
    with torch.no_grad():
        for start in range(0, len(texts), teacher.texts):
            lesson = teacher.lesson(texts[start : start + teacher.texts])
            right = lesson.taught
            for guess, states in enumerate(guessed(network, lesson)):
                here, rows = lesson.places(guess, right)
                best = (states[here].float() @ network.rows.T).softmax(-1).max(-1)
                right = torch.zeros_like(here)
                right[here] = best.indices == lesson.chosen[rows]
                entry = best.values, right[here].float(), lesson.repeated[rows].float()
                parts[guess].append([values.cpu() for values in entry])
    return [[torch.cat(values) for values in zip(*entries, strict=True)] for entries in parts]


def acceptance(found: Found, *, repeated: bool = True) -> list[float]:
    """The shares of right guesses, by place; without `repeated` of what no lookup finds."""
    kept = [right if repeated else right[again == 0] for _, right, again in found]
    return [float(right.mean()) if len(right) else 0.0 for right in kept]


def calibrate(found: Found) -> list[tuple[float, float]]:
    """Fit factor and summand of the logits of each guess, so that its probabilities are true.

    (Platt 1999, Probabilistic outputs for support vector machines.)

    Args:
        found: what `rounds` found in texts that the head was not trained on.
    """
    return [_fit(sure, right) for sure, right, _ in found]


def _fit(sure: Tensor, right: Tensor) -> tuple[float, float]:
    """Fit sigmoid(factor * logit(sure) + summand) [n] to `right` [n]; the identity for n = 0."""
    line = torch.tensor([1.0, 0.0], requires_grad=True)
    if len(sure):
        logits = torch.logit(sure, _EDGE)
        optimizer = torch.optim.LBFGS([line], max_iter=_FIT_STEPS, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            # The small term bounds the fit if there are few examples, all of them right.
            loss = functional.binary_cross_entropy_with_logits(line[0] * logits + line[1], right)
            loss = loss + (line - torch.tensor([1.0, 0.0])).square().sum() / len(sure)
            loss.backward()
            return loss

        optimizer.step(closure)
    factor, summand = line.tolist()
    return factor, summand
