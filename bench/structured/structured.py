"""Measures the cost and gain of grammars, and checks that every answer conforms.

Masks cost time: a free text is compared with the same text under a grammar that allows any text.
Forced tokens save passes: forms are answered in turns by plain constrained decoding and with the
service's defaults. Then every schema is answered greedily and with a seed, by plain decoding and
with every drafter, alone and concurrently. Each complete answer must parse and validate, and all
variants must give the same tokens.
"""

import json
from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import Any

from jsonschema import Draft202012Validator

from bench.engine.together import Answer, run_together
from bench.models import BenchModel
from bench.structured.schemas import FORMS, SCHEMAS
from bench.tools.report import Outcome, Summary, Table, Target, progress, ratios
from specops.engine.engine import NO_DRAFTER, Engine
from specops.request import (
    GRAMMAR,
    FinishReason,
    GenerationRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
)

_ANY_TEXT = Grammar(GrammarKind.REGEX, r"(.|\n)*")
_FREE_TOKENS = 128
_MIN_SPEEDUP, _MIN_SHARE = 1.5, 0.95


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    rounds: int
    schemas: int | None = None  # number of schemas; None: all
    form_tokens: int = 600  # maximum tokens of a form
    schema_tokens: int = 128
    at_once: int = 8


FULL = Plan(rounds=3)
QUICK = Plan(rounds=1, schemas=3, form_tokens=40, schema_tokens=24)


def run(model: BenchModel, plan: Plan) -> Outcome:
    """Measure masks and forms, then check the schemas."""
    engine = Engine.load(model.settings)
    masks = _masks(engine, plan)
    forms = {name: _form(engine, name, schema, plan) for name, schema in FORMS.items()}
    checked = _check(engine, plan)
    speed = [ratio.median for ratio in (Summary.of(form["speedups"]) for form in forms.values())]
    targets = [
        Target("any text under a grammar: speed relative to none", _MIN_SHARE, masks.median),
        *(
            Target(f"{name}: of plain constrained decoding", _MIN_SPEEDUP, value)
            for name, value in zip(forms, speed, strict=True)
        ),
    ]
    tables = [
        Table(
            f"Forms: {model.title}",
            ("form", "tokens", "plain tok/s", "served tok/s", "speedup", "tok/pass", "forced"),
            [_row(name, form) for name, form in forms.items()],
            (f"{plan.rounds} rounds, plain constrained decoding and served in turns, greedy; "
             "forced: share of tokens for which the grammar left no choice",),
        ),
        Table(
            f"Schemas: {model.title}",
            ("schemas", "answers", "complete", "valid of these", "cut"),
            [tuple(str(checked[name])
                   for name in ("schemas", "answers", "complete", "valid", "cut"))],
            (f"each greedy and with a seed, {plan.schema_tokens} tokens at most",
             *(f"invalid: {name}" for name in checked["invalid"])),
        ),
        Table(
            f"Ways: {model.title}",
            ("way", "answers", "other tokens than plain constrained decoding alone"),
            [(way, str(checked["answers"]), str(others))
             for way, others in checked["ways"].items()],
            tuple(f"differing: {name}" for name in checked["differing"]),
        ),
    ]  # fmt: skip
    result = {"model": model.key, "plan": asdict(plan), "any_text": asdict(masks)}
    result |= {"forms": forms, "schemas": checked}
    sound = not checked["invalid"] and not checked["differing"]
    return Outcome(result, tables, targets=targets, sound=sound)


def _masks(engine: Engine, plan: Plan) -> Summary:
    """The speed of a text under a grammar that allows any text, relative to no grammar."""
    prompt = _prompt(engine, "Tell a long story about a lighthouse.")
    rates: dict[str, list[float]] = {"free": [], "masked": []}
    for number in range(plan.rounds):
        progress(f"any text, round {number + 1} of {plan.rounds}")
        for name, grammar in (("free", None), ("masked", _ANY_TEXT)):
            request = _request(prompt, grammar, _FREE_TOKENS, drafter=NO_DRAFTER)
            (answer,) = run_together(engine, [request]).answers
            rates[name].append(answer.stats.tokens_per_second)
    return Summary.of(ratios(rates["masked"], rates["free"]))


