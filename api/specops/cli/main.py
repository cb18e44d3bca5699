"""The `specops` command: serve, generate, chat, export, info, bench, draft.

A flag is a setting by another name: `--slots 4` is `SPECOPS_SLOTS=4`, and the same code checks it.
Each command imports what it needs when it runs, so that `--help` answers at once and an export does
not load the engine.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specops.cli.options import (
    CommandError,
    add_generation,
    add_settings,
    check_generation,
    request_of,
    settings_of,
    variables_of,
)
from specops.cli.terminal import Terminal, figures, printable
from specops.config import PREFIX, PROMPTS, ConfigError, Settings

if TYPE_CHECKING:
    from specops.engine.engine import Engine
    from specops.engine.model_info import Download, ModelState
    from specops.request import GenerationRequest, Output

_MODEL_FLAGS = ("model", "target", "draft", "quant", "context", "kv_dtype", "threads")
_SERVE_FLAGS = ("host", "port", "slots", "kv_tokens", "max_k_draft", "drafter", "log_level")
_USAGE_ERROR = 2
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        command: Callable[[argparse.Namespace], int] = options.command
        return command(options)
    except ConfigError as error:
        return _fail(error, _USAGE_ERROR)
    except CommandError as error:
        return _fail(error)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # `specops generate ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a read-only folder
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error)


def _fail(error: object, code: int = 1) -> int:
    print(f"specops: {printable(str(error))}", file=sys.stderr)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="specops", description="LLM inference for small machines.", epilog=_epilog()
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve the HTTP API")
    add_settings(serve, *_SERVE_FLAGS, *_MODEL_FLAGS)
    serve.set_defaults(command=_serve)

    generate = commands.add_parser(
        "generate", help="answer or continue a prompt here, without a server"
    )
    generate.add_argument(
        "prompt",
        help="question for a chat model, or text to continue; - reads it from standard input",
    )
    generate.add_argument("--raw", action="store_true", help="continue the text unchanged")
    add_generation(generate, most=50)
    add_settings(generate, "drafter", *_MODEL_FLAGS)
    generate.set_defaults(command=_generate)

    chat = commands.add_parser("chat", help="talk to a chat model here, without a server")
    add_generation(chat, most=512)
    add_settings(chat, "drafter", *_MODEL_FLAGS)
    chat.set_defaults(command=_chat)

    export = commands.add_parser("export", help="convert a checkpoint for the engine")
    export.add_argument("source", help="folder with config.json and safetensors, or a GGUF")
    export.add_argument("destination", help="folder to write")
    export.add_argument("--quant", help="default: int4-128; for a GGUF, its weights unchanged")
    export.set_defaults(command=_export)

    info = commands.add_parser("info", help="show the model, its size and this machine's limits")
    add_settings(info, *_MODEL_FLAGS)
    info.set_defaults(command=_info)

    bench = commands.add_parser("bench", help="measure the model on this machine")
    benches = bench.add_subparsers(required=True, metavar="WHAT")
    load = benches.add_parser("load", help="time and memory of loading")
    load.add_argument("--runs", type=int, default=3, metavar="N", help="default: %(default)s")
    load.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_settings(load, "slots", "kv_tokens", *(flag for flag in _MODEL_FLAGS if flag != "draft"))
    load.set_defaults(command=_bench_load)

    draft = commands.add_parser("draft", help="make a source of draft tokens")
    actions = draft.add_subparsers(required=True, metavar="WHAT")
    make = actions.add_parser(
        "make", help="make a table of n-grams from texts that the model writes"
    )
    make.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    time = make.add_mutually_exclusive_group()
    time.add_argument(
        "--minutes", type=float, default=60.0, metavar="N", help="time for everything; default: 60"
    )
    time.add_argument(
        "--more", type=float, metavar="HOURS", help="write more texts for the finished table in DIR"
    )
    add_settings(make, "model", "target", "quant", "threads")
    make.set_defaults(command=_make_ngrams)
    return parser


def _epilog() -> str:
    names = (PREFIX + item.name.upper() for item in dataclasses.fields(Settings))
    return f"Settings come from the environment: {', '.join(names)}."


def _serve(options: argparse.Namespace) -> int:
    from specops.system.allocator import configure_malloc  # noqa: PLC0415

    configure_malloc()  # libraries start threads
    from specops.http.app import create_app  # noqa: PLC0415
    from specops.http.server import server  # noqa: PLC0415
    from specops.system import logs  # noqa: PLC0415

    settings = settings_of(options)
    logs.configure(settings.log_level.removesuffix(PROMPTS))
    return server.run(create_app(settings), settings)


# -- generate --------------------------------------------------------------------------------


def _generate(options: argparse.Namespace) -> int:
    from specops.cli.chat import REFUSALS  # noqa: PLC0415
    from specops.text.chat_template import question, with_system  # noqa: PLC0415

    engine, drawn = _for_one(options)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    terminal = Terminal(plain=options.no_color)
    last: Output | None = None
    try:
        if engine.info.chat and not options.raw:
            messages = with_system(question(prompt), engine.info.system)
            tokens = engine.encode_chat(engine.render_chat(messages))
        else:
            tokens = engine.encode(prompt)
        for last in engine.generate(replace(drawn, prompt_tokens=tokens)):
            terminal.show(last)
    except REFUSALS as error:
        return _fail(error)
    print()
    if last is None or last.stats is None or last.error is not None:
        return _fail(last.error if last else "nothing was generated")
    terminal.note(figures(last.stats))
    return 0


def _chat(options: argparse.Namespace) -> int:
    from specops.cli.chat import Chat, line_reader  # noqa: PLC0415

    engine, drawn = _for_one(options)
    if not engine.info.chat:
        return _fail(f"{engine.info.name} is not a chat model: use `specops generate`")
    terminal = Terminal(plain=options.no_color)
    Chat(engine, drawn, terminal, engine.info.system).run(line_reader())
    return 0


def _for_one(options: argparse.Namespace) -> tuple[Engine, GenerationRequest]:
    """Load an engine for one request at a time; return it and a request without a prompt."""
    settings = settings_of(options, slots="1")
    check_generation(options, settings)
    engine = _load(settings)
    return engine, request_of(options, settings, engine)


def _load(settings: Settings) -> Engine:
    from specops.engine.engine import Engine  # noqa: PLC0415

    def report(state: ModelState, detail: str, download: Download | None = None) -> None:
        del download  # the detail has its figures
        if sys.stderr.isatty():
            print(f"{state}: {printable(detail)}", file=sys.stderr)

    try:
        return Engine.load(settings, report)
    except RuntimeError as error:
        raise CommandError(error) from error


# -- export and info ---------------------------------------------------------------------------


def _export(options: argparse.Namespace) -> int:
    from specops.models.convert.__main__ import convert  # noqa: PLC0415
    from specops.models.errors import ModelError  # noqa: PLC0415
    from specops.models.layout import parts_of  # noqa: PLC0415

    more = ["--quant", options.quant] if options.quant else []
    try:
        more += ["--source-digest", parts_of(Path(options.source), tokenizer=False).digest()]
        convert([options.source, options.destination, *more])
    except (ModelError, ValueError) as error:
        return _fail(error)
    return 0


def _info(options: argparse.Namespace) -> int:
    from specops.engine.model_info import MIN_AGREEMENT  # noqa: PLC0415
    from specops.models.prepare import Source, choose, prepare  # noqa: PLC0415
    from specops.system.memory import read_memory  # noqa: PLC0415

    settings = settings_of(options)
    engine = _load(settings)
    info, choice, memory = engine.info, choose(settings), read_memory()

    def weights(source: Source, quant: str, parameters: int) -> str:
        # The engine has already reported a conversion, when it was loaded.
        folder = prepare(
            source, quant, name="", cache_dir=settings.cache_dir, report=lambda detail: None
        )
        size = _megabytes(_size(folder.graph.parent))
        count = f"{parameters / 1e6:.1f} M" if parameters else "unknown number of"
        return f"{count} parameters, {folder.quant}, {size}, {folder.path}"

    lines = {
        "model": info.name,
        "target": weights(choice.target, choice.target_quant, info.parameters),
        "draft": "none",
        "n-grams": "none"
        if info.ngrams is None
        else f"{_megabytes(info.ngrams.stat().st_size)}, {info.ngrams}",
        "drafters": ", ".join(info.drafters) + f" (default: {info.default_drafter})",
        "context": f"{info.context} tokens; at most {info.slots} requests at the same time",
        "vocabulary": f"{info.vocab_size} tokens",
        "kv cache": f"{info.kv_tokens} tokens in {info.kv_dtype}; {_megabytes(info.kv_bytes)}",
        "states": f"{_megabytes(info.state_bytes)} for all slots; snapshots of them: up to "
        f"{_megabytes(info.snapshot_bytes)}"
        if info.state_bytes
        else "none",
        "sampling": str(info.sampling) or "each protocol's defaults",
        "system message": "the chat template's own, if any"
        if info.system is None
        else info.system or "empty",
        "threads": str(info.threads),
        "kernels": engine.computes_with,
        "batch invariant": "yes"
        if info.batch_invariant
        else f"no: ONNX Runtime computes the products of {', '.join(info.ort_matmuls)}",
        "memory limit": f"{_megabytes(memory.limit)} ({memory.limit_note})",
        "swap limit": f"{_megabytes(memory.swap_limit)} ({memory.swap_note})",
    }
    if info.head is not None:
        lines["draft"] = "the target's own MTP block"
        if choice.draft is not None:
            lines["draft"] = f"a head, {_megabytes(_size(info.head))}, {info.head}"
        if info.head_agreement is not None:
            right = f"guesses {info.head_agreement:.0%} of a test text"
            lines["draft"] += f"; {right}"
            if info.head_agreement < MIN_AGREEMENT:
                lines["draft"] += ": another model's, for other layers, hardly trained or damaged"
    elif info.draft_parameters is not None and choice.draft is not None:
        lines["draft"] = weights(choice.draft, choice.draft_quant, info.draft_parameters)
    elif choice.draft is not None and info.ngrams is None:
        lines["draft"] = "none: the preset's cannot be used, the log says why"
    for name, value in lines.items():
        print(f"{name:16} {printable(value)}")
    print("\nmemory plan, made when the model was loaded")
    for line in engine.plan.lines():
        print(f"  {line}")
    return 0


def _bench_load(options: argparse.Namespace) -> int:
    from specops.cli.load_bench import document, measure, table  # noqa: PLC0415

    if options.runs < 1:
        raise ConfigError("--runs must be a whole number, 1 or above")
    fixed = {}
    if options.model and Path(options.model).is_dir():  # a folder, not the name of a preset
        fixed, options.model = {"target": options.model}, None
    variables = variables_of(options, **fixed)
    Settings.from_env(variables)
    runs = measure(variables, options.runs, _note)
    print(json.dumps(document(runs), indent=1) if options.json else table(runs), end="")
    return 0


def _make_ngrams(options: argparse.Namespace) -> int:
    more = options.more is not None
    minutes = 60 * options.more if more else options.minutes
    if not 0 < minutes < math.inf:
        raise ConfigError(f"--{'more' if more else 'minutes'} must be a number above 0")
    from specops.engine.engine import PROMPT_ERRORS  # noqa: PLC0415
    from specops.ngrams.making import make_ngrams  # noqa: PLC0415

    def report(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)  # the texts so far are saved on the way out

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # with nohup it is ignored
            signal.signal(number, end)
    try:
        results = make_ngrams(settings_of(options), options.out, minutes, report, more=more)
    except (RuntimeError, *PROMPT_ERRORS) as error:
        raise CommandError(error) from error
    except KeyboardInterrupt:
        report("interrupted: the same command continues from here")
        raise
    print(f"{options.out}: {'; '.join(result.verdict for result in results)}")
    return 0


def _note(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
