"""The form in which a model writes reasoning and calls of tools in its answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specops.engine.engine import Engine
from specops.http.answering.conversation import Conversation
from specops.request import Grammar, ReasoningMarks, TokenOutput
from specops.text.tools.formats import GENERIC, tags_in
from specops.text.tools.grammar import CallGrammar
from specops.text.tools.reader import AnswerReader


class AnswerFormat:
    """Reads and constrains the answers to one conversation.

    Args:
        engine: has the model's template and tokenizer.
        conversation: what is answered.
        starts_in_reasoning: the prompt ends with the tag that begins reasoning.
    """

    def __init__(
        self, engine: Engine, conversation: Conversation, *, starts_in_reasoning: bool
    ) -> None:
        template, tokenizer = engine.chat_template, engine.tokenizer
        self._asked = conversation
        self._calls = template.calls if template and conversation.tools else None
        self._reasoning_tags = template.reasoning_tags if template else None
        self._starts_in_reasoning = starts_in_reasoning
        self._encode = tokenizer.encode_further
        tags = (*(self._calls.tags if self._calls else ()), *tags_in(*(self._reasoning_tags or ())))
        known = ((tag, tokenizer.marks.get(tag)) for tag in tags)
        self._marks = {tag: token for tag, token in known if token is not None}
        # A decoded text leaves special tokens out.
        self._tags = {
            token: tag for tag, token in self._marks.items() if not tokenizer.decode([token])
        }

    def reader(self) -> AnswerReader:
        """Return a new reader, for one answer."""
        asked = self._asked
        reasoning_tags = None if asked.inline_reasoning else self._reasoning_tags
        return AnswerReader(
            self._calls,
            asked.tools,
            reasoning_tags,
            starts_in_reasoning=self._starts_in_reasoning and not asked.inline_reasoning,
        )

    @property
    def reasoning(self) -> ReasoningMarks | None:
        """How the engine recognizes reasoning, and its token limit; None: the model has none."""
        if self._reasoning_tags is None:
            return None
        marks = tags_in(*self._reasoning_tags)
        unshown = ((token, tag) for token, tag in self._tags.items() if tag in marks)
        closing = self._encode(self._reasoning_tags[1])
        return ReasoningMarks(
            *(*self._reasoning_tags, self._starts_in_reasoning, tuple(unshown), closing),
            self._asked.max_reasoning_tokens,
        )

    def texts(self, pieces: Iterable[TokenOutput]) -> list[str]:
        """Return the texts of pieces, with the special tokens that a reader knows."""
        return [piece.text or self._tags.get(piece.token, "") for piece in pieces]

    def without(self, pieces: Sequence[TokenOutput], characters: int) -> tuple[TokenOutput, ...]:
        """Return the pieces without those that only have some of the last characters."""
        texts = self.texts(pieces)
        left = sum(map(len, texts)) - characters
        kept = []
        for piece, text in zip(pieces, texts, strict=True):
            if left <= 0:
                break
            kept.append(piece)
            left -= len(text)
        return tuple(kept)

    def grammar(self, text_grammar: Grammar | None) -> Grammar | None:
        """Return the grammar of a whole answer.

        With a grammar for its text, an answer may still have reasoning and calls. Without one it is
        free, unless a call is required, must follow its schema or be the only one, or unless some
        tools may not be called.

        Args:
            text_grammar: the grammar that the answer's text follows.
        """
        asked = self._asked
        strict = any(tool.strict for tool in asked.tools)
        bound = asked.required or strict or not asked.parallel or asked.callable is not None
        bound = bool(asked.tools) and bound
        besides = bool(asked.tools) or self._reasoning_tags is not None
        if not (bound or (text_grammar and besides)):
            return text_grammar
        calls = self._calls or GENERIC
        writer = CallGrammar(calls, self._marks, self._reasoning_tags, self._starts_in_reasoning)
        callable_ = asked.callable
        tools = [tool for tool in asked.tools if callable_ is None or tool.name in callable_]
        return writer.grammar(
            tools, required=asked.required, parallel=asked.parallel, text_grammar=text_grammar
        )