def _form(engine: Engine, name: str, schema: dict[str, Any], plan: Plan) -> dict[str, Any]:
    """Speeds of one form: by plain constrained decoding, and with the service's defaults."""
    prompt = _prompt(engine, f"Write the data of a {name} as JSON.")
    ways = {"plain": NO_DRAFTER, "served": engine.info.default_drafter}
    answers: dict[str, list[Answer]] = {way: [] for way in ways}
    for number in range(plan.rounds):
        progress(f"{name}, round {number + 1} of {plan.rounds}")
        for way, drafter in ways.items():
            request = _request(prompt, _grammar(schema), plan.form_tokens, drafter=drafter)
            answers[way] += run_together(engine, [request]).answers
    rates = {
        way: [item.stats.tokens_per_second for item in found] for way, found in answers.items()
    }
    last = answers["served"][-1]
    return {
        "tokens": len(last.tokens),
        "rates": rates,
        "speedups": ratios(rates["served"], rates["plain"]),
        "tokens_per_jump": last.stats.tokens_per_pass,
        "origins": dict(Counter(piece.origin for piece in last.pieces)),
        "equal": all(item.tokens == last.tokens for found in answers.values() for item in found),
    }


def _row(name: str, form: dict[str, Any]) -> tuple[str, ...]:
    plain, served = (Summary.of(form["rates"][way]).median for way in ("plain", "served"))
    forced = form["origins"].get(GRAMMAR, 0) / form["tokens"]
    rates = (str(form["tokens"]), f"{plain:.1f}", f"{served:.1f}")
    speedup = Summary.of(form["speedups"]).spread()
    return (name, *rates, speedup, f"{form['tokens_per_jump']:.2f}", f"{forced:.0%}")


def _check(engine: Engine, plan: Plan) -> dict[str, Any]:
    """Answer every schema with all variants and compare the answers."""
    names = list(SCHEMAS)[: plan.schemas]
    asked: dict[str, GenerationRequest] = {}
    for index, name in enumerate(names):
        prompt = _prompt(engine, f"Write JSON, {name}.")
        request = _request(prompt, _grammar(SCHEMAS[name]), plan.schema_tokens, drafter=NO_DRAFTER)
        drawn = replace(request.sampling, temperature=0.8, seed=index)
        asked[f"{name}, greedy"] = request
        asked[f"{name}, seeded"] = replace(request, sampling=drawn)
    progress(f"{len(asked)} answers, plainly")
    answers = run_together(engine, list(asked.values()), 1).answers
    plain = dict(zip(asked, answers, strict=True))
    differing: set[str] = set()
    ways: dict[str, int] = {}
    for drafter in engine.info.drafters:
        k_draft = 0 if drafter == NO_DRAFTER else 8
        requests = [replace(item, drafter=drafter, k_draft=k_draft) for item in asked.values()]
        for at_once in (1, plan.at_once):
            way = f"{drafter}, {at_once} at once"
            progress(f"the same, {way}")
            answers = run_together(engine, requests, at_once).answers
            found = dict(zip(asked, answers, strict=True))
            others = [key for key in asked if found[key].tokens != plain[key].tokens]
            ways[way] = len(others)
            differing |= {f"{key}, {way}" for key in others}
    complete = [key for key, answer in plain.items() if answer.finish == FinishReason.STOP]
    schemas = {f"{name}, {kind}": SCHEMAS[name] for name in names for kind in ("greedy", "seeded")}
    invalid = [key for key in complete if not fits(plain[key].text, schemas[key])]
    return {
        "schemas": len(names),
        "answers": len(asked),
        "complete": len(complete),
        "valid": len(complete) - len(invalid),
        "cut": len(asked) - len(complete),
        "ways": ways,
        "invalid": invalid,
        "differing": sorted(differing),
    }


def fits(text: str, schema: dict[str, Any]) -> bool:
    """Whether a text is JSON that the schema allows."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError:
        return False
    checker = Draft202012Validator.FORMAT_CHECKER
    return Draft202012Validator(schema, format_checker=checker).is_valid(content)


def _grammar(schema: dict[str, Any]) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _prompt(engine: Engine, question: str) -> tuple[int, ...]:
    """The tokens of a question, in the model's chat template if it has one."""
    if engine.info.chat:
        return engine.encode_chat(engine.render_chat([{"role": "user", "content": question}]))
    return engine.encode(question)


def _request(
    prompt: tuple[int, ...], grammar: Grammar | None, most: int, *, drafter: str
) -> GenerationRequest:
    return GenerationRequest(
        request_id="",
        prompt_tokens=prompt,
        max_new_tokens=most,
        sampling=SamplingParams(grammar=grammar),
        drafter=drafter,
        k_draft=0 if drafter == NO_DRAFTER else 8,
        adaptive=True,
    )
