"""The client of all loads: what it sends, and how it says that an answer ended."""

import asyncio
import socket
import threading
from typing import ClassVar

import pytest

from bench.serving.load import Answer, Ask, Script, burst, figure, follow, metric, once, span
from tests.loopback import HOST, Handler, listening
from tests.waiting import PATIENCE

OK = "HTTP/1.1 200 OK\r\n"
STREAM = "content-type: text/event-stream\r\n"
EVENT, LATE = 'data: {"a": 1}\n\n', 'data: {"error": {"code": "timeout"}}\n\n'
DONE = "data: [DONE]\n\n"
END = "0\r\n\r\n"


def chunked(*parts: str) -> str:
    chunks = "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts)
    return f"{OK}{STREAM}transfer-encoding: chunked\r\n\r\n{chunks}"


def answer_to(sent: str) -> Answer:
    """What the client makes of a server that sends this and closes the connection."""
    with socket.create_server((HOST, 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(sent.encode())

        thread = threading.Thread(target=serve)
        thread.start()
        answer = asyncio.run(once(listener.getsockname()[1], Ask("/a", {})))
        thread.join()
        return answer


@pytest.mark.parametrize(
    ("sent", "outcome", "complete", "events"),
    [
        (OK + 'content-length: 8\r\n\r\n{"a": 1}', 200, True, [{"a": 1}]),
        (OK + '\r\n{"a": 1}', 200, True, [{"a": 1}]),  # its end is the connection's
        (f"{OK}{STREAM}\r\n{EVENT}{DONE}", 200, True, [{"a": 1}]),
        (chunked(EVENT[:5], EVENT[5:] + DONE) + END, 200, True, [{"a": 1}]),
        (chunked(EVENT) + END, 0, False, [{"a": 1}]),  # without its mark
        (chunked(EVENT), 0, False, [{"a": 1}]),  # in the middle of the chunks
        (chunked(EVENT, LATE) + END, 504, False, None),
        ("HTTP/1.1 429 Later\r\nretry-after: 3\r\n\r\n{}", 429, False, [{}]),
        (OK + 'content-length: 9\r\n\r\n{"a"', 0, False, None),
        ("", 0, False, None),
    ],
)
def test_an_answer_is_complete_or_says_how_it_ended(
    sent: str, outcome: int, complete: bool, events: list[object] | None
) -> None:
    answer = answer_to(sent)
    assert (answer.outcome, answer.complete) == (outcome, complete)
    assert bool(answer.status) == bool(sent)
    assert bool(answer.problem) == (not answer.whole)
    assert events is None or answer.events == events
    if outcome == 429:
        assert answer.retry_after == 3


class Echo(Handler):
    """Answers with the request's body when so many requests are there."""

    together = threading.Barrier(1)
    clients: ClassVar[set[object]]

    def do_POST(self) -> None:
        self.clients.add(self.client_address)
        body = self.body()
        self.together.wait(PATIENCE)
        self.reply(200, body)


def test_a_burst_comes_at_once() -> None:
    class Five(Echo):
        together = threading.Barrier(5)
        clients: ClassVar[set[object]] = set()

    with listening(Five) as port:
        answers = asyncio.run(burst(port, [Ask("/", {"n": n}) for n in range(5)]))
    assert [answer.events for answer in answers] == [[{"n": n}] for n in range(5)]
    assert 0 < max(answer.seconds for answer in answers) <= span(answers)
    assert len(Five.clients) == 5


def test_a_script_hears_each_answer_and_keeps_its_connection() -> None:
    class One(Echo):
        clients: ClassVar[set[object]] = set()

    heard = []

    def counting() -> Script:
        for number in range(3):
            answer = yield Ask("/", {"n": number})
            heard.extend(answer.events)

    with listening(One) as port:
        asyncio.run(follow(port, counting()))
    assert heard == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert len(One.clients) == 1


@pytest.mark.parametrize(("lines", "seen"), [(0, b""), (1, b"a\n")])
def test_a_client_leaves_after_so_many_lines(lines: int, seen: bytes) -> None:
    left = threading.Event()

    class Slow(Handler):
        def do_GET(self) -> None:
            self.close_connection = True
            try:
                self.wfile.write(b"HTTP/1.1 200 OK\r\n\r\na\n")
                self.rfile.read(1)  # until the client has left
            finally:
                left.set()

    with listening(Slow) as port:
        answer = asyncio.run(once(port, Ask("/"), lines))
        assert left.wait(PATIENCE)
    assert (answer.body, answer.whole) == (seen, False)


def test_a_metric_is_the_sum_over_its_labels() -> None:
    page = '# TYPE a counter\na{x="1"} 2\na{x="2"} 3\nab 4\n'
    assert (figure(page, "a"), figure(page, "a", 'x="2"'), figure(page, "b")) == (5, 3, 0)

    class Page(Handler):
        def do_GET(self) -> None:
            self.reply(200, page.encode())

    with listening(Page) as port:
        assert asyncio.run(metric(port, "ab")) == 4
        with pytest.raises(LookupError, match="no metric c"):
            asyncio.run(metric(port, "c"))
    with pytest.raises(ConnectionError):
        asyncio.run(metric(port, "ab"))
    nobody = asyncio.run(once(port, Ask("/")))
    assert (nobody.status, nobody.outcome, nobody.seconds < 60) == (0, 0, True)
