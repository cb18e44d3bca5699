"""The console for everybody: by keyboard, on a phone, read aloud, in the light and in the dark.

In a real browser, like test_console_in_browser.py.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from tests.stack.console import PROMPT, ask, console, finish, until

pytestmark = pytest.mark.e2e


def test_the_keyboard_is_enough(page: Any) -> None:
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to the prompt
    assert page.evaluate("document.activeElement.id") == "prompt"
    page.keyboard.press("Control+A")
    page.keyboard.type("import os")
    page.keyboard.press("Control+Enter")
    finish(page)
    assert page.locator("#answer span").count() > 0
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "send"


def test_the_keyboard_reaches_everything_and_shows_where_it_is(page: Any) -> None:
    page.get_by_text("Options").focus()
    page.keyboard.press("Enter")
    page.evaluate("document.activeElement.blur()")
    count = page.evaluate(
        """() => {
            const all = 'a, button, input, select, textarea, summary, [tabindex="0"]';
            const open = (e) => !e.disabled && e.checkVisibility();
            window.reachable = [...document.querySelectorAll(all)].filter(open);
            return window.reachable.length;
        }"""
    )
    reached = []
    for _ in range(count + 1):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement === document.body"):
            continue  # between the last one and the first
        place, outline = page.evaluate(
            """() => [window.reachable.indexOf(document.activeElement),
                getComputedStyle(document.activeElement).outlineStyle]"""
        )
        assert outline != "none", place
        reached.append(place)
    assert sorted(reached) == list(range(count))
    assert count >= 12


def test_a_screen_reader_finds_names_for_everything(page: Any) -> None:
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, select, textarea, button, a, svg')]
            .filter((e) => !(e.labels?.length || e.textContent.trim() || e.ariaLabel
                || e.getAttribute('aria-label'))).map((e) => e.outerHTML)"""
    )
    assert nameless == []
    for role, name in (("region", "Answer"), ("textbox", "Prompt"), ("heading", "Ask")):
        assert page.get_by_role(role, name=name).count() == 1
    for status in ("#progress", "#state"):
        assert page.locator(f"{status}[role=status]").count() == 1
    for landmark in ("banner", "navigation", "main"):
        assert page.get_by_role(landmark).count() == 1
    assert page.evaluate("document.documentElement.lang") == "en"
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3')].map((e) => Number(e.tagName[1]))"
    )
    assert levels[0] == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))
    until(page, "document.querySelectorAll('svg[role=img][aria-label]').length === 4")
    # Figures change every second: none of them is read out by itself.
    assert page.locator("#charts [aria-live=off]").count() == 4


@pytest.mark.parametrize("width", [320, 390, 768])
def test_nothing_sticks_out_on_a_phone(browser: Any, console_url: str, width: int) -> None:
    phone = {"viewport": {"width": width, "height": 800}, "is_mobile": True, "has_touch": True}
    with console(browser, console_url, **phone) as page:
        page.get_by_label("Prompt").fill(PROMPT)
        page.get_by_text("Options").tap()
        page.get_by_label("Longest answer").fill("60")
        button = page.get_by_role("button", name="Generate")
        button.tap()
        finish(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.evaluate("visualViewport.scale") == 1
        assert button.bounding_box()["height"] >= 44  # a finger's width
        small = page.evaluate(
            """() => [...document.querySelectorAll('a, button, input, select, summary')]
                .filter((e) => e.checkVisibility() && !e.matches('.skip'))
                .filter((e) => e.getBoundingClientRect().height < 24).map((e) => e.outerHTML)"""
        )
        assert small == []  # WCAG 2.2's least size of what one taps


# -- light and dark --------------------------------------------------------------------------------

Colour = list[float]


def luminance(colour: Colour) -> float:
    """WCAG's relative luminance of red, green and blue out of 255."""
    parts = [c / 255 for c in colour]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrasts(page: Any, what: str) -> dict[str, float]:
    """WCAG's contrast ratio of each element's text on what is painted behind it, by its HTML."""
    found = page.evaluate(
        """(what) => [...document.querySelectorAll(what)].map((element) => {
            const numbers = (text) => text.match(/[\\d.]+/g).map(Number);
            const clear = (colour) => colour.length === 4 && colour[3] === 0;
            let painted = element;
            const behind = () => numbers(getComputedStyle(painted).backgroundColor);
            while (clear(behind())) painted = painted.parentElement;
            return [element.outerHTML, numbers(getComputedStyle(element).color), behind()];
        })""",
        what,
    )
    ratios = {}
    for html, own, below in found:
        dark, light = sorted(map(luminance, (own[:3], below[:3])))
        ratios[html] = (light + 0.05) / (dark + 0.05)
    return ratios


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_is_readable_in_both_themes(page: Any, theme: str) -> None:
    page.emulate_media(color_scheme=theme)
    ask(page, 80)
    finish(page)
    # Whoever else may draft, and what is seen only when something is wrong.
    page.evaluate(
        """() => {
            for (const place of [0, 1, 2, 3, 4]) {
                const drafted = document.createElement('span');
                drafted.className = `draft-${place}`;
                document.getElementById('answer').append(drafted);
            }
            document.getElementById('error').hidden = false;
        }"""
    )
    seen = contrasts(
        page,
        "#answer, #answer [class^=draft-], #legend li, h1, h2, h3, label, input, .hint, dt, dd, "
        "figcaption span, figcaption output, .state, .error, a:not(.skip), button:enabled, summary",
    )
    assert {html for html in seen if "draft-4" in html}
    assert {html: ratio for html, ratio in seen.items() if ratio < 4.5} == {}


def test_the_theme_follows_the_system_until_it_is_switched(page: Any) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    seen = {}
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        seen[theme] = page.evaluate(colour)
    assert seen["light"] != seen["dark"]
    page.get_by_role("button", name="Switch between light and dark").click()
    assert page.evaluate(colour) == seen["light"]
