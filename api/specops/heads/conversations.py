"""A model's own conversations: it writes a user's message, and then the answer to it.

The engine runs as many texts at once as there are slots. A chat model gets the beginning of its
template and a starter, and completes the user's message; then it answers this message. A model
without a template writes texts from an empty prompt. Starter, temperature and seed of a text follow
from its number, so that an interrupted run can continue.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from specops.engine.engine import Engine
from specops.engine.request_state import RequestState
from specops.heads.starters import STARTERS
from specops.heads.storage import Conversation
from specops.request import GenerationRequest, SamplingParams
from specops.text.chat_template import question, with_system

_MESSAGE_TOKENS = 64  # most tokens of a user's message
_ANSWER_TOKENS = 320
_SHORTEST = 8  # fewest tokens of an answer that is kept
# Messages are sampled for variety; answers with the temperatures of clients, also greedily.
_MESSAGE = SamplingParams(temperature=1.0, top_p=0.95)
_TEMPERATURES = (0.0, 0.4, 0.7, 1.0)
_GRAM = 4  # tokens of a gram
_LEAST_DISTINCT = 0.5  # share of distinct grams; an answer with fewer repeats itself


@dataclass(slots=True)
class _Text:
    """A text that is being written.

    Attributes:
        number: number of the conversation.
        sampling: how its tokens are sampled.
        prompt: tokens of the prompt.
        starter: beginning of a user's message; None for an answer.
        tokens: tokens so far.
        states: for each token, the hidden state that it was chosen from.
    """

    number: int
    sampling: SamplingParams
    prompt: tuple[int, ...]
    starter: str | None = None
    tokens: list[int] = field(default_factory=list)
    states: list[NDArray[np.float16]] = field(default_factory=list)


class Writer:
    """Lets an engine write conversations.

    Args:
        engine: an engine without other requests; its target returns hidden states from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._states = engine.scheduler.target.output_hidden_states()
        self._texts: dict[str, _Text] = {}
        self._asked: set[str] = set()

    def conversations(self, first: int) -> Generator[Conversation | None]:
        """Yield conversations without end, in the order in which they are finished.

        Yields None for a text that is not kept.

        Args:
            first: number of the first conversation.
        """
        scheduler, number = self._engine.scheduler, first
        try:
            while True:
                while len(self._texts) < self._engine.info.slots:
                    self._begin(number)
                    number += 1
                outputs = scheduler.step().outputs
                for sequence in scheduler.running:
                    self._note(sequence)
                for output in outputs:
                    text = self._texts[output.request_id]
                    text.tokens += [piece.token for piece in output.pieces]
                    if output.finish is None:
                        continue
                    del self._texts[output.request_id]
                    if text.starter is not None:
                        self._ask(text)
                        yield None
                    else:
                        yield _conversation(text) if _worth_keeping(text.tokens) else None
        finally:
            scheduler.cancel_all()
            scheduler.step()
            self._texts.clear()

    def _begin(self, number: int) -> None:
        """Start a user's message, or the text of a model without a chat template."""
        sampling = replace(_MESSAGE, seed=number)
        template = self._engine.chat_template
        if template is None or not self._engine.info.chat:
            self._add(_Text(number, sampling, self._engine.encode("")), _ANSWER_TOKENS)
            return
        starter = STARTERS[number % len(STARTERS)]
        prompt = self._engine.tokenizer.encode(template.opening + starter, special_tokens=False)
        self._add(_Text(number, sampling, prompt, starter), _MESSAGE_TOKENS)

    def _ask(self, message: _Text) -> None:
        """Start the answer to a message, if the message is new and leaves room for an answer."""
        said = self._engine.tokenizer.decode(message.tokens)
        asked = f"{message.starter}{said}".strip()
        if asked in self._asked:
            return
        self._asked.add(asked)
        temperature = _TEMPERATURES[message.number % len(_TEMPERATURES)]
        sampling = SamplingParams(temperature=temperature, seed=message.number)
        messages = with_system(question(asked), self._engine.info.system)
        prompt = self._engine.encode_chat(self._engine.render_chat(messages))
        if len(prompt) + _SHORTEST > self._engine.info.context:
            return
        self._add(_Text(message.number, sampling, prompt), _ANSWER_TOKENS)

    def _add(self, text: _Text, most: int) -> None:
        kind = "answer" if text.starter is None else "message"
        name = f"{text.number}/{kind}"
        self._texts[name] = text
        self._engine.scheduler.add(
            self._engine.admit(
                GenerationRequest(
                    request_id=name,
                    prompt_tokens=text.prompt,
                    max_new_tokens=most,
                    sampling=text.sampling,
                    stream=False,
                )
            )
        )

    def _note(self, sequence: RequestState) -> None:
        """Keep the state from which an answer's latest token was chosen."""
        text = self._texts[sequence.request.request_id]
        latest = len(text.states) == sequence.generated - 1
        here = self._states.has(sequence.slot, len(sequence.tokens) - 1)
        if text.starter is None and latest and here:
            text.states.append(self._states.rows[sequence.slot].astype(np.float16))


def _worth_keeping(tokens: list[int]) -> bool:
    """Whether an answer is long enough and does not repeat itself."""
    grams = {tuple(tokens[start : start + _GRAM]) for start in range(len(tokens) - _GRAM + 1)}
    return len(tokens) >= _SHORTEST and len(grams) >= _LEAST_DISTINCT * (len(tokens) - _GRAM + 1)


def _conversation(text: _Text) -> Conversation:
    """Return a finished answer without its last token, whose state was lost with the slot."""
    tokens = np.array(text.tokens[: len(text.states)], np.int32)
    prompt = np.array(text.prompt, np.int32)
    return Conversation(text.number, prompt, tokens, np.array(text.states[: len(tokens)]))
