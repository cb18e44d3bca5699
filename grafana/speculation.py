"""The dashboard "Does speculation pay?": costs, gains and sources of drafts."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard, Row

from board import Panels, board
from panels import PER_SECOND, TIMES, TOKENS_PER_SECOND, bars, big_number, curves, heat
from promql import WINDOW, buckets, now, rate, rate_by, ratio, ratio_by, series

STEP_SECONDS = "specops_target_step_seconds_sum"
COST = "specops_pass_cost_seconds"
TOKENS, ONE_TOKEN = 'kind="tokens"', 'kind="tokens", size="1"'
ONE_DRAFT_TOKEN, ATTENTION = 'kind="draft_tokens", size="1"', 'kind="attention"'


def _sum_rate(counter: str, labels: str = "") -> str:
    return f"sum(rate({series(counter, labels)}[{WINDOW}]))"


def _glance() -> Panels:
    yield big_number(
        "Gain over plain decoding",
        "How many times as fast as plain decoding, by the service's own estimate from the "
        "measured costs of passes. Below 1 drafting costs more than it brings: leave "
        "`adaptive` on, or try another drafter. 1: plain decoding, or no traffic yet.",
        TIMES,
        now("specops_estimated_speedup", of="avg"),
        decimals=2,
        warn=1,
        alarm=0.95,
        low_is_bad=True,
    )
    yield big_number(
        "Tokens per jump",
        "Tokens that a request gets from one pass of the target; passes without a draft "
        "count. 1 is plain decoding. Low with a high acceptance: the drafter often has "
        "nothing to say.",
        "short",
        ratio("specops_decode_tokens_total", "specops_sequence_steps_total"),
        decimals=2,
        warn=1,
        alarm=0.99,
        low_is_bad=True,
    )
    yield big_number(
        "Mean acceptance length",
        "1 + accepted tokens per draft: the convention elsewhere. It leaves out passes "
        "without a draft, so it is never below tokens per jump; compare other engines with "
        "this one.",
        "short",
        f"1 + {_sum_rate('specops_accepted_tokens_total')} "
        f"/ ({_sum_rate('specops_drafts_total')} > 0) or vector(0)",
        decimals=2,
    )
    yield big_number(
        "Draft tokens accepted",
        "Share of draft tokens that the target agreed with. Low: the drafter does not suit "
        "this text, or the temperature is high; the panel by drafter says which one.",
        "percentunit",
        ratio("specops_accepted_tokens_total", "specops_draft_tokens_total"),
        warn=0.4,
        alarm=0.15,
        low_is_bad=True,
    )
    yield big_number(
        "Draft length",
        "Draft tokens per pass and request over the last minute, passes without a draft "
        "included. It falls under load, which is right: the pass is full of others' tokens "
        "then, and each draft token has to be worth its time.",
        "short",
        now("specops_draft_length", of="avg"),
        decimals=2,
    )
    yield big_number(
        "Time spent drafting",
        "Share of the engine's working time that goes into drafting. Above a third: the draft "
        "model is too large for its target; take a smaller one or `suffix`, which is nearly "
        "free.",
        "percentunit",
        f"{_sum_rate('specops_draft_seconds_total')} / (({_sum_rate(STEP_SECONDS)} "
        f"+ {_sum_rate('specops_draft_seconds_total')}) > 0) or vector(0)",
        warn=0.33,
        alarm=0.5,
    )


def _worth() -> Panels:
    yield Row("What does it bring?")
    yield curves(
        "Gain over time",
        "How many times as fast as plain decoding, by the service's estimate, below what it "
        "would be if draft tokens were free: tokens per jump. 1 is the line between gain and "
        "loss. Below it for long: leave `adaptive` on, choose another drafter, or none.",
        TIMES,
        {
            "estimated": now("specops_estimated_speedup", of="avg"),
            "if drafts were free": ratio(
                "specops_decode_tokens_total", "specops_sequence_steps_total"
            ),
        },
        warn=1,
        low_is_bad=True,
    )
    yield curves(
        "Two counts of tokens per pass",
        "Tokens per jump counts every pass; mean acceptance length leaves out passes without "
        "a draft. A wide gap between them: the drafter often has nothing to say, so `cascade` "
        "may do better than one alone.",
        "short",
        {
            "tokens per jump": ratio("specops_decode_tokens_total", "specops_sequence_steps_total"),
            "mean acceptance length": f"1 + {_sum_rate('specops_accepted_tokens_total')} "
            f"/ ({_sum_rate('specops_drafts_total')} > 0) or vector(0)",
            "last minute (service)": now("specops_avg_jump", of="avg"),
        },
    )
    yield curves(
        "Where the engine's time goes",
        "Seconds of each second spent on each kind of pass of the target, and on drafting; the "
        "rest up to 1 is idle. Verify and draft together should take less than decode alone "
        "would take for the same tokens. A large `draft`: see `Time spent drafting`.",
        "s",
        {
            "{{kind}}": rate_by("kind", STEP_SECONDS),
            "draft": rate("specops_draft_seconds_total"),
        },
        stacked=True,
    )


def _drafts() -> Panels:
    yield Row("Who drafts, and how well?")
    yield curves(
        "Draft tokens accepted, by drafter",
        "Share of draft tokens that the target agreed with. Low for `draft`: the draft model "
        "does not suit this text. Low for `suffix`: the text does not repeat itself. Sampling "
        "at a high temperature lowers both.",
        "percentunit",
        {
            "{{drafter}}": ratio_by(
                "drafter", "specops_accepted_tokens_total", "specops_draft_tokens_total"
            )
        },
        maximum=1,
    )
    promises = "specops_draft_promises_total"
    yield curves(
        "What drafters promise, and what they keep",
        "The mean probability to be accepted that draft tokens come with, and the share that "
        "was. Side by side: the drafter knows what it knows. Accepted far below promised for "
        "long: drafts are longer than they are good, though the service corrects for it.",
        "percentunit",
        {
            "{{drafter}} promised": ratio_by("drafter", "specops_draft_promised_total", promises),
            "{{drafter}} accepted": ratio_by(
                "drafter", "specops_draft_promises_kept_total", promises
            ),
        },
        maximum=1,
    )
    yield bars(
        "Accepted, by what was promised",
        "Share of draft tokens that were accepted, by the tenth of the probability that was "
        "promised, in the last 5 minutes. Calibrated: 0 stands near 5 %, 9 near 95 %, and "
        "those between rise evenly.",
        "percentunit",
        {
            "{{tenth}}": "sum by (tenth) (rate("
            f"{series('specops_draft_promises_kept_total')}[5m])) / (sum by (tenth) "
            f"(rate({series(promises)}[5m])) > 0) or 0 * sum by (tenth) ({series(promises)})"
        },
    )
    position = "specops_accepted_tokens_per_position_total"
    yield bars(
        "Accepted, by position",
        "Share of drafts whose token at this position was accepted, in the last 5 minutes. It "
        "falls from position to position. Hardly any beyond some position: draft tokens there "
        "are wasted, so a lower k_draft costs nothing.",
        "percentunit",
        {
            "{{position}}": f"sum by (position) (rate({series(position)}[5m])) "
            f"/ on () group_left () (sum(rate({series('specops_drafts_total')}[5m])) > 0) "
            f"or 0 * sum by (position) ({series(position)})"
        },
    )
    yield curves(
        "Accepted over time, by position",
        "The same over time. Falling at the first positions: the text has become harder to "
        "foresee. Falling at the last ones only: drafts became longer than they are good.",
        "percentunit",
        {
            "{{position}}": f"sum by (position) (rate({series(position)}[{WINDOW}])) "
            f"/ on () group_left () ({_sum_rate('specops_drafts_total')} > 0) "
            f"or 0 * sum by (position) ({series(position)})"
        },
        maximum=1,
    )


def _lengths() -> Panels:
    yield Row("How much is drafted?")
    yield curves(
        "Draft length, by drafter",
        "Tokens per draft for each drafter, and over all passes in the last minute. With "
        "`adaptive` on the length follows what was accepted: long on easy text, 0 where it "
        "does not pay. A flat line: requests ask for a fixed number of draft tokens.",
        "short",
        {
            "{{drafter}}": ratio_by(
                "drafter", "specops_draft_tokens_total", "specops_drafts_total"
            ),
            "all passes": now("specops_draft_length", of="avg"),
        },
    )
    yield curves(
        "Hits and misses",
        "Drafts per second, and passes per second for which a drafter was asked and had "
        "nothing. Many misses: the suffix drafter finds no repetition, which costs little; all "
        "drafts at 0 under load: speculation is off because it does not pay.",
        PER_SECOND,
        {
            "{{drafter}} drafted": rate_by("drafter", "specops_drafts_total"),
            "{{drafter}} missed": rate_by("drafter", "specops_draft_misses_total"),
        },
    )
    yield curves(
        "Draft tokens per second",
        "Draft tokens verified, and those of them that stood. The space between the lines was "
        "computed for nothing: fine while the gain is above 1, a reason for a lower "
        "SPECOPS_MAX_K_DRAFT where it is not.",
        TOKENS_PER_SECOND,
        {
            "verified": rate("specops_draft_tokens_total"),
            "accepted": rate("specops_accepted_tokens_total"),
        },
    )


def _reckoning() -> Panels:
    yield Row("What does the choice of lengths reckon with?")
    yield curves(
        "Cost of a pass, by its tokens",
        "What a pass of so many tokens costs, in passes of one. The flatter the curves lie on "
        "each other, the more draft tokens pay, and the more requests share a pass for little. "
        "All of them high: this processor computes slowly for its memory; `int8` weights "
        "(SPECOPS_QUANT) make wide passes cheaper than `int4`.",
        TIMES,
        {
            "{{size}} tokens": f"max by (size) ({series(COST, TOKENS)}) "
            f"/ on () group_left () (max({series(COST, ONE_TOKEN)}) > 0) "
            f"or 0 * max by (size) ({series(COST, TOKENS)})"
        },
    )
    yield curves(
        "Cost of a token, a draft token, attention",
        "Seconds of a pass of one token of the target and of the draft model, and what "
        "1,000,000 pairs of a token and a position that it attends to add. A draft token that "
        "costs a third of a token must be right often; 0: there is no draft model. Attention "
        "is what long contexts pay. All rising: another process takes the CPU.",
        "s",
        {
            "token": f"max({series(COST, ONE_TOKEN)}) or vector(0)",
            "draft token": f"max({series(COST, ONE_DRAFT_TOKEN)}) or vector(0)",
            "attention": f"max({series(COST, ATTENTION)}) or vector(0)",
        },
    )
    yield heat(
        "Lengths chosen",
        "How many draft tokens the service chose, pass by pass; 0 is not drafting. All at 0: "
        "drafting does not pay on this text, or at this load. All at the top: try a larger "
        "SPECOPS_MAX_K_DRAFT.",
        "short",
        buckets("specops_chosen_draft_tokens"),
        width=8,
    )


def build() -> Dashboard:
    """The whole dashboard."""
    return board(
        "speculation",
        "Does speculation pay?",
        "What drafts cost, what they bring, where they come from.",
        (_glance, _worth, _drafts, _lengths, _reckoning),
    )
