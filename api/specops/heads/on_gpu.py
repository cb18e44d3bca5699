"""The target in torch, for `specops draft make --device cuda`: it works on many texts at once.

It is the checkpoint that the engine's target was converted from, run by transformers; the engine
encodes prompts and measures the head.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specops.engine.engine import Engine
from specops.heads.conversations import Text, Writer
from specops.heads.teacher import Teacher
from specops.models.folder import ModelError
from specops.models.gguf_files import is_gguf

_TEXTS = 16  # of a lesson
_WRITTEN, _WAITING = 256, 1024  # texts that are written at once, and that wait for their turn


def load_target(path: Path, device: torch.device) -> Any:
    """Load a checkpoint or a GGUF.

    Raises:
        ModelError: it is neither, transformers cannot run it, or there is no such device.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("torch sees no GPU here: leave --device out")
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - slow, and only for this

    place = {"gguf_file": path.name} if is_gguf(path) else {}
    kind = torch.bfloat16 if device.type == "cuda" else torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(  # nosec B615: a local file
            path.parent if place else path, dtype=kind, local_files_only=True, **place
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        raise ModelError(
            f"transformers cannot load {path} for --device {device}: {error}. --device cpu works "
            "with every model that can be served"
        ) from error
    return model.to(device).eval().requires_grad_(False)


class TorchWriter(Writer):
    """Lets a model in torch write conversations, many at the same time.

    Args:
        engine: encodes and decodes.
        first: number of the first conversation.
        model: of transformers.
        end_tokens: the target's.
    """

    def __init__(self, engine: Engine, first: int, model: Any, end_tokens: Iterable[int]) -> None:
        super().__init__(engine, first)
        self.room, self._model, self._ends = _WAITING, model, sorted(end_tokens)
        self._waiting: dict[tuple[float, float, int], list[Text]] = defaultdict(list)

    def add(self, text: Text) -> None:
        """Let a text wait for others that are sampled alike."""
        self._waiting[text.sampling.temperature, text.sampling.top_p, text.most].append(text)

    def step(self) -> list[Text]:
        """Write the texts that wait most numerously to their ends."""
        kind = max(self._waiting, key=lambda key: len(self._waiting[key]))
        texts, self._waiting[kind] = self._waiting[kind][:_WRITTEN], self._waiting[kind][_WRITTEN:]
        temperature, top_p, most = kind
        device, longest = self._model.device, max(len(text.prompt) for text in texts)
        ids = torch.zeros((len(texts), longest), dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, text in enumerate(texts):
            ids[row, longest - len(text.prompt) :] = torch.tensor(text.prompt)
            mask[row, longest - len(text.prompt) :] = 1
        torch.manual_seed(texts[0].number)
        drawn = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
        with torch.no_grad():
            found = self._model.generate(
                ids.to(device),
                attention_mask=mask.to(device),
                max_new_tokens=most,
                eos_token_id=self._ends,
                pad_token_id=self._ends[0],
                repetition_penalty=1.0,  # whatever the model's own settings say
                **(drawn if temperature else {"do_sample": False}),
            )
        for text, row in zip(texts, found[:, longest:].tolist(), strict=True):
            end = next((at for at, token in enumerate(row) if token in self._ends), len(row))
            room = self._engine.info.context - len(text.prompt)
            text.tokens = row[: min(end + 1, room)]
        return texts


class TorchTeacher(Teacher):
    """Reads texts with a model in torch.

    Args:
        model: of transformers.
        layers: those whose inputs the head reads.
        tokens: those that it can guess.
    """

    def __init__(self, model: Any, layers: Sequence[int], tokens: Sequence[int]) -> None:
        self._embedding = model.get_input_embeddings().weight
        super().__init__(tokens, len(self._embedding), model.device, _TEXTS)
        self._model, self._layers = model, layers

    def read(
        self, wholes: Sequence[list[int]], counts: Sequence[int]
    ) -> tuple[list[Tensor], Tensor]:
        """In one pass; see `Teacher.read`."""
        ids = pad_sequence([torch.tensor(whole[:-1]) for whole in wholes], batch_first=True)
        with torch.no_grad():
            found = self._model(ids.to(self._device), output_hidden_states=True, use_cache=False)
        states = torch.cat([found.hidden_states[layer] for layer in self._layers], -1).float()
        ends = [len(whole) - 1 for whole in wholes]
        rows = [
            found.logits[slot, end - count : end]
            for slot, (end, count) in enumerate(zip(ends, counts, strict=True))
        ]
        return list(states), torch.cat(rows)

    def embed(self, tokens: list[int]) -> Tensor:
        """See `Teacher.embed`."""
        return self._embedding[tokens].float()
