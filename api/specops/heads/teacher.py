"""What a head learns from: the target's states and probabilities in texts that it has written.

They are computed again whenever a text is read, by the engine's own kernels, which takes less time
than learning from them. So only the texts have to survive an interruption.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specops.heads.storage import Conversation
from specops.heads.target_rows import Embedding
from specops.models.folder import ModelFolder
from specops.models.graph.weight_cache import prepacked_graph
from specops.runtime.batch import Batch
from specops.runtime.kernels import BLOCK_TOKENS
from specops.runtime.kvcache.manager import KvCache
from specops.runtime.model_runner import ModelRunner, cache_shape
from specops.runtime.session import open_session

TEXTS, LENGTH = 4, 512  # of a lesson: from small batches a head learns more per token
_ROWS = 256  # of logits, which are read at a time


class Lesson(NamedTuple):
    """Texts [B], padded to one length: entries [B, T] as a head reads them.

    Attributes:
        embeddings: [B, T, hidden], of the token behind each entry's.
        states: [B, T, all], what the target's layers made of each entry's token.
        taught: [B, T], whether an entry guesses a token of the answer: R of them.
        shares: [R, V], the target's probabilities of the tokens that can be guessed, sums 1.
        mass: [R], the target's probability of all of these.
        chosen: [R], which of them came; -1: another token.
        repeated: [R], whether the token is what a lookup in the text before would guess.
    """

    embeddings: Tensor
    states: Tensor
    taught: Tensor
    shares: Tensor
    mass: Tensor
    chosen: Tensor
    repeated: Tensor

    def places(self, guess: int, right: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Where the guess of a round that is this many after its first is taught.

        Args:
            guess: how many.
            right: [B, T], where the guess before it was right; None: everywhere.

        Returns:
            [B, T], whether an entry is such a place, n of them, and [n] their rows of `shares`.
        """
        numbers = torch.full(self.taught.shape, -1, device=self.taught.device)
        numbers[self.taught] = torch.arange(len(self.mass), device=numbers.device)
        here, length = self.taught.clone(), self.taught.shape[1]
        here[:, :guess] = False
        here[:, guess:] &= self.taught[:, : max(0, length - guess)]  # so is the round's first
        if guess and right is not None:
            here[:, 1:] &= right[:, :-1]
        return here, numbers[here]


def repeated(tokens: Sequence[int]) -> list[bool]:
    """Of each token but the first, whether it came behind the same two tokens, or else one, before.

    The last time counts: [5, 6, 7, 5, 6, 7, 6, 8] → [no, no, no, yes, yes, no, no].
    """
    followers, found = dict[tuple[int, ...], int](), list[bool]()
    for at in range(1, len(tokens)):
        keys = tuple(tokens[max(0, at - 2) : at]), (tokens[at - 1],)
        found.append(followers.get(keys[0], followers.get(keys[1])) == tokens[at])
        followers.update(dict.fromkeys(keys, tokens[at]))
    return found


