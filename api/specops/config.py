"""All settings of the service, read once from the environment.

A wrong value stops the start with a message that names the variable: no service is better than one
with settings nobody chose.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from specops.presets import CHAT, DEMO, default_preset, presets
from specops.request import DRAFTERS
from specops.sampling_defaults import NO_ADVICE, SamplingDefaults
from specops.weights import WeightsName

PREFIX = "SPECOPS_"
_MODELS_DIR = Path(__file__).resolve().parent.parent / "models"
PROMPTS = "+prompts"  # suffix of a log level
_CLIENT_NAME = re.compile(r"[A-Za-z0-9._-]{1,32}")
_UNNAMED = re.compile(r"key-\d+")
_LEVELS = ("debug", "info", "warning", "error")
_CACHE_DIR = Path.home() / ".cache" / "specops"


class ConfigError(ValueError):
    """A setting has a wrong value; the message names the variable and its allowed values."""


@dataclass(frozen=True)
class Number:
    """Reads a number from a range, both ends included; docs/settings.md shows the range."""

    low: float
    high: float
    kind: Callable[[str], float] = int
    what: str = "a whole number"

    def __call__(self, text: str) -> float:
        """Return the number that `text` is.

        Raises:
            ConfigError: the text is not a number, or out of range.
        """
        try:
            value = self.kind(text)
        except ValueError:
            raise ConfigError(f"must be {self.what}, not {text!r}") from None
        if not self.low <= value <= self.high:  # also refuses NaN
            raise ConfigError(f"must be {self.what} from {self.low} to {self.high}, not {text}")
        return value


def _seconds(low: float, high: float) -> Number:
    return Number(low, high, float, "a number of seconds")


def _choice(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            named = ", ".join(filter(None, allowed)) + (", or empty" if "" in allowed else "")
            raise ConfigError(f"must be one of {named}, not {text!r}")
        return text

    return parse


def _log_level(text: str) -> str:
    if text.removesuffix(PROMPTS) not in _LEVELS:
        raise ConfigError(
            f"must be one of {', '.join(_LEVELS)}, with or without {PROMPTS} after it, not {text!r}"
        )
    return text


def _context(text: str) -> float:
    value = Number(0, 1 << 20)(text)
    if value == 1:
        raise ConfigError("must be 0, or at least 2 (one token of prompt, one of answer), not 1")
    return value


def _path(text: str) -> Path:
    return Path(os.path.expanduser(text))  # pathlib's fails where there is no home


def _preset(text: str) -> str:
    try:
        return _choice("", *presets())(text)
    except ConfigError as error:
        raise ConfigError(f"{error}; any other model is named by SPECOPS_TARGET") from None


def _weights(text: str) -> str:
    if text and WeightsName.parse(text) is None:
        raise ConfigError(
            "must be fp32, int8 or int4; the last two may have a block, such as int8-32, and int4 "
            "then -mixed, which leaves the most sensitive weights in 8 bits, and -rtn, which "
            f"rounds each weight to the nearest; not {text!r}"
        )
    return text


def _sampling(text: str) -> str:
    if text != NO_ADVICE:
        try:
            SamplingDefaults.parse(text)
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return text


def _is_key(text: str) -> bool:
    return text != "" and text.isascii() and text.isprintable() and " " not in text


def _key(text: str) -> str:
    if not _is_key(text):
        raise ConfigError("must be printable ASCII without spaces")
    return text


def client_keys(text: str) -> list[tuple[str, str]]:
    """Split the value of `SPECOPS_API_KEYS` into pairs of a client's name and its key.

    The part before the first colon is the name: `alice:KEY`. Keys without a name are numbered:
    `key-1`. Keys with the same name belong to one client, so that it can replace its key.

    Raises:
        ConfigError: a key or a name has an invalid character, or a key has two names. The message
            shows no key.
    """
    names: dict[str, str] = {}  # by key
    for number, item in enumerate(text.split(",") if text else (), 1):
        name, colon, key = item.strip().partition(":")
        if not colon:
            name, key = f"key-{number}", name
        elif not _CLIENT_NAME.fullmatch(name) or _UNNAMED.fullmatch(name):
            raise ConfigError(
                "must be KEY or NAME:KEY, separated by commas; the part before the colon in entry "
                f"{number} is not a valid name: up to 32 letters, digits, `.`, `_` and `-`, but "
                "not `key-` with a number. A key that contains a colon needs a name"
            )
        if not _is_key(key):
            raise ConfigError(
                "must be KEY or NAME:KEY, separated by commas; the key of "
                f"entry {number} is not printable ASCII without spaces"
            )
        if names.setdefault(key, name) != name:
            raise ConfigError(f"has the key of entry {number} twice, with two names")
    return [(name, key) for key, name in names.items()]


def _keys(text: str) -> str:
    client_keys(text)
    return text


def _listed(pattern: str, what: str) -> Callable[[str], str]:
    """Return a parser of a comma-separated list whose items match a pattern, in lower case."""

    def check(text: str) -> str:
        items = [item.strip().lower() for item in text.split(",")]
        if not all(re.fullmatch(pattern, item) for item in items):
            raise ConfigError(f"must be {what}, separated by commas, not {text!r}")
        return ",".join(items)

    return check


_hosts = _listed(
    r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*",
    "host names without port, such as `llm.example.org`, `*.example.org` or `*`",
)
_origins = _listed(
    r"\*|[a-z][a-z0-9+.-]*://[^/\s,]+",
    "origins such as `https://chat.example.org`, `http://*.example.org:*` or `*`",
)


def _unknown(name: str, known: Collection[str]) -> ConfigError:
    from difflib import get_close_matches  # noqa: PLC0415 - takes 10 ms, and only errors need it

    # The prefix would make all names alike.
    near = get_close_matches(
        name.removeprefix(PREFIX), [item.removeprefix(PREFIX) for item in known]
    )
    meant = f"; did you mean {PREFIX}{near[0]}?" if near else "."
    return ConfigError(f"{name} is not a setting{meant} The settings are: {', '.join(known)}")


def setting(
    default: Any, parse: Callable[[str], Any], help_text: str, *, secret: bool = False
) -> Any:
    """Declare a setting.

    Args:
        default: its value where the variable is unset or empty.
        parse: turns the variable's text into the value; raises ConfigError.
        help_text: its documentation.
        secret: whether to keep the value out of logs.
    """
    return field(default=default, metadata={"parse": parse, "help": help_text}, repr=not secret)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of the service. Field `x` is read from the variable `SPECOPS_X`."""

    model: str = setting(
        "",
        _preset,
        "preset, which names target, draft and weights; empty: "
        f"`{CHAT}` if `make up` has fetched it, else `{DEMO}`",
    )
    target: str = setting(
        "",
        os.path.expanduser,
        "target: a folder, a `.pt` or `.gguf` file, or `org/name@revision`; empty: the preset's",
    )
    draft: str = setting(
        "",
        os.path.expanduser,
        "draft model or EAGLE-3 head, named like a target, or a folder with n-grams; empty: the "
        "preset's, or the target's own MTP block; `none`: no draft",
    )
    quant: str = setting(
        "",
        _weights,
        "weight format of the target, such as `int4-128`; empty: the preset's, or a GGUF's own",
    )
    draft_quant: str = setting(
        "", _weights, "weight format of the draft, such as `int8-128`; empty: the preset's"
    )
    models_dir: Path = setting(_MODELS_DIR, _path, "folder of bundled models")
    cache_dir: Path = setting(
        _CACHE_DIR, _path, "folder for downloaded and converted models (Docker: a volume if empty)"
    )
    drafter: str = setting(
        "",
        _choice("", *DRAFTERS, "none"),
        "default drafter of requests; empty: `cascade` with a draft model or head, else `suffix`",
    )
    sampling: str = setting(
        "",
        _sampling,
        "default sampling parameters of requests, such as `temperature=0.2,top_p=0.9`; "
        "empty: the preset's or the model's; `none`: the protocol's",
    )
    system: str = setting(
        "",
        str,
        "system message of conversations without one; empty: the preset's or the model's; "
        "`none`: the chat template's, if it has one; `empty`: an empty message",
    )
    max_k_draft: int = setting(8, Number(0, 16), "maximum draft tokens per request and step")
    slots: int = setting(
        0,
        Number(0, 64),
        "maximum number of running requests; 0: 8. A small KV cache may allow fewer",
    )
    context: int = setting(
        0,
        _context,
        "tokens per request, 2 to 1,048,576; 0: all that the model or the memory allows",
    )
    kv_tokens: int = setting(
        0,
        Number(0, 1 << 24),
        "tokens of the KV cache, for all requests together; 0: as many as memory allows",
    )
    kv_dtype: str = setting(
        "fp16",
        _choice("fp32", "fp16", "int8"),
        "element type of the KV cache: fp32, fp16 or int8; the preset `smollm2` sets int8",
    )
    max_batched_tokens: int = setting(
        96,
        Number(16, 4096),
        "maximum tokens per forward pass, prompts and draft tokens included",
    )
    max_inter_token_latency: float = setting(
        0.25,
        _seconds(0.01, 3600),
        "target for the seconds between two tokens of a request while other prompts are computed",
    )
    prefix_cache: str = setting(
        "client",
        _choice("client", "all", "off"),
        "which requests share cached prefixes and earlier texts: those of one `client`, `all`, or "
        "none (`off`)",
    )
    threads: int = setting(
        0, Number(0, 256), "compute threads; 0: one per core, within the CPU quota"
    )
    queue_size: int = setting(32, Number(0, 100_000), "requests that may wait for a slot")
    max_new_tokens: int = setting(1024, Number(1, 1 << 20), "maximum tokens per answer")
    request_timeout: float = setting(
        300.0, _seconds(1, 86_400), "deadline of a request in seconds, waiting for a slot included"
    )
    drain_timeout: float = setting(
        25.0, _seconds(0, 3600), "seconds that running requests have to finish after SIGTERM"
    )
    host: str = setting("127.0.0.1", str, "address the API listens on")
    port: int = setting(8000, Number(1, 65_535), "port the API listens on")
    api_keys: str = setting(
        "",
        _keys,
        "keys that clients must send (`Authorization: Bearer ...`), separated by commas, as KEY or "
        "`NAME:KEY`; empty: no key is needed",
        secret=True,
    )
    metrics_key: str = setting(
        "",
        _key,
        "key that /metrics requires (`Authorization: Bearer ...`); empty: /metrics is open",
        secret=True,
    )
    allowed_hosts: str = setting(
        "",
        _hosts,
        "host names under which the API answers without a key, such as "
        "`llm.example.org,*.example.net`; `*`: any. Addresses and private names are always allowed",
    )
    allowed_origins: str = setting(
        "",
        _origins,
        "web pages that may call the API, such as `https://chat.example.org`; `*`: any. Pages of "
        "this machine, editors and desktop apps are always allowed",
    )
    unknown_fields: str = setting(
        "ignore",
        _choice("ignore", "refuse"),
        "unknown fields of requests: `ignore` them and name them in the answer's headers, or "
        "`refuse` the request",
    )
    unknown_model: str = setting(
        "serve",
        _choice("serve", "refuse"),
        "requests for another model: `serve` them and name the model in the answer's "
        "X-Served-Model, or `refuse`",
    )
    log_level: str = setting(
        "info",
        _log_level,
        "lowest level of log lines: debug, info, warning or error; `+prompts` after it adds "
        "prompts and answers",
    )

    @property
    def log_prompts(self) -> bool:
        """Whether the log contains prompts and answers."""
        return self.log_level.endswith(PROMPTS)

    @property
    def preset(self) -> str:
        """Name of the preset: the one of `model`, or the default."""
        return self.model or default_preset()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Self:
        """Read the settings from variables, by default the process's environment.

        Raises:
            ConfigError: a value is wrong, or a `SPECOPS_` variable is not a setting. The message
                names the variable.
        """
        environ = os.environ if environ is None else environ
        # A .env with Windows line endings leaves a carriage return after each value, and
        # compose.yaml passes unset variables on as empty ones.
        given = {
            name: text.strip()
            for name, text in environ.items()
            if name.startswith(PREFIX) and text.strip()
        }
        known = {PREFIX + item.name.upper(): item for item in fields(cls)}
        # The defaults of a preset, such as the context, fit its own target only.
        preset = presets().get(given.get(f"{PREFIX}MODEL", default_preset()))
        own_target = f"{PREFIX}TARGET" in given
        values: dict[str, Any] = dict(preset.settings) if preset and not own_target else {}
        for name, text in given.items():
            if (item := known.get(name)) is None:
                raise _unknown(name, known)
            try:
                values[item.name] = item.metadata["parse"](text)
            except ConfigError as error:
                raise ConfigError(f"{name} {error}") from None
        return cls(**values)
