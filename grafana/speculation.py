"""The dashboard "Does speculation pay?": what guesses cost, what they bring, and who makes them."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from board import board
from panels import PER_SECOND, TIMES, TOKENS_PER_SECOND, bars, big_number, curves, heat
from promql import WINDOW, buckets, now, rate, rate_by, ratio, ratio_by, series

STEP_SECONDS = "specops_target_step_seconds_sum"
DECODE, DECODE_OR_VERIFY = 'kind="decode"', 'kind=~"decode|verify"'
VERIFY, GUESS, ONE_TOKEN = 'kind="verify"', 'kind="guess"', 'kind="decode", size="1"'


def _sum_rate(counter: str, labels: str = "") -> str:
    return f"sum(rate({series(counter, labels)}[{WINDOW}]))"


def gain() -> str:
    """Speed over plain decoding, from measured steps; 0 without traffic or plain steps.

    A plain token costs the time of decode steps by the rows in them (all sequence steps less the
    verifications, which have one row each); what the same tokens took is decoding, verifying and
    guessing together.
    """
    rows = _sum_rate("specops_sequence_steps_total")
    verified_rows = _sum_rate("specops_target_steps_total", 'kind="verify"')
    plain = f"{_sum_rate(STEP_SECONDS, DECODE)} / (({rows} - {verified_rows}) > 0)"
    guessing = _sum_rate("specops_draft_seconds_total")
    taken = f"{_sum_rate(STEP_SECONDS, DECODE_OR_VERIFY)} + {guessing}"
    return f"{_sum_rate('specops_decode_tokens_total')} * {plain} / (({taken}) > 0) or vector(0)"


def _glance(made: Dashboard) -> None:
    made.with_panel(
        big_number(
            "Gain over plain decoding",
            "How many times as fast as plain decoding, by the service's own estimate from the "
            "measured costs of passes. Below 1 guessing costs more than it brings: leave "
            "SPECOPS_ADAPTIVE on, or try another drafter. 1: plain decoding, or no traffic yet.",
            TIMES,
            now("specops_estimated_speedup", of="avg"),
            decimals=2,
            warn=1,
            alarm=0.95,
            low_is_bad=True,
        )
    )
    made.with_panel(
        big_number(
            "Tokens per jump",
            "Tokens that a request gets from one pass of the target; passes without a guess "
            "count. 1 is plain decoding. Low with a high acceptance: the drafter often has "
            "nothing to say.",
            "short",
            ratio("specops_decode_tokens_total", "specops_sequence_steps_total"),
            decimals=2,
            warn=1,
            alarm=0.99,
            low_is_bad=True,
        )
    )
    made.with_panel(
        big_number(
            "Mean acceptance length",
            "1 + accepted guesses per draft: the convention elsewhere. It leaves out passes "
            "without a guess, so it is never below tokens per jump; compare other engines with "
            "this one.",
            "short",
            f"1 + {_sum_rate('specops_accepted_tokens_total')} "
            f"/ ({_sum_rate('specops_drafts_total')} > 0) or vector(0)",
            decimals=2,
        )
    )
    made.with_panel(
        big_number(
            "Guesses accepted",
            "Share of guessed tokens that the target agreed with. Low: the drafter does not suit "
            "this text, or the temperature is high; the panel by drafter says which one.",
            "percentunit",
            ratio("specops_accepted_tokens_total", "specops_draft_tokens_total"),
            warn=0.4,
            alarm=0.15,
            low_is_bad=True,
        )
    )
    made.with_panel(
        big_number(
            "Draft length",
            "Tokens guessed per pass and request over the last minute, passes without a guess "
            "included. 0 under load is right: checking guesses of one request then costs more "
            "than a step for all.",
            "short",
            now("specops_draft_length", of="avg"),
            decimals=2,
        )
    )
    made.with_panel(
        big_number(
            "Time spent guessing",
            "Share of the engine's working time that goes into guesses. Above a third: the draft "
            "model is too large for its target; take a smaller one or `ngram`, which is nearly "
            "free.",
            "percentunit",
            f"{_sum_rate('specops_draft_seconds_total')} / (({_sum_rate(STEP_SECONDS)} "
            f"+ {_sum_rate('specops_draft_seconds_total')}) > 0) or vector(0)",
            warn=0.33,
            alarm=0.5,
        )
    )


def _worth(made: Dashboard) -> None:
    made.with_row(Row("What does it bring?"))
    made.with_panel(
        curves(
            "Gain over time",
            "How many times as fast as plain decoding: by the service's estimate, and by the time "
            "that steps really took (0 where no plain step was among them). 1 is the line between "
            "gain and loss. Below it for long: set SPECOPS_ADAPTIVE=1, choose another drafter, or "
            "none.",
            TIMES,
            {
                "estimated": now("specops_estimated_speedup", of="avg"),
                "by the time of steps": gain(),
            },
            warn=1,
            low_is_bad=True,
        )
    )
    made.with_panel(
        curves(
            "Both definitions of the jump",
            "Tokens per jump counts every pass; mean acceptance length leaves out passes without "
            "a guess. A wide gap between them: the drafter often has nothing to say, so `cascade` "
            "may do better than one alone.",
            "short",
            {
                "tokens per jump": ratio(
                    "specops_decode_tokens_total", "specops_sequence_steps_total"
                ),
                "mean acceptance length": f"1 + {_sum_rate('specops_accepted_tokens_total')} "
                f"/ ({_sum_rate('specops_drafts_total')} > 0) or vector(0)",
                "last minute (service)": now("specops_avg_jump", of="avg"),
            },
        )
    )
    made.with_panel(
        curves(
            "Where the engine's time goes",
            "Seconds of each second spent on each kind of work. Verify and draft together should "
            "take less than decode alone would take for the same tokens; the rest up to 1 is "
            "idle. A large `draft`: see `Time spent guessing`.",
            "s",
            {
                "{{kind}}": rate_by("kind", STEP_SECONDS),
                "draft": rate("specops_draft_seconds_total"),
            },
            stacked=True,
        )
    )


def _guesses(made: Dashboard) -> None:
    made.with_row(Row("Who guesses, and how well?"))
    made.with_panel(
        curves(
            "Guesses accepted, by drafter",
            "Share of guessed tokens that the target agreed with. Low for `draft`: the draft model "
            "does not suit this text. Low for `ngram`: the text does not repeat itself. Sampling "
            "at a high temperature lowers both.",
            "percentunit",
            {
                "{{drafter}}": ratio_by(
                    "drafter", "specops_accepted_tokens_total", "specops_draft_tokens_total"
                )
            },
            maximum=1,
        )
    )
    position = "specops_accepted_tokens_per_position_total"
    made.with_panel(
        bars(
            "Accepted, by position",
            "Share of drafts whose guess at this place was accepted, in the last 5 minutes. It "
            "falls from place to place. Hardly any beyond some place: guesses there are wasted, "
            "so a lower k_draft costs nothing.",
            "percentunit",
            {
                "{{position}}": f"sum by (position) (rate({series(position)}[5m])) "
                f"/ on () group_left () (sum(rate({series('specops_drafts_total')}[5m])) > 0) "
                f"or 0 * sum by (position) ({series(position)})"
            },
        )
    )
    made.with_panel(
        curves(
            "Accepted over time, by position",
            "The same over time. Falling at the first places: the text has become harder to "
            "guess. Falling at the last ones only: drafts became longer than they are good.",
            "percentunit",
            {
                "{{position}}": f"sum by (position) (rate({series(position)}[{WINDOW}])) "
                f"/ on () group_left () ({_sum_rate('specops_drafts_total')} > 0) "
                f"or 0 * sum by (position) ({series(position)})"
            },
            maximum=1,
        )
    )


def _lengths(made: Dashboard) -> None:
    made.with_row(Row("How much is guessed?"))
    made.with_panel(
        curves(
            "Draft length, by drafter",
            "Tokens per draft for each drafter, and over all passes in the last minute. With "
            "SPECOPS_ADAPTIVE the length follows what was accepted: long on easy text, 0 where it "
            "does not pay. A flat line at SPECOPS_K_DRAFT: it is not adaptive.",
            "short",
            {
                "{{drafter}}": ratio_by(
                    "drafter", "specops_draft_tokens_total", "specops_drafts_total"
                ),
                "all passes": now("specops_draft_length", of="avg"),
            },
        )
    )
    made.with_panel(
        curves(
            "Hits and misses",
            "Drafts per second, and passes per second for which a drafter was asked and had no "
            "guess. Many misses: the n-gram drafter finds no repetition, which costs little; all "
            "drafts at 0 under load: speculation is off because it does not pay.",
            PER_SECOND,
            {
                "{{drafter}} guessed": rate_by("drafter", "specops_drafts_total"),
                "{{drafter}} missed": rate_by("drafter", "specops_draft_misses_total"),
            },
        )
    )
    made.with_panel(
        curves(
            "Guesses per second",
            "Tokens guessed, and those of them that stood. The space between the lines was "
            "computed for nothing: fine while the gain is above 1, a reason for a lower "
            "SPECOPS_MAX_K_DRAFT where it is not.",
            TOKENS_PER_SECOND,
            {
                "guessed": rate("specops_draft_tokens_total"),
                "accepted": rate("specops_accepted_tokens_total"),
            },
        )
    )


def _reckoning(made: Dashboard) -> None:
    made.with_row(Row("What does the choice of lengths reckon with?"))
    cost = "specops_pass_cost_seconds"
    made.with_panel(
        curves(
            "Cost of a verification, in plain steps",
            "What checking so many tokens of one request costs, in steps of one token. The flatter "
            "the curves lie on each other, the longer drafts may be. All of them high: `int8` "
            "weights (SPECOPS_QUANT) make long verifications cheaper than `int4`.",
            TIMES,
            {
                "{{size}} tokens": f"max by (size) ({series(cost, VERIFY)}) "
                f"/ on () group_left () (max({series(cost, ONE_TOKEN)}) > 0) "
                f"or 0 * max by (size) ({series(cost, VERIFY)})"
            },
        )
    )
    made.with_panel(
        curves(
            "Cost of a step, by requests in it",
            "Seconds of a plain step for so many requests, and of one guess of the draft model. "
            "Sharing pays where two requests cost less than twice as much as one; then lengths "
            "fall to 0 under load. A guess that costs a third of a step must be right often.",
            "s",
            {
                "{{size}} requests": f"max by (size) ({series(cost, DECODE)})",
                "a guess": f"max({series(cost, GUESS)}) or vector(0)",
            },
        )
    )
    made.with_panel(
        heat(
            "Lengths chosen",
            "How many tokens the service chose to guess, pass by pass; 0 is not guessing. All at "
            "0: guessing does not pay on this text, or at this load. All at the top: try a larger "
            "SPECOPS_MAX_K_DRAFT.",
            "short",
            buckets("specops_chosen_draft_tokens"),
            width=8,
        )
    )


def build() -> Dashboard:
    """The whole dashboard."""
    return board(
        "speculation",
        "Does speculation pay?",
        "What guesses cost, what they bring, who makes them.",
        (_glance, _worth, _guesses, _lengths, _reckoning),
    )