class Teacher(ABC):
    """A target that reads texts.

    Args:
        tokens: [V], the tokens that the head can guess.
        vocab_size: number of the target's tokens.
        device: where lessons are.
        texts: of a lesson.
    """

    def __init__(
        self, tokens: Sequence[int], vocab_size: int, device: torch.device, texts: int
    ) -> None:
        self.texts = texts
        self._device, self._tokens = device, torch.tensor(tokens, device=device)
        self._codes = torch.full((vocab_size,), -1, device=device)
        self._codes[self._tokens] = torch.arange(len(tokens), device=device)

    @abstractmethod
    def read(
        self, wholes: Sequence[list[int]], counts: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """Read texts.

        Args:
            wholes: the texts.
            counts: of each, how many of the last tokens are taught.

        Returns:
            Of each text, what the layers made of its tokens [n - 1 or more, all]; and logits
            [R, vocab_size] of the taught tokens, text after text.
        """

    @abstractmethod
    def embed(self, tokens: list[int]) -> Tensor:
        """The embeddings [n, hidden] of tokens [n]."""

    def lesson(self, texts: Sequence[Conversation]) -> Lesson:
        """Read up to `self.texts` texts of 3 to `LENGTH` tokens."""
        wholes = [[*item.prompt.tolist(), *item.tokens.tolist()] for item in texts]
        # The first entry guesses the third token.
        counts = [min(len(item.tokens), len(x) - 2) for item, x in zip(texts, wholes, strict=True)]
        parts, logits = self.read(wholes, counts)
        ends = [len(whole) - 2 for whole in wholes]
        taught = torch.zeros((len(texts), max(ends)), dtype=torch.bool, device=self._device)
        for slot, (end, count) in enumerate(zip(ends, counts, strict=True)):
            taught[slot, end - count : end] = True
        chances = torch.cat([self._chances(piece) for piece in logits.split(_ROWS)])
        mass = chances.sum(-1)
        came, again = list[int](), list[bool]()
        for count, whole in zip(counts, wholes, strict=True):
            came += whole[-count:]
            again += repeated(whole)[-count:]
        return Lesson(
            pad_sequence([self.embed(whole[1:-1]) for whole in wholes], batch_first=True),
            pad_sequence(
                [part[:end] for part, end in zip(parts, ends, strict=True)], batch_first=True
            ),
            taught,
            chances.div_(mass[:, None].clamp_min(1e-6)),
            mass,
            self._codes[came],
            torch.tensor(again, device=self._device),
        )

    def _chances(self, logits: Tensor) -> Tensor:
        rows = logits.float()
        return torch.exp(rows[:, self._tokens] - rows.logsumexp(-1, keepdim=True))


def graph_with_states(folder: ModelFolder, layers: Sequence[int], cache_dir: Path) -> Path:
    """The prepacked graph of a target that gives what enters these layers.

    Raises:
        ModelError: it cannot give them, or the cache cannot be written.
    """
    name = f"{folder.name}-{folder.quant}"
    return prepacked_graph(folder.graph, name, cache_dir, lambda text: None, states=layers)


class EngineTeacher(Teacher):
    """Reads texts on the engine.

    Args:
        folder: the target.
        layers: those whose inputs the head reads.
        tokens: those that it can guess.
        cache_dir: the folder for prepacked graphs.

    Raises:
        ModelError, ModelLoadError: no head can be run beside the target.
    """

    def __init__(
        self, folder: ModelFolder, layers: Sequence[int], tokens: Sequence[int], cache_dir: Path
    ) -> None:
        super().__init__(tokens, folder.vocab_size, torch.device("cpu"), TEXTS)
        session = open_session(graph_with_states(folder, layers, cache_dir))
        cache = KvCache(
            cache_shape(session, "fp32"),
            num_blocks=TEXTS * -(-LENGTH // BLOCK_TOKENS),
            num_slots=TEXTS,
            context=LENGTH,
        )
        self._runner = ModelRunner(session, cache, max_tokens=TEXTS * LENGTH)
        self._embedding = Embedding(folder.graph)

    def read(
        self, wholes: Sequence[list[int]], counts: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """In one pass; see `Teacher.read`."""
        batch, cache, states = Batch(), self._runner.cache, self._runner.states
        if states is None:
            raise AssertionError("the target's graph gives no states for a head")
        parts = dict[int, Tensor]()
        states.receive = lambda slot, start, rows: parts.update({slot: torch.from_numpy(rows)})
        states.followed.update(range(len(wholes)))
        for slot, (count, whole) in enumerate(zip(counts, wholes, strict=True)):
            cache.allocate(slot, whole, share=False)
            cache.reserve(slot, len(whole) - 1)
            batch.add(slot, 0, whole[:-1], count)
        logits = self._runner.forward(batch)
        for slot, whole in enumerate(wholes):
            self._runner.hand_states(slot, len(whole) - 1)
            cache.release(slot)
        states.followed.clear()
        return [parts[slot] for slot in range(len(wholes))], torch.from_numpy(logits)

    def embed(self, tokens: list[int]) -> Tensor:
        """See `Teacher.embed`."""
        return torch.from_numpy(self._embedding.look_up(tokens))
