"""Lets a model write conversations: first a user's message, then the answer to it.

The engine runs as many texts at once as there are slots. A chat model gets the start of its
template and a starter, completes the user's message, and then answers it. A model without a
template writes texts from an empty prompt. Starter, temperature and seed of a text follow from its
number, so that an interrupted run can continue.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from specops.engine.engine import Engine
from specops.ngrams.starters import STARTERS
from specops.ngrams.storage import Conversation
from specops.request import GenerationRequest, SamplingParams
from specops.text.chat_template import question, with_system

_MESSAGE_TOKENS = 64  # maximum tokens of a user's message
_ANSWER_TOKENS = 320
_SHORTEST = 8  # minimum tokens of an answer worth keeping
# Messages are sampled for variety, answers at temperatures that clients use, 0 included.
_MESSAGE = SamplingParams(temperature=1.0, top_p=0.95)
_TEMPERATURES = (0.0, 0.4, 0.7, 1.0)
_GRAM = 4  # tokens of a gram
_MIN_DISTINCT = 0.5  # share of distinct grams below which an answer repeats itself
_ATTEMPTS = 12  # conversations per temperature before giving up


@dataclass(slots=True)
class Text:
    """A text in progress.

    Attributes:
        number: number of the conversation.
        sampling: sampling parameters.
        prompt: tokens of the prompt.
        starter: first words of a user's message; None for an answer.
        tokens: tokens so far.
    """

    number: int
    sampling: SamplingParams
    prompt: tuple[int, ...]
    starter: str | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The request id, different for a message and its answer."""
        return f"{self.number}/{'message' if self.starter else 'answer'}"

    @property
    def most(self) -> int:
        """Maximum number of tokens."""
        return _ANSWER_TOKENS if self.starter is None else _MESSAGE_TOKENS


class Writer:
    """Lets an engine write as many conversations at once as it has slots.

    Args:
        engine: an engine without other requests.
        first: number of the first conversation.

    Attributes:
        ended: number of finished conversations, by temperature.
        kept: number of finished conversations worth keeping.
    """

    def __init__(self, engine: Engine, first: int) -> None:
        self.ended, self.kept = Counter[float](), 0
        self._engine = engine
        self._next = first
        self._texts: dict[str, Text] = {}
        self._asked: set[str] = set()

    @property
    def writes_nothing(self) -> bool:
        """Whether many conversations of each temperature are finished, none worth keeping."""
        return not self.kept and min(self.ended[at] for at in _TEMPERATURES) >= _ATTEMPTS

    def write(self) -> list[Conversation]:
        """Run one step; return the conversations that it finished, if worth keeping."""
        while len(self._texts) < self._engine.info.slots:
            self._begin(self._next)
            self._next += 1
        finished = self._finished()
        for text in finished:
            del self._texts[text.name]
            if text.starter is not None and not self._ask(text):
                self.ended[_temperature(text.number)] += 1
        return self._worth_keeping(finished)

    def unfinished(self) -> list[Conversation]:
        """The unfinished conversations that are worth keeping as they are."""
        return self._worth_keeping(self._texts.values())

    def _finished(self) -> list[Text]:
        """Run one step; return the texts that it finished."""
        finished = []
        for output in self._engine.scheduler.step().outputs:
            text = self._texts[output.request_id]
            text.tokens += [piece.token for piece in output.pieces]
            if output.finish is not None:
                finished.append(text)
        return finished

    def _begin(self, number: int) -> None:
        """Start a user's message, or the text of a model without a chat template."""
        sampling = replace(_MESSAGE, seed=number)
        template = self._engine.chat_template
        if template is None or not self._engine.info.chat:
            self._add(Text(number, sampling, self._engine.encode("")))
            return
        starter = STARTERS[number % len(STARTERS)]
        prompt = self._engine.tokenizer.encode(template.opening + starter, special_tokens=False)
        self._add(Text(number, sampling, prompt, starter))

    def _ask(self, message: Text) -> bool:
        """Start the answer to a message, if the message is new and leaves room for an answer."""
        said = self._engine.tokenizer.decode(message.tokens)
        asked = f"{message.starter}{said}".strip()
        if asked in self._asked:
            return False
        self._asked.add(asked)
        sampling = SamplingParams(_temperature(message.number), seed=message.number)
        messages = with_system(question(asked), self._engine.info.system)
        prompt = self._engine.encode_chat(self._engine.render_chat(messages))
        if len(prompt) + _SHORTEST > self._engine.info.context:
            return False
        self._add(Text(message.number, sampling, prompt))
        return True

    def _worth_keeping(self, texts: Iterable[Text]) -> list[Conversation]:
        """The answers among texts that are long enough and do not repeat themselves."""
        answers = [text for text in texts if text.starter is None]
        self.ended.update(_temperature(text.number) for text in answers)
        found = [_conversation(text) for text in answers if _is_varied(text.tokens)]
        self.kept += len(found)
        return found

    def _add(self, text: Text) -> None:
        self._texts[text.name] = text
        self._engine.scheduler.add(
            self._engine.admit(
                GenerationRequest(
                    request_id=text.name,
                    prompt_tokens=text.prompt,
                    max_new_tokens=text.most,
                    sampling=text.sampling,
                    stream=False,
                )
            )
        )


def _temperature(number: int) -> float:
    """The temperature of a conversation's answer, from its number."""
    return _TEMPERATURES[number % len(_TEMPERATURES)]


def _is_varied(tokens: list[int]) -> bool:
    """Whether an answer is long enough and does not repeat itself."""
    grams = {tuple(tokens[start : start + _GRAM]) for start in range(len(tokens) - _GRAM + 1)}
    return len(tokens) >= _SHORTEST and len(grams) >= _MIN_DISTINCT * (len(tokens) - _GRAM + 1)


def _conversation(text: Text) -> Conversation:
    prompt, tokens = (np.array(part, np.int32) for part in (text.prompt, text.tokens))
    return Conversation(text.number, prompt, tokens)
