"""The flags that `generate` and `chat` share, as a request."""

from __future__ import annotations

from argparse import Namespace

from specops.config import ConfigError, Settings
from specops.engine.engine import Engine
from specops.request import GenerationRequest, SamplingParams

_LARGEST_REQUEST = 1 << 20


def check(options: Namespace, settings: Settings) -> None:
    """Hold the flags against their limits, before anything is loaded.

    Raises:
        ConfigError: one of them cannot be used.
    """
    if not 1 <= options.max_new_tokens <= _LARGEST_REQUEST:
        raise ConfigError(f"--max-new-tokens takes 1 to {_LARGEST_REQUEST}")
    if not 0 <= options.temperature <= 2:
        raise ConfigError("--temperature takes 0 to 2")
    if options.seed is not None and options.seed < 0:
        raise ConfigError("--seed takes a whole number from 0")
    if options.k_draft is not None and not 0 <= options.k_draft <= settings.max_k_draft:
        raise ConfigError(f"--k-draft takes 0 to {settings.max_k_draft} (SPECOPS_MAX_K_DRAFT)")


def request_of(options: Namespace, settings: Settings, engine: Engine) -> GenerationRequest:
    """How answers are drawn, without a prompt."""
    return GenerationRequest(
        request_id="cli",
        prompt_tokens=(),
        max_new_tokens=options.max_new_tokens,
        sampling=SamplingParams(temperature=options.temperature, seed=options.seed),
        drafter=engine.info.default_drafter,
        k_draft=settings.max_k_draft if options.k_draft is None else options.k_draft,
        adaptive=options.k_draft is None,
    )
