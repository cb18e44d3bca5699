"""Draft tokens by source and position: metrics and answers report the same counts."""

from dataclasses import replace

import pytest

from specops.config import Settings
from specops.http.protocols.native import Details
from specops.request import GenerationRequest, SamplingParams, SourceStats
from tests.serving.service import collect, sample, serving

KINDS: tuple[tuple[str, bool, dict[str, object]], ...] = (
    ("suffix", False, {}),
    ("draft", False, {}),
    ("cascade", True, {}),
    ("cascade", False, {"sampling": SamplingParams(temperature=0.8, seed=3)}),
)


@pytest.mark.anyio
async def test_metrics_and_answers_agree(tiny_settings: Settings) -> None:
    measured: dict[str, SourceStats] = {}
    details: list[Details] = []
    async with serving(replace(tiny_settings, max_k_draft=4)) as (service, metrics):
        for drafter, adaptive, more in KINDS:
            for number in range(3):
                request = GenerationRequest(
                    request_id=f"{len(details)}",
                    prompt_tokens=(1, 2, 3, number) * 4,
                    max_new_tokens=24,
                    drafter=drafter,
                    k_draft=4,
                    adaptive=adaptive,
                    ignore_eos=True,
                    **more,  # type: ignore[arg-type]
                )
                found = (await collect(service.submit(request)))[-1].stats
                assert found is not None
                for name, source in found.sources.items():
                    measured[name] = measured.get(name, SourceStats()) + source
                details.append(Details.of(found, request))

        assert set(measured) == {"suffix", "draft"}
        for name, source in measured.items():
            for position, (verified, accepted) in enumerate(
                zip(source.verified_per_position, source.accepted_per_position, strict=True)
            ):
                labels = {"drafter": name, "position": str(position + 1)}
                counted = sample(metrics, "draft_tokens_per_position_total", **labels)
                kept = sample(metrics, "accepted_tokens_per_position_total", **labels)
                assert (counted, kept) == (verified, accepted)
                assert verified == sum(_at(one, name, "verified", position) for one in details)
                assert accepted == sum(_at(one, name, "accepted", position) for one in details)
            assert sample(metrics, "draft_tokens_total", drafter=name) == sum(
                source.verified_per_position
            )
            assert 0 < sum(source.accepted_per_position) < sum(source.verified_per_position)


def _at(details: Details, name: str, which: str, position: int) -> int:
    source = details.sources.get(name)
    counts: list[int] = getattr(source, f"{which}_per_position", [])
    return counts[position] if position < len(counts) else 0
