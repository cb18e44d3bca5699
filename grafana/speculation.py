"""The dashboard "Does speculation pay?": costs, gains and sources of drafts."""

from board import Panels, board, row, state
from empty import Empty
from panels import (
    DRAFTERS,
    FOUND,
    MEAN,
    PER_SECOND,
    TIMES,
    TOKENS_PER_SECOND,
    Json,
    bars,
    curves,
    heat,
    tile,
    words,
)
from promql import (
    ANSWERS,
    GAIN,
    NOW,
    TOKENS_PER_PASS,
    UP,
    buckets,
    each_share,
    gauge,
    now,
    ordered,
    rate_by,
    ratio,
    ratio_by,
    series,
    share,
    share_by,
    speed,
    total,
)

STEP_SECONDS = "specops_target_step_seconds_sum"
TOKENS, STEPS = "specops_decode_tokens_total", "specops_sequence_steps_total"
GENERATED, ACCEPTED = "specops_generated_tokens_total", "specops_accepted_tokens_total"
DRAFTED, DRAFTS = "specops_draft_tokens_total", "specops_drafts_total"
PROMISES, KEPT = "specops_draft_promises_total", "specops_draft_promises_kept_total"
POSITION = "specops_accepted_tokens_per_position_total"
COST = "specops_pass_cost_seconds"
# The service measures 17 sizes; the powers of two show as much.
SOME, ONE_TOKEN = 'kind="tokens", size=~"2|4|8|16|32|64"', 'kind="tokens", size="1"'
ONE_DRAFT_TOKEN, ATTENTION = 'kind="draft_tokens", size="1"', 'kind="attention"'
LATELY = "5m"  # the window of the bars


def _acceptance_length(window: str) -> str:
    """1 + accepted tokens per draft."""
    return f"1 + {ratio(ACCEPTED, DRAFTS, window=window)}"


def _glance() -> Panels:
    yield state()
    lately = f"sum by (drafter) (increase({series(DRAFTS)}[{LATELY}]) {ANSWERS}) > 0"
    yield words(
        "Drafters",
        "Drafters that proposed tokens in the last 5 minutes. `none`: speculation is off "
        "(SPECOPS_DRAFTER) or does not pay on this text, or there are no requests; then all panels "
        "about drafts are empty.",
        {
            "{{drafter}}": f"count by (drafter) ({lately})",
            "none": f"vector(1) and on () {UP} unless on () ({lately})",
            Empty.UNREACHABLE: f"vector(1) unless on () {UP}",
        },
        DRAFTERS | {"none": "text", Empty.UNREACHABLE: "red"},
        width=3,
        other="green",
    )
    yield tile(
        "Gain",
        "Speed as a multiple of plain decoding's, which the service estimates from the measured "
        "costs of passes. 1 is plain decoding. Below 1 drafting costs more than it gains: leave "
        "`adaptive` on, or try another drafter.",
        TIMES,
        GAIN,
        decimals=2,
        warn=1,
        alarm=0.95,
        low_is_bad=True,
    )
    yield tile(
        "Output by drafts",
        "Share of the tokens generated in the last minute that were draft tokens, which the target "
        "only verified. Low with a high acceptance: the drafter often has nothing to propose.",
        "percentunit",
        share(ACCEPTED, GENERATED, window=NOW),
    )
    yield tile(
        "Jump length",
        "Tokens that a request gets from one pass of the target, passes without a draft included. "
        "1 is plain decoding. Low with a high acceptance: the drafter often has nothing to "
        "propose.",
        MEAN,
        TOKENS_PER_PASS,
        decimals=2,
        warn=1,
        alarm=0.99,
        low_is_bad=True,
    )
    yield tile(
        "Acceptance length",
        "Mean acceptance length: 1 + accepted tokens per draft, to compare with other engines. "
        "It leaves out passes without a draft, so it is never below tokens per pass.",
        MEAN,
        _acceptance_length(NOW),
        decimals=2,
        empty_when=Empty.NO_DRAFTS,
    )
    yield tile(
        "Drafts accepted",
        "Share of the last minute's draft tokens that the target accepted. Low: the drafter does "
        "not suit this text, or the temperature is high. `Draft tokens accepted, by drafter` says "
        "which one.",
        "percentunit",
        share(ACCEPTED, DRAFTED, window=NOW),
        warn=0.4,
        alarm=0.15,
        low_is_bad=True,
        empty_when=Empty.NO_DRAFTS,
    )
    seconds, working = (
        total(name, window=NOW) for name in ("specops_draft_seconds_total", STEP_SECONDS)
    )
    yield tile(
        "Time drafting",
        "Share of the engine's working time spent on drafting. Above a third, the draft model is "
        "too large for its target: choose a smaller one, or `suffix`, which costs almost nothing.",
        "percentunit",
        f"{seconds} / ({working} + {seconds} > 0)",
        warn=0.33,
        alarm=0.5,
    )


