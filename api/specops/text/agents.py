"""Removes lines of agents' prompts that change with every request and mean nothing to the model.

A prompt is computed from its first new token on. Claude Code begins its system prompt with a line
for billing,

    x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch=eb6c6;

whose values are digests of the request. With that line, the prefix cache has some 40 tokens of a
prompt of 20,000; without it, all but the newest messages. Routers pass the line on in other
protocols, so it is removed at the beginning of any conversation's system message, and nowhere else.
Text for the model, such as the date, stays.
"""

import re
from collections.abc import Sequence
from typing import Any

_BILLING = "x-anthropic-billing-header"
# Fields only: routers may join the line and the prompt after it without a line break.
_LINE = re.compile(rf"{_BILLING}:(?: *[\w-]+=[^;\s]*;)+ *\n*")
Message = dict[str, Any]


def strip_billing_header(messages: Sequence[Message]) -> tuple[list[Message], tuple[str, ...]]:
    """Return the messages without such lines, and the names of the removed ones.

    Args:
        messages: in the form that chat templates read.
    """
    kept = list(messages)
    if not kept or kept[0]["role"] != "system" or not (line := _LINE.match(kept[0]["content"])):
        return kept, ()
    text = kept[0]["content"][line.end() :]
    kept[:1] = [kept[0] | {"content": text}] if text or len(kept) == 1 else []
    return kept, (_BILLING,)
