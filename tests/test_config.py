"""Settings are read from the environment, and every wrong value is refused."""

from collections.abc import Callable
from dataclasses import fields
from itertools import product
from pathlib import Path

import pytest

from specops.config import PREFIX, ConfigError, Settings, client_keys
from specops.models.convert import Quantization
from specops.models.prepare import choose
from specops.presets import chat_model, presets

CHANGED = {
    "model": ("custom", "custom"),
    "target": ("/m/target", "/m/target"),
    "draft": ("none", "none"),
    "quant": ("int4-32", "int4-32"),
    "draft_quant": ("fp32", "fp32"),
    "models_dir": ("/models", Path("/models")),
    "cache_dir": ("/cache", Path("/cache")),
    "drafter": ("suffix", "suffix"),
    "sampling": ("top_p=0.9", "top_p=0.9"),
    "system": ("Be brief.", "Be brief."),
    "max_k_draft": ("16", 16),
    "slots": ("16", 16),
    "context": ("4096", 4096),
    "kv_tokens": ("8192", 8192),
    "kv_dtype": ("int8", "int8"),
    "max_batched_tokens": ("64", 64),
    "max_inter_token_latency": ("0.5", 0.5),
    "prefix_cache": ("off", "off"),
    "threads": ("2", 2),
    "queue_size": ("0", 0),
    "max_new_tokens": ("10", 10),
    "request_timeout": ("2.5", 2.5),
    "drain_timeout": ("0", 0.0),
    "host": ("0.0.0.0", "0.0.0.0"),  # noqa: S104 - a value, nothing listens
    "port": ("9000", 9000),
    "api_keys": ("first, alice:second", "first, alice:second"),
    "metrics_key": ("third", "third"),
    "allowed_hosts": ("a.org, *.b.org", "a.org,*.b.org"),
    "allowed_origins": ("https://a.org", "https://a.org"),
    "unknown_fields": ("refuse", "refuse"),
    "unknown_model": ("refuse", "refuse"),
    "log_level": ("debug+prompts", "debug+prompts"),
}


def test_empty_environment_gives_the_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.prefix", str(tmp_path))  # no chat model is installed here
    own = presets()["demo"].settings
    assert Settings.from_env({}) == Settings(**own)  # type: ignore[arg-type]
    assert Settings.from_env({}).preset == "demo"
    chat_model().parent.mkdir(parents=True)
    chat_model().touch()
    own = presets()["smollm2"].settings
    assert Settings.from_env({}) == Settings(**own)  # type: ignore[arg-type]
    assert Settings.from_env({}).preset == "smollm2"
    assert Settings.from_env({"SPECOPS_MODEL": "phi3"}).preset == "phi3"


def test_another_target_gets_none_of_the_presets_settings() -> None:
    assert Settings.from_env({"SPECOPS_TARGET": "mine"}).drafter == ""
    assert Settings.from_env({"SPECOPS_MODEL": "phi3"}).context == 2048
    assert Settings.from_env({"SPECOPS_MODEL": "phi3", "SPECOPS_TARGET": "mine"}).context == 0


@pytest.mark.parametrize("name", CHANGED)
def test_setting_is_read_from_its_variable(name: str) -> None:
    text, expected = CHANGED[name]
    settings = Settings.from_env({PREFIX + name.upper(): text})
    assert getattr(settings, name) == expected
    assert getattr(settings, name) != getattr(Settings(), name)


def test_windows_line_endings_and_spaces_around_values_change_nothing() -> None:
    variables = {PREFIX + name.upper(): text for name, (text, _) in CHANGED.items()}
    edited = {name: f" {text} \r" for name, text in variables.items()}
    assert Settings.from_env(edited) == Settings.from_env(variables)
    assert Settings.from_env({"SPECOPS_MODEL": "phi3\r", "SPECOPS_TARGET": "\r"}).context == 2048