def _worth() -> Panels:
    yield row("What does it bring?")
    yield curves(
        "Gain over plain decoding",
        "Speed as a multiple of plain decoding's, as the service estimates it. Tokens per pass "
        "would be the multiple if draft tokens were free. Below 1 drafting loses time: if it stays "
        "there, leave `adaptive` on, choose another drafter, or none.",
        TIMES,
        {"gain over plain decoding": GAIN, "tokens per pass": TOKENS_PER_PASS},
        warn=1,
        low_is_bad=True,
    )
    yield curves(
        "Tokens per pass (average jump length)",
        "Tokens per pass counts every pass; mean acceptance length leaves out passes without "
        "a draft. If the gap is wide, the drafter often has nothing to propose: `cascade` may do "
        "better than a single drafter.",
        MEAN,
        {
            "now": ratio(TOKENS, STEPS),
            "last minute": TOKENS_PER_PASS,
            "mean acceptance length": _acceptance_length("$__rate_interval"),
        },
    )
    yield curves(
        "Output by drafts over time",
        "Share of the generated tokens that were draft tokens, which the target only verified. "
        "If it falls under the same load, the text has become harder to predict. 0 for long: "
        "drafting is off, or does not pay.",
        "percentunit",
        {"of all tokens": share(ACCEPTED, GENERATED)},
    )


def _drafts() -> Panels:
    yield row("Who drafts, and how well?")
    yield curves(
        "Draft tokens accepted, by drafter",
        "Share of draft tokens that the target accepted. Low for `draft`: the draft model "
        "does not suit this text. Low for `suffix`: the text does not repeat itself. Sampling "
        "at a high temperature lowers both.",
        "percentunit",
        {"{{drafter}}": share_by("drafter", ACCEPTED, DRAFTED)},
        named=DRAFTERS,
        maximum=1,
        empty_when=Empty.NO_DRAFTS,
    )
    yield curves(
        "What drafters promise, and what they keep",
        "The mean acceptance probability that the drafter promised for its draft tokens, and the "
        "share that was accepted. Close together, the promises are calibrated. While acceptance is "
        "far below, drafts are too long, until the service has corrected its estimates.",
        "percentunit",
        {
            "{{drafter}} promised": share_by("drafter", "specops_draft_promised_total", PROMISES),
            "{{drafter}} accepted": share_by("drafter", KEPT, PROMISES),
        },
        maximum=1,
        empty_when=Empty.NO_DRAFTS,
    )
    yield bars(
        "Accepted, by what was promised",
        "Share of the last 5 minutes' draft tokens that were accepted, by the probability that the "
        "drafter promised. If promises are calibrated, the bars rise evenly, from near 5 % to near "
        "95 %.",
        "tenth",
        "promised ${1}0 to ${1}9 %",
        share_by("tenth", KEPT, PROMISES, LATELY),
        empty_when=Empty.NO_DRAFTS,
    )
    yield bars(
        "Accepted, by position",
        "Share of the last 5 minutes' drafts whose token at this position was accepted. It falls "
        "from position to position. Where hardly any are accepted, draft tokens are wasted: a "
        "lower k_draft costs nothing.",
        "position",
        "token $1",
        ordered("position", each_share("position", POSITION, DRAFTS, LATELY)),
        empty_when=Empty.NO_DRAFTS,
    )
    yield curves(
        "Accepted over time, by position",
        "The same over time. If the first positions fall, the text has become harder to "
        "predict. If only the last ones fall, drafts have become too long.",
        "percentunit",
        {"token {{position}}": ordered("position", each_share("position", POSITION, DRAFTS))},
        maximum=1,
        empty_when=Empty.NO_DRAFTS,
    )
    yield curves(
        "Accepted tokens, by where they were found",
        "Accepted draft tokens per second, by source: the request's own `text`, the client's "
        "earlier requests (`history`), the model's `table` of n-grams, or a draft head or model. "
        "If a load test has much `history`, it repeats its prompts, and real requests will gain "
        "less.",
        TOKENS_PER_SECOND,
        {"{{found_in}}": rate_by("found_in", "specops_accepted_tokens_found_total")},
        stacked=True,
        named=FOUND,
        empty_when=Empty.NO_DRAFTS,
    )


