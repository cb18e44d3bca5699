"""Draft tokens by source and position: metrics, answers and benchmarks say the same of one run."""

from dataclasses import replace

import pytest

from bench.speculation.ways import by_source
from specops.config import Settings
from specops.http.protocols.native import Details
from specops.request import GenerationRequest, GenerationStats, SamplingParams
from tests.serving.service import collect, sample, serving

KINDS: tuple[tuple[str, bool, dict[str, object]], ...] = (
    ("suffix", False, {}),
    ("draft", False, {}),
    ("cascade", True, {}),
    ("cascade", False, {"sampling": SamplingParams(temperature=0.8, seed=3)}),
)


@pytest.mark.anyio
async def test_metrics_answers_and_benchmarks_agree(tiny_settings: Settings) -> None:
    stats: list[GenerationStats] = []
    details: list[Details] = []
    async with serving(replace(tiny_settings, max_k_draft=4)) as (service, metrics):
        for drafter, adaptive, more in KINDS:
            for number in range(3):
                request = GenerationRequest(
                    request_id=f"{len(stats)}",
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
                stats.append(found)
                details.append(Details.of(found, request))

        measured = by_source(stats)
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