def test_a_tilde_is_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/alice")
    for name in ("target", "draft", "models_dir", "cache_dir"):
        settings = Settings.from_env({PREFIX + name.upper(): "~/a b"})
        assert str(getattr(settings, name)) == "/home/alice/a b"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("SPECOPS_PORT", "0"),
        ("SPECOPS_PORT", "http"),
        ("SPECOPS_MAX_K_DRAFT", "17"),
        ("SPECOPS_REQUEST_TIMEOUT", "nan"),
        ("SPECOPS_REQUEST_TIMEOUT", "inf"),
        ("SPECOPS_REQUEST_TIMEOUT", "0"),
        ("SPECOPS_REQUEST_TIMEOUT", "soon"),
        ("SPECOPS_UNKNOWN_FIELDS", "forbid"),
        ("SPECOPS_DRAFTER", "oracle"),
        ("SPECOPS_QUANT", "int2"),
        ("SPECOPS_LOG_LEVEL", "loud"),
        ("SPECOPS_SLOTS", "65"),
        ("SPECOPS_KV_TOKENS", "-1"),
        ("SPECOPS_KV_DTYPE", "int4"),
        ("SPECOPS_MAX_BATCHED_TOKENS", "15"),
        ("SPECOPS_MODEL", "smolm2"),
        ("SPECOPS_CONTEXT", "1"),
    ],
)
def test_wrong_value_is_refused_by_the_variables_name(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be ") as caught:
        Settings.from_env({name: text})
    assert text in str(caught.value)


def test_a_model_that_is_no_preset_belongs_into_another_setting() -> None:
    with pytest.raises(ConfigError, match=r"^SPECOPS_MODEL must be .*named by SPECOPS_TARGET$"):
        Settings.from_env({"SPECOPS_MODEL": "org/name"})


UNUSABLE_KEYS = ["a,,b", ",", "with space", "schl\u00fcssel", "line\nend"]
UNUSABLE_NAMES = [":a", "al ice:a", "a/b:c", f"{'x' * 33}:a", "key-2:a", "alice:", "secret+x:y"]


@pytest.mark.parametrize("text", [*UNUSABLE_KEYS, *UNUSABLE_NAMES])
def test_unusable_key_is_refused_without_being_shown(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^SPECOPS_API_KEYS must be .*entry [23] ") as caught:
        Settings.from_env({"SPECOPS_API_KEYS": f"secret,{text}"})
    assert "secret" not in str(caught.value)
    named = {"SPECOPS_API_KEYS": "alice:secret", "SPECOPS_METRICS_KEY": "secret"}
    assert "secret" not in repr(Settings.from_env(named))
    with pytest.raises(ConfigError, match=r"^SPECOPS_METRICS_KEY must be printable"):
        Settings.from_env({"SPECOPS_METRICS_KEY": "two words"})


def test_keys_are_named_before_their_first_colon_or_by_their_number() -> None:
    assert client_keys("") == []
    assert client_keys("a, alice:b ,c") == [("key-1", "a"), ("alice", "b"), ("key-3", "c")]
    assert client_keys("alice:a:b,alice:c") == [("alice", "a:b"), ("alice", "c")]
    assert client_keys("alice:a,alice:a") == [("alice", "a")]
    with pytest.raises(ConfigError, match="entry 2 twice, with two names"):
        client_keys("alice:a,bob:a")


@pytest.mark.parametrize(
    "variables",
    [
        {"SPECOPS_PORT": "", "SPECOPS_THREADS": ""},
        {"SPECOPS_FORMER": ""},  # compose.yaml passes unset variables on as empty ones
        {"PORT": "x", "OTHER_SPECOPS_PORT": "x"},  # of other programs
    ],
)
def test_variables_that_change_nothing(variables: dict[str, str]) -> None:
    assert Settings.from_env(variables) == Settings.from_env({})


def test_an_unknown_setting_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(ConfigError, match="SPECOPS_PROT is not a setting; did you mean SPECOPS_P"):
        Settings.from_env({"SPECOPS_PROT": "1"})
    with pytest.raises(ConfigError, match=r"SPECOPS_KERNELS is not a setting\. The setting"):
        Settings.from_env({"SPECOPS_KERNELS": "1"})


def test_there_are_few_settings_and_each_has_a_case_here() -> None:
    assert set(CHANGED) == {item.name for item in fields(Settings)}
    assert len(CHANGED) <= 32


BITS = ("fp32", "int8", "int4", "int2", "INT4")
BLOCKS = ("", "-16", "-32", "-64", "-128", "-256", "-512", "-0")
METHODS = ("", "-rtn", "-mixed", "-mixed-rtn", "-rtn-mixed", "-search", "-zp", "-hqq")


def test_the_converter_knows_exactly_the_weights_that_settings_take() -> None:
    def known(parse: Callable[[str], object], text: str) -> bool:
        try:
            parse(text)
        except ValueError:
            return False
        return True

    for text in map("".join, product(BITS, BLOCKS, METHODS)):
        settable = known(lambda text: Settings.from_env({"SPECOPS_QUANT": text}), text)
        assert settable == known(Quantization.parse, text), text
        if settable:
            chosen = choose(Settings(model="demo", quant=text, draft_quant=text))
            assert chosen.target_quant == chosen.draft_quant == Quantization.parse(text).name
