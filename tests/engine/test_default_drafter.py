"""SPECOPS_DRAFTER with each kind of draft: it serves, or the message says what is missing."""

import pytest

from specops.config import ConfigError, Settings
from specops.engine.engine import _default_drafter
from specops.request import DRAFTERS
from specops.speculation.drafters.registry import make_drafters
from tests.simulated_target import VOCAB, SimulatedTarget, Text, tinyllama
from tests.speculation.drafters.scripted import Scripted

NO_HEAD = (
    "SPECOPS_DRAFTER=head needs a draft head, and there is none: set SPECOPS_DRAFT to one, or "
    "SPECOPS_DRAFTER to one of {}, none or nothing"
)
NO_MODEL = NO_HEAD.replace("DRAFTER=head", "DRAFTER=draft").replace("draft head", "draft model")


@pytest.mark.parametrize(
    ("loaded", "expected"),
    [
        # the target alone, with or without a table of n-grams
        ("", {"": "suffix", "head": NO_HEAD, "draft": NO_MODEL}),
        # an EAGLE-3 head, or the target's own MTP block
        ("head", {"": "cascade", "draft": NO_MODEL}),
        ("draft", {"": "cascade", "head": NO_HEAD}),
    ],
    ids=["no draft", "a head", "a draft model"],
)
def test_it_is_what_the_setting_says_or_an_error_names_what_it_needs(
    loaded: str, expected: dict[str, str]
) -> None:
    drafters = make_drafters(
        VOCAB,
        (SimulatedTarget(), tinyllama(0.1)) if loaded == "draft" else None,  # type: ignore[arg-type]
        head=Scripted(Text(), 1.0, name="head") if loaded == "head" else None,
    )
    for setting in ("", "none", *DRAFTERS):
        settings = Settings.from_env({"SPECOPS_MODEL": "tinyllama", "SPECOPS_DRAFTER": setting})
        wanted = expected.get(setting, settings.drafter)
        if wanted.startswith("SPECOPS"):
            with pytest.raises(ConfigError) as refusal:
                _default_drafter(settings, drafters)
            assert str(refusal.value) == wanted.format(", ".join(drafters))
        else:
            assert _default_drafter(settings, drafters) == wanted
