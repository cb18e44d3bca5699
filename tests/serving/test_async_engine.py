"""The asynchronous engine: admission, cancellation, draining, and errors of the engine."""

import asyncio
import math
import os
import sys
import threading
import time
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from specops.config import Settings
from specops.engine.engine import PROMPT_ERRORS, Engine
from specops.engine.model_info import MIN_AGREEMENT, ModelState
from specops.metrics.metrics import Metrics
from specops.request import FinishReason, GenerationRequest, Output, SamplingParams, Step
from specops.serving import async_engine
from specops.serving.admission import CACHES_AHEAD, QueueFull
from specops.serving.async_engine import AsyncEngine, NotReady
from specops.serving.request_handle import QueuePosition, RequestHandle
from tests.eagle_heads import write_head
from tests.serving.service import collect, halt, sample, serving
from tests.waiting import until

pytestmark = pytest.mark.anyio
_ids = count()
FOREVER = 120


def request(**fields: object) -> GenerationRequest:
    values = {"prompt_tokens": (1, 2, 3), "max_new_tokens": 5, "ignore_eos": True} | fields
    return GenerationRequest(request_id=f"r{next(_ids)}", **values)  # type: ignore[arg-type]


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "engine"]


async def test_requests_are_answered_and_counted(tiny_settings: Settings) -> None:
    async with serving(tiny_settings) as (service, metrics):
        handles = [service.submit(request(drafter="draft", k_draft=3)) for _ in range(6)]
        answers = await asyncio.gather(*(collect(handle) for handle in handles))
        for outputs in answers:
            assert outputs[-1].finish is FinishReason.LENGTH
            assert sum(len(output.pieces) for output in outputs) == 5
        assert service.running == service.waiting == 0
        assert sample(metrics, "generated_tokens_total") == 30
        of_clients = ("requests", "prompt_tokens", "generated_tokens")
        assert [
            sample(metrics, f"client_{name}_total", client="everyone") for name in of_clients
        ] == [6, 18, 30]
        for name, tokens in (("prompt", 18), ("generated", 30)):
            assert sample(metrics, f"request_{name}_tokens_sum") == tokens
        assert sample(metrics, "decode_tokens_total") == 24
        assert sample(metrics, "prompt_tokens_total") == 18
        assert sample(metrics, "requests_total", outcome="length") == 6
        assert sample(metrics, "latency_seconds_count") == 6
        assert sample(metrics, "time_to_first_token_seconds_count") == 6
        steps = [output.stats.sequence_steps for *_, output in answers if output.stats]
        assert sample(metrics, "sequence_steps_total") == sum(steps)
        assert sample(metrics, "kv_tokens") == 0
        assert sample(metrics, "kv_capacity_tokens") == service.info.kv_tokens
        assert sample(metrics, "kv_blocks", state="used") == 0
        free_or_kept = [sample(metrics, "kv_blocks", state=name) for name in ("free", "kept")]
        assert sum(free_or_kept) * 64 == service.info.kv_tokens
        assert sample(metrics, "pass_tokens_total", use="prompt") == 18
        assert sample(metrics, "pass_tokens_total", use="decoded") == sum(steps)


async def test_the_controllers_choices_and_estimates_are_exported(tiny_settings: Settings) -> None:
    async with serving(tiny_settings, Engine.load) as (service, metrics):
        assert math.isnan(sample(metrics, "estimated_speedup"))
        for kind in ("tokens", "draft_tokens"):
            for size in ("1", "8"):
                assert sample(metrics, "pass_cost_seconds", kind=kind, size=size) > 0
        drafted = {"drafter": "draft", "k_draft": 3, "max_new_tokens": 9}
        stats = (await collect(service.submit(request(adaptive=True, **drafted))))[-1].stats
        await collect(service.submit(request(adaptive=False, **drafted)))  # nothing to choose
        count = sample(metrics, "chosen_draft_tokens_count", drafter="draft")
        assert stats.drafts <= count <= stats.sequence_steps
        assert sample(metrics, "chosen_draft_tokens_sum", drafter="draft") == stats.draft_tokens
        assert sample(metrics, "estimated_speedup") not in (0, 1)