def _lengths() -> Panels:
    yield row("How much is drafted?")
    yield curves(
        "Draft length, by drafter",
        "Tokens per draft for each drafter, and per pass over all passes. With `adaptive` on, "
        "the length follows acceptance: long on easy text, 0 where drafting does not pay. A flat "
        "line: requests set a fixed number of draft tokens.",
        MEAN,
        {
            "{{drafter}}": ratio_by("drafter", DRAFTED, DRAFTS),
            "all passes": ratio(DRAFTED, STEPS),
        },
        named=DRAFTERS,
        empty_when=Empty.NO_DRAFTS,
        width=6,
    )
    yield curves(
        "Hits and misses",
        "Drafts per second, and passes per second in which a drafter had nothing to propose. Many "
        "misses of `suffix`: the text does not repeat itself, which costs little. No drafts under "
        "load: speculation is off, or does not pay.",
        PER_SECOND,
        {
            "{{drafter}} drafted": rate_by("drafter", DRAFTS),
            "{{drafter}} missed": rate_by("drafter", "specops_draft_misses_total"),
        },
        empty_when=Empty.NO_DRAFTS,
        width=6,
    )
    yield curves(
        "Draft tokens per second",
        "Draft tokens verified and accepted, per second. The gap is wasted work: fine while the "
        "gain is above 1, otherwise a reason to lower SPECOPS_MAX_K_DRAFT.",
        TOKENS_PER_SECOND,
        {"verified": speed(DRAFTED), "accepted": speed(ACCEPTED)},
        empty_when=Empty.NO_DRAFTS,
        width=6,
    )
    yield heat(
        "Lengths chosen",
        "Number of draft tokens that the service chose, pass by pass; 0: no draft. All at 0: "
        "drafting does not pay on this text, or under this load. All at the top: try a larger "
        "SPECOPS_MAX_K_DRAFT.",
        MEAN,
        buckets("specops_chosen_draft_tokens"),
        empty_when=Empty.NO_DRAFTS,
        width=6,
    )


def _costs() -> Panels:
    yield row("Which costs decide the lengths?")
    relative = (
        f"max by (size) {gauge(COST, SOME)} / on () group_left () (max{gauge(COST, ONE_TOKEN)} > 0)"
    )
    yield curves(
        "Cost of a pass, by its tokens",
        "The cost of a pass of this many tokens, as a multiple of a pass of one. The closer to 1, "
        "the more draft tokens pay, and the cheaper it is for requests to share a pass. All high: "
        "this CPU computes slowly for its memory's speed; `int8` weights (SPECOPS_QUANT) make wide "
        "passes cheaper than `int4`.",
        TIMES,
        {"{{size}} tokens": ordered("size", relative)},
        empty_when=Empty.NOT_READY,
        width=12,
    )
    yield curves(
        "Cost of a token, a draft token, attention",
        "Time of a pass of one token, by the target and by the draft model, and (on the right) the "
        "added time of 1,000,000 pairs of a token and a position that it attends to. If a draft "
        "token costs a third of a token, it must be right often. Attention is the price of long "
        "contexts. If all rise, another process uses the CPU.",
        "s",
        {
            "token": f"{now(COST, ONE_TOKEN, of='max')} > 0",
            "draft token": f"{now(COST, ONE_DRAFT_TOKEN, of='max')} > 0",
            "attention": f"{now(COST, ATTENTION, of='max')} > 0",
        },
        right={"attention": "s"},
        empty_when=Empty.NOT_READY,
        width=12,
    )


def build() -> Json:
    """The whole dashboard."""
    return board(
        "speculation",
        "Does speculation pay?",
        "What drafts cost, what they gain, and where they come from.",
        (_glance, _worth, _drafts, _lengths, _costs),
    )
