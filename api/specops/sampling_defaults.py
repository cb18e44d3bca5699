"""Defaults of the sampling parameters that a request leaves out, as the model's authors advise.

Their advice is in `generation_config.json`, under transformers' names, or in a GGUF
(`general.sampling.*`), from which the converter writes such a file.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

GENERATION_CONFIG = "generation_config.json"
NO_ADVICE = "none"  # as a setting: the protocols' defaults
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers from `low` to `high`; `low` itself only if `included`."""

    low: float
    high: float
    included: bool = True

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and (self.included or value > self.low)

    def __str__(self) -> str:
        joined = "from {:g} to {:g}" if self.included else "above {:g}, at most {:g}"
        return joined.format(self.low, self.high)


RANGES = {  # of values in requests, settings and models
    "temperature": Range(0, 2),
    "top_k": Range(0, (1 << 31) - 1),  # a request may say -1 as well
    "top_p": Range(0, 1, included=False),
    "min_p": Range(0, 1),
    "repetition_penalty": Range(0, 10, included=False),
    "presence_penalty": Range(-2, 2),
}


class SamplingDefaults(NamedTuple):
    """Values of sampling parameters, by the names of `SamplingParams`; None: not specified.

    Greedy decoding, a temperature of 0, ignores the others.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None

    def __str__(self) -> str:
        return ",".join(f"{name}={value:g}" for name, value in self.specified.items())

    @property
    def specified(self) -> dict[str, Any]:
        """The specified values, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}

    def over(self, other: Self) -> Self:
        """Return these values, and the other's for those that are not specified here."""
        return self._replace(**{**other.specified, **self.specified})

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `temperature=0.2,top_p=0.9`; an empty text specifies nothing.

        Raises:
            ValueError: a name or a value is wrong; the message says which ones are allowed.
        """
        values: dict[str, Any] = {}
        for part in filter(None, text.split(",")):
            name, _, value = (word.strip() for word in part.partition("="))
            if name not in cls._fields:
                named = ", ".join(cls._fields)
                raise ValueError(f"must be name=value with a name of {named}, not {part!r}")
            try:
                values[name] = int(value) if name == "top_k" else float(value)
            except ValueError:
                raise ValueError(f"{name} must be a number, not {value!r}") from None
            if values[name] not in RANGES[name]:
                raise ValueError(f"{name} must be a number {RANGES[name]}, not {value}")
        return cls(**values)

    @classmethod
    def load(cls, setting: str, folder: Path) -> Self:
        """Read the setting, and values that it leaves out from the model's file in the folder.

        A warning names values in the model's file that are out of range.
        """
        if setting == NO_ADVICE:
            return cls()
        advised, unusable = cls.of_model(folder)
        for name, value in unusable.items():
            log.warning("%s: %s cannot be used: %.100r", folder, name, value)
        return cls.parse(setting).over(advised)

    @classmethod
    def of_model(cls, folder: Path) -> tuple[Self, dict[str, Any]]:
        """Read a model's generation_config.json, which may be missing.

        Returns:
            The values, and the file's unusable values by name.
        """
        file = folder / GENERATION_CONFIG
        try:
            config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        except (OSError, ValueError, RecursionError) as error:
            return cls(), {file.name: str(error)}
        if not isinstance(config, Mapping):
            return cls(), {file.name: "no object"}
        advised = {name: config[name] for name in cls._fields if config.get(name) is not None}
        usable = {name: value for name, value in advised.items() if _usable(name, value)}
        return cls(**usable), {name: value for name, value in advised.items() if name not in usable}


def _usable(name: str, value: Any) -> bool:
    kinds = (int,) if name == "top_k" else (int, float)  # a bool is an `int`, too
    return type(value) in kinds and value in RANGES[name]