@pytest.mark.parametrize(
    ("prefix_cache", "other"), [("client", False), ("all", True), ("off", False)]
)
async def test_answers_speed_up_only_the_clients_that_share_prefixes(
    tiny_settings: Settings, prefix_cache: str, *, other: bool
) -> None:
    """An answer that does not repeat itself, and that is the same each time, by its seed."""
    settings = replace(tiny_settings, prefix_cache=prefix_cache)
    async with serving(settings, Engine.load) as (service, metrics):
        metrics.set_clients(["ann", "bob"])

        async def steps(client: str) -> int:
            repeated = request(
                drafter="suffix", k_draft=4, client=client, max_new_tokens=24,
                sampling=SamplingParams(temperature=2.0, seed=7),
            )  # fmt: skip
            stats = (await collect(service.submit(repeated)))[-1].stats
            return stats.sequence_steps

        alone = await steps("ann")
        assert (await steps("bob") < alone) is other
        assert (await steps("ann") < alone) is (prefix_cache != "off")


async def test_a_head_that_is_never_right_is_told_of(
    tiny_settings: Settings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are right all the same, so nothing else would tell of it."""
    layers = {"eagle_aux_hidden_state_layer_ids": [0, 1, 1]}
    target, head = Path(tiny_settings.target), tmp_path / "head"
    write_head(head, target=target, hidden=256, rows=1, **layers)
    async with serving(replace(tiny_settings, draft=str(head))) as (service, metrics):
        share = service.info.head_agreement
        assert share is not None
        assert sample(metrics, "draft_head_agreement") == share < MIN_AGREEMENT
    assert "it was made for another model" in caplog.text
    assert "set SPECOPS_DRAFT=none" in caplog.text


async def test_a_full_queue_refuses_at_once(tiny_settings: Settings) -> None:
    async with serving(tiny_settings) as (service, metrics):
        capacity = tiny_settings.slots + tiny_settings.queue_size
        handles = [service.submit(request(max_new_tokens=20)) for _ in range(capacity)]
        with pytest.raises(QueueFull) as refused:
            service.submit(request())
        assert refused.value.retry_after >= 1
        assert sample(metrics, "requests_rejected_total", reason="queue_full") == 1
        answers = await asyncio.gather(*(collect(handle) for handle in handles))
        assert all(answer[-1].finish is FinishReason.LENGTH for answer in answers)
        await collect(service.submit(request()))


@pytest.mark.parametrize(
    ("prompt", "error", "reason"),
    [
        ((1,) * 200, r"200 tokens.*128 tokens", "prompt_too_long"),
        ((1, 320), "token 320, but the model has 320", "invalid"),
    ],
)
async def test_a_prompt_that_the_model_cannot_take_is_refused_and_counted(
    tiny_settings: Settings, prompt: tuple[int, ...], error: str, reason: str
) -> None:
    async with serving(tiny_settings) as (service, metrics):
        with pytest.raises(PROMPT_ERRORS, match=error):
            service.submit(request(), request(prompt_tokens=prompt))
        assert sample(metrics, "requests_rejected_total", reason=reason) == 1
        assert service.waiting == 0


async def test_cancelling_frees_the_slot_and_counts_wasted_tokens(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_settings) as (service, metrics):
        may = halt(service.engine, monkeypatch)
        handle = service.submit(request(max_new_tokens=FOREVER))
        last = None
        async for outputs in handle.outputs():
            handle.cancel()
            may.set()
            last = outputs[-1]
        assert last is not None
        assert last.finish is FinishReason.CANCELLED
        assert sample(metrics, "wasted_tokens_total") == last.stats.generated_tokens > 0
        handle.cancel()
        assert sample(metrics, "requests_total", outcome="cancelled") == 1
        assert service.running == service.waiting == 0


async def test_short_steps_are_handed_over_together_each_with_its_own_output(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only those with the first token and with the last are handed over at once."""
    for name in ("_GATHER", "_GATHER_STREAM"):
        monkeypatch.setattr(async_engine, name, 60.0)
    async with serving(tiny_settings) as (service, _):
        handle = service.submit(request(max_new_tokens=40))
        batches = [outputs async for outputs in handle.outputs()]
        assert [len(output.pieces) for outputs in batches for output in outputs] == [1] * 40
        assert len(batches) <= 2


async def test_an_answer_that_is_whole_ends_alone_and_counts_as_complete(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_settings) as (service, metrics):
        may = halt(service.engine, monkeypatch)
        whole, other = request(max_new_tokens=FOREVER), request()
        handle, ends = service.submit(whole, other), {}
        async for outputs in handle.outputs():
            for output in outputs:
                if output.request_id == whole.request_id:
                    handle.end(whole.request_id)  # again and again, and after it has ended
                    may.set()
                if output.finish:
                    ends[output.request_id] = output.finish
        handle.end(whole.request_id)
        assert ends == {
            whole.request_id: FinishReason.STOP, other.request_id: FinishReason.LENGTH
        }  # fmt: skip
        assert sample(metrics, "requests_total", outcome="cancelled") == 0
        assert sample(metrics, "wasted_tokens_total") == 0
        assert service.running == service.waiting == 0


async def test_several_requests_share_a_handle_and_come_in_together(
    tiny_settings: Settings,
) -> None:
    async with serving(tiny_settings) as (service, metrics):
        three = [request() for _ in range(3)]
        finished = [
            output.request_id
            for output in await collect(service.submit(*three))
            if output.finish is FinishReason.LENGTH
        ]
        assert sorted(finished) == sorted(item.request_id for item in three)
        capacity = tiny_settings.slots + tiny_settings.queue_size
        with pytest.raises(QueueFull):
            service.submit(*(request() for _ in range(capacity + 1)))
        assert service.running == service.waiting == 0
        handle = service.submit(*(request(max_new_tokens=FOREVER) for _ in range(capacity)))
        assert sample(metrics, "requests_waiting") == capacity  # before any step
        handle.cancel()
        ends = [output.finish for output in await collect(handle) if output.finish]
        assert ends == [FinishReason.CANCELLED] * capacity


async def test_a_request_that_waits_too_long_for_a_slot_times_out(tiny_settings: Settings) -> None:
    settings = replace(tiny_settings, slots=1, request_timeout=77)
    async with serving(settings) as (service, metrics):
        running = service.submit(request(max_new_tokens=FOREVER))
        (taken,) = running.requests
        assert taken.deadline - taken.arrival == pytest.approx(77)
        late = service.submit(request(deadline=time.monotonic()))
        ended = (await collect(late))[-1]
        assert ended.finish is FinishReason.TIMEOUT
        assert ended.stats.generated_tokens == 0
        assert (await collect(running))[-1].finish is FinishReason.LENGTH
        assert sample(metrics, "requests_total", outcome="timeout") == 1


async def test_the_tokens_of_the_queue_are_bounded_by_the_kv_cache(tiny_settings: Settings) -> None:
    async with serving(replace(tiny_settings, queue_size=1000)) as (service, metrics):
        most = CACHES_AHEAD * service.info.kv_tokens // 128
        handles = [service.submit(request(max_new_tokens=125)) for _ in range(most)]
        with pytest.raises(QueueFull, match="KV cache"):
            service.submit(request(max_new_tokens=125))
        assert sample(metrics, "requests_rejected_total", reason="kv_tokens") == 1
        for handle in handles:
            handle.cancel()
        await asyncio.gather(*(collect(handle) for handle in handles))


async def test_a_handle_reports_pauses() -> None:
    handle = RequestHandle([request()], QueuePosition(0, 0.0), lambda: None, lambda name: None)
    silence = handle.outputs(0.001)
    assert [await anext(silence) for _ in range(3)] == [[], [], []]
    last = Output(handle.requests[0].request_id, finish=FinishReason.STOP)
    handle.deliver(last)
    assert [item async for items in silence for item in items] == [last]


async def test_draining_finishes_the_running_and_refuses_the_new(tiny_settings: Settings) -> None:
    async with serving(tiny_settings) as (service, _):
        answers = asyncio.gather(
            *(collect(service.submit(request(max_new_tokens=FOREVER))) for _ in range(2))
        )
        stopping = asyncio.create_task(service.stop())
        await until(lambda: service.state is ModelState.DRAINING)
        with pytest.raises(NotReady, match="draining"):
            service.submit(request())
        await stopping
        for outputs in await answers:
            assert outputs[-1].finish is FinishReason.LENGTH


async def test_a_request_that_does_not_finish_in_the_drain_timeout_is_cancelled(
    tiny_settings: Settings,
) -> None:
    async with serving(replace(tiny_settings, drain_timeout=0.0)) as (service, _):
        handle = service.submit(request(max_new_tokens=FOREVER))
        await service.stop()
        outputs = await asyncio.wait_for(collect(handle), 30)
        assert outputs[-1].finish is FinishReason.CANCELLED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_crash_of_the_engine_ends_all_requests_with_its_error(
    tiny_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    class BrokenError(Exception):
        pass

    def load(settings: Settings, report: object) -> Engine:
        engine = Engine.load(settings)

        def step() -> None:
            raise BrokenError("the fuse blew")

        engine.scheduler.step = step  # type: ignore[method-assign, assignment]
        return engine

    async with serving(tiny_settings, load) as (service, metrics):
        assert not service.crashed.is_set()
        handles = [service.submit(request()) for _ in range(5)]
        for outputs in await asyncio.gather(*(collect(handle) for handle in handles)):
            assert outputs[-1].finish is FinishReason.ERROR
            assert outputs[-1].error == "the fuse blew"
        assert service.state is ModelState.FAILED
        assert service.crashed.is_set()
        await until(lambda: not service.alive)
    assert sample(metrics, "requests_total", outcome="error") == 5
    (line,) = [record for record in caplog.records if record.message == "the engine ended"]
    # The id that the client knows comes before the slash; the step broke before any was taken.
    known = [handle.requests[0].request_id for handle in handles]
    logged = line.fields["running"] + line.fields["waiting"]  # type: ignore[attr-defined]
    assert logged
    assert set(logged) <= set(known)


async def test_a_model_that_cannot_be_loaded_is_a_line_without_a_traceback(
    tiny_settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(replace(tiny_settings, target="/nowhere")) as (service, metrics):
        assert service.state is ModelState.FAILED
        assert sample(metrics, "model_state", state="failed") == 1
        assert not service.crashed.is_set()  # a restart would not help
        with pytest.raises(NotReady, match="/nowhere"):
            service.submit(request())
    (line,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert line.message == "the model cannot be loaded"
    assert line.fields["reason"] == service.error  # type: ignore[attr-defined]
    assert line.exc_info is None


async def test_free_memory_goes_back_when_no_request_has_come_for_a_while(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back = asyncio.Event()
    monkeypatch.setattr(async_engine, "IDLE_SECONDS", 0.0)
    monkeypatch.setattr(async_engine, "give_back", given_back.set)
    async with serving(tiny_settings) as (service, _):
        await collect(service.submit(request()))
        await asyncio.wait_for(given_back.wait(), 30)


async def test_what_holds_the_interpreter_for_long_is_made_before_the_first_answer(
    tiny_settings: Settings,
) -> None:
    async with serving(tiny_settings, Engine.load) as (service, _):
        await collect(service.submit(request()))
        engine = service.engine
        assert engine.grammars.vocabulary._made is not None


@pytest.mark.skipif(sys.platform != "linux", reason="no priorities of threads")
async def test_the_engine_has_a_lower_priority_than_the_event_loop(tiny_settings: Settings) -> None:
    async with serving(tiny_settings):
        (computing,) = engine_threads()
        assert computing.native_id is not None
        own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        lower = os.getpriority(os.PRIO_PROCESS, computing.native_id)
        assert lower > own or own == 19  # nothing is lower


async def test_an_output_that_cannot_be_delivered_ends_its_request_alone(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_settings) as (service, metrics):
        handles = [service.submit(request(max_new_tokens=20)) for _ in range(3)]
        bad = handles[1].requests[0].request_id
        deliver = RequestHandle.deliver

        def fail(handle: RequestHandle, output: Output) -> None:
            if output.request_id == bad and not output.finish:
                raise RuntimeError("no way to the client")
            deliver(handle, output)

        monkeypatch.setattr(RequestHandle, "deliver", fail)
        answers = await asyncio.gather(*(collect(handle) for handle in handles))
        ends = [outputs[-1].finish for outputs in answers]
        assert ends == [FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH]
        assert sample(metrics, "callback_failures_total", where="engine") == 1
        await until(lambda: not service.running)  # the scheduler has dropped it, too
        assert (await collect(service.submit(request())))[-1].finish is FinishReason.LENGTH
        assert service.waiting == 0


@pytest.mark.parametrize("method", ["observe_step", "observe_finish", "observe_admitted"])
async def test_a_figure_that_cannot_be_counted_does_not_stop_the_service(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with serving(tiny_settings) as (service, metrics):

        def fail(*_: object) -> None:
            raise KeyError("a label")

        monkeypatch.setattr(metrics, method, fail)
        for _ in range(2):
            assert (await collect(service.submit(request())))[-1].finish is FinishReason.LENGTH
        monkeypatch.undo()
        assert sample(metrics, "callback_failures_total", where="engine") > 0
        assert (await collect(service.submit(request())))[-1].finish is FinishReason.LENGTH
        assert service.running == service.waiting == 0


async def test_a_loaded_model_that_cannot_be_taken_up_is_a_failed_one(
    tiny_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a label")

    monkeypatch.setattr(Metrics, "set_model", fail)
    async with serving(tiny_settings) as (service, metrics):
        assert service.state is ModelState.FAILED
        assert service.crashed.is_set()
        assert sample(metrics, "callback_failures_total", where="engine") == 1


@pytest.mark.parametrize(
    ("loads", "reason"), [(False, "the model is still loading"), (True, "a step takes long")]
)
async def test_an_end_that_cannot_wait_says_for_what(
    tiny_settings: Settings,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loads: bool,
    reason: str,
) -> None:
    free = threading.Event()

    def load(settings: Settings, report: object) -> Engine:
        if not loads:
            free.wait()
            raise OSError("too late")
        engine = Engine.load(settings)
        step = engine.scheduler.step

        def slow() -> Step:
            free.wait()
            return step()

        monkeypatch.setattr(engine.scheduler, "step", slow)
        return engine

    monkeypatch.setattr(async_engine, "JOIN_SECONDS", 0.01)
    service = AsyncEngine(replace(tiny_settings, drain_timeout=0.0), Metrics(), load)
    service.start()
    if loads:
        await until(lambda: service.state is ModelState.READY)
        service.submit(request())
    await service.stop()
    assert f"{reason}: leaving without waiting for it" in caplog.messages
    free.set()
    await until(lambda: not engine_threads())


def test_an_engine_that_outlives_the_event_loop_reports_to_nobody(tiny_settings: Settings) -> None:
    entered, free = threading.Event(), threading.Event()

    def load(settings: Settings, report: object) -> Engine:
        entered.set()
        free.wait()
        raise OSError("too late")

    service = AsyncEngine(tiny_settings, Metrics(), load)

    async def begin() -> None:
        service.start()
        entered.wait()

    asyncio.run(begin())
    (thread,) = engine_threads()
    free.set()
    thread.join(30)  # an exception of the thread would be a warning, and fail the test
    assert not thread.is_alive()
    assert service.state is ModelState.STARTING
