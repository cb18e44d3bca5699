"""Options that need the tokenizer: biases, bad words, grammars."""

from __future__ import annotations

import asyncio
from functools import partial

from specops.engine.engine import Engine
from specops.http.answering.options import NEVER, EngineOptions
from specops.http.answering.turns import in_turn
from specops.http.errors import InvalidField, unavailable
from specops.http.state import Context
from specops.request import Grammar
from specops.text.confined_process import ProgramProcessError
from specops.text.grammar import Matcher
from specops.text.grammar_source import GrammarError

COMPILE_SECONDS = 15.0  # the largest grammar takes a twentieth of it on an idle machine
_CHARACTER_SECONDS = 1e-5  # as long as the worst known schemas take


def biases(body: EngineOptions, engine: Engine) -> tuple[tuple[int, float], ...]:
    """Return the tokens and the numbers that are added to their logits.

    Raises:
        InvalidField: a token does not exist.
    """
    by_token: dict[int, float] = {}
    for token, bias in (body.logit_bias or {}).items():
        tokens = (token,) if isinstance(token, int) else _spelled(token, engine)
        if not tokens or max(tokens) >= engine.info.vocab_size:
            vocab = engine.info.vocab_size
            message = f"token {token!r} is out of vocabulary, which has {vocab} tokens"
            raise InvalidField("logit_bias", message)
        by_token |= dict.fromkeys(tokens, bias)
    if body.bans_ends and body.ignore_eos:
        by_token |= dict.fromkeys(sorted(engine.info.end_tokens), NEVER)
    return tuple(by_token.items())


def bad_words(body: EngineOptions, engine: Engine) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, at the beginning of a text and after a space.

    A word that begins with white space says itself what it stands behind: with a space before it,
    a line's end would forbid the space.

    Raises:
        InvalidField: a word has no tokens.
    """
    words: dict[tuple[int, ...], None] = {}
    for word in body.bad_words or ():
        for text in (word,) if word[0].isspace() else (word, f" {word}"):
            if not (tokens := _spelled(text, engine)):
                raise InvalidField(
                    "bad_words", f"{word[:64]!r} cannot be written in this model's tokens"
                )
            words[tokens] = None
    return tuple(words)


def _spelled(text: str, engine: Engine) -> tuple[int, ...]:
    return tuple(engine.tokenizer.encode(text, special_tokens=False))


async def compile_grammar(ctx: Context, grammar: Grammar, body: EngineOptions) -> Matcher:
    """Compile a grammar before the engine's thread needs it.

    Args:
        ctx: of the HTTP request.
        grammar: what the answer must follow.
        body: the checked body.

    Returns:
        A matcher. While it lives, the grammar stays compiled.

    Raises:
        ApiError: other grammars were compiled all the time, or the client has left.
        InvalidField: compiling failed, or an option forbids tokens besides.
    """
    field = body.grammar_field or "tools"
    for name in ("bad_words", "min_tokens", "allowed_token_ids"):
        if getattr(body, name):  # together they might forbid every token
            raise InvalidField(name, f"cannot be combined with `{field}`")
    grammars = ctx.engine.grammars
    if (matcher := grammars.compiled(grammar, ctx.client)) is not None:
        return matcher
    work, size = partial(grammars.matcher, grammar, ctx.client), _CHARACTER_SECONDS * grammar.size
    try:
        async with asyncio.timeout(COMPILE_SECONDS):
            turns = ctx.app.executors.compiling
            return await in_turn(ctx, turns, work, seconds=size, stop=grammars.stop)
    except GrammarError as error:
        field = "tools" if error.in_tools else field
        raise InvalidField(field, str(error), code="invalid_grammar") from None
    except ProgramProcessError as error:
        raise unavailable(str(error), "grammar_pending") from None
    except TimeoutError:
        message = f"the grammar was not compiled within {COMPILE_SECONDS:g} seconds; try again"
        raise unavailable(message, "grammar_pending") from None
