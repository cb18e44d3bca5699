"""Draws figures over the time of a run as SVG, since Locust's charts only have requests.

Lines are interrupted where nothing was measured. The text is grey, so that the charts suit light
and dark pages.
"""

import math
from collections.abc import Sequence

from record import Figures
from summary import short

CHARTS = (
    ("Output tokens per second", 1, {"output_tokens_per_second": ("all requests", "#00ca5a")}),
    ("TTFT (ms)", 1000, {"ttft_p50": ("p50", "#ff9f00"), "ttft_p95": ("p95", "#9966cc")}),
)
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 1104, 220, 64, 30, 24


def svg(rows: Sequence[Figures]) -> str:
    """All charts, stacked, for the rows of `Recorder.over_time`."""
    height = _HEIGHT * len(CHARTS)
    parts = [
        f'<g transform="translate(0 {_HEIGHT * index})">{_chart(rows, title, scale, lines)}</g>'
        for index, (title, scale, lines) in enumerate(CHARTS)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12" fill="#888">{"".join(parts)}</svg>'
    )


def _round_up(value: float) -> float:
    """The next larger value whose quarters are round numbers."""
    unit = 4 * 10 ** math.floor(math.log10(value / 4))
    return next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= value)


def _chart(
    rows: Sequence[Figures], title: str, scale: float, lines: dict[str, tuple[str, str]]
) -> str:
    values = [row[name] for row in rows for name in lines if row[name] is not None]
    top = _round_up(max(values, default=0) * scale or 1.0)
    ends = [row["seconds"] for row in rows]
    wide, high = _WIDTH - _LEFT, _HEIGHT - _TOP - _BOTTOM

    def x(at: float) -> float:
        return _LEFT + wide * at / ends[-1]

    parts = [f'<text x="{_LEFT}" y="16" font-size="14">{title}</text>']
    for step in range(5):
        y, at = _TOP + high * (1 - step / 4), ends[-1] * step / 4
        anchor = "end" if step == 4 else "middle"
        parts.append(
            f'<path d="M{_LEFT} {y:.1f}H{_WIDTH}" stroke="#8884"/>'
            f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">'
            f"{short(top * step / 4)}</text>"
            f'<text x="{x(at):.1f}" y="{_HEIGHT - 8}" text-anchor="{anchor}">{short(at)} s</text>'
        )
    for index, (name, (label, colour)) in enumerate(lines.items()):
        runs: list[list[str]] = [[]]
        for row, start in zip(rows, [0.0, *ends], strict=False):
            if row[name] is None:
                runs.append([])
                continue
            y = _TOP + high * (1 - row[name] * scale / top)
            runs[-1].append(f"{x((start + row['seconds']) / 2):.1f} {y:.1f}")
        parts += [
            f'<path d="M{"L".join(run)}h0" class="line" fill="none" stroke="{colour}" '
            f'stroke-width="{2 if run[1:] else 6}" stroke-linecap="round"/>'  # a lone one is a dot
            for run in runs
            if run
        ]
        parts.append(
            f'<text x="{_WIDTH - 110 * (len(lines) - index - 1)}" y="16" '
            f'text-anchor="end" fill="{colour}">{label}</text>'
        )
    return "".join(parts)
