"""What agents write that changes with every request is removed, and nothing that a user wrote."""

from typing import Any

import pytest

from specops.text.agents import strip_billing_header

LINE = "x-anthropic-billing-header: cc_version=2.1.100.7b4; cc_entrypoint=cli; cch={};"
USER = {"role": "user", "content": "Hi"}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


@pytest.mark.parametrize("between", ["", "\n", "\n\n", " "])
@pytest.mark.parametrize("more", ["", " cc_workload=cron;", " cc_is_subagent=true;"])
def test_the_line_for_accounting_is_removed(between: str, more: str) -> None:
    for cch in ("eb6c6", "00000"):
        first = system(f"{LINE.format(cch)}{more}{between}You are an agent; be: brief.")
        assert strip_billing_header([first, USER]) == (
            [system("You are an agent; be: brief."), USER],
            ("x-anthropic-billing-header",),
        )


def test_a_system_message_of_nothing_else_goes() -> None:
    assert strip_billing_header([system(LINE.format(1)), USER])[0] == [USER]
    assert strip_billing_header([system(LINE.format(1))])[0] == [
        system("")
    ]  # a conversation has a message


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [USER],
        [{"role": "user", "content": LINE.format("eb6c6")}],
        [system("Be brief."), {"role": "user", "content": LINE.format("eb6c6")}],
        [USER, system(LINE.format("eb6c6"))],
        [system("Explain this line:\n" + LINE.format("eb6c6")), USER],
        [system("x-anthropic-billing-header: what is it?"), USER],
        [system("Today is Thursday, 26 November 2026, 19:21."), USER],
    ],
)
def test_everything_else_stays(messages: list[dict[str, Any]]) -> None:
    assert strip_billing_header(messages) == (messages, ())
