"""What is played of a typing trace, and what becomes of the requests."""

import asyncio
import json
from collections import Counter
from itertools import pairwise

import pytest

from bench.editor import editor
from bench.editor.replay import PAUSE_SECONDS, TOKENS, Played, Stroke, play, strokes
from loadtest.editor_trace import trace
from tests.stack.support import ROOT

FILES = {name: (ROOT / name).read_text(encoding="utf-8") for name in editor.FILES}
BODY = {"input_prefix": "a\n", "input_suffix": "", "prompt": "b"}


def test_all_that_decides_what_is_cached_is_played_and_most_keys_are_not() -> None:
    events = [*trace(FILES, 240, seed=1)]
    played = [*strokes(events)]
    kinds, all_kinds = Counter(one.kind for one in played), Counter(one.kind for one in events)
    assert (kinds["jump"], kinds["warm"]) == (all_kinds["jump"], all_kinds["warm"])
    seen = [one.body["input_prefix"] for one in played if one.kind in ("jump", "new line")]
    assert {*seen} == {one.body["input_prefix"] for one in events if one.kind != "warm"}
    assert 2 * kinds["line"] >= kinds["hasty"] > kinds["line"] > kinds["jump"]
    for one, following in pairwise(played):
        assert (one.gap or 0) < PAUSE_SECONDS
        assert (one.gap is not None) == (one.kind == "hasty")
        assert one.kind != "hasty" or following.kind in ("hasty", "line")


@pytest.mark.anyio
async def test_the_next_key_drops_the_connection_of_the_one_before() -> None:
    left = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].split()[0])
        body = json.loads(await reader.readexactly(size))
        if body["prompt"] == "never":
            assert await reader.read() == b""
            left.set()
        else:
            assert left.is_set()
            told = {"timings": {"prompt_n": 3, "predicted_n": body["n_predict"]}}
            data = json.dumps(told).encode()
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        hasty, line = Stroke("hasty", BODY | {"prompt": "never"}, 0.01), Stroke("line", BODY)
        played = await play(server.sockets[0].getsockname()[1], [hasty, line])
    assert (played.hasty, played.cancelled, played.read) == (1, 1, {"line": [3]})
    assert len(played.seconds["line"]) == 1


def test_the_table_has_a_row_for_each_kind_and_the_targets() -> None:
    name, kinds = "Qwen/Qwen2.5-Coder-0.5B", ("line", "jump")
    sides = {
        side: Played({kind: [factor * 0.3] for kind in kinds}, {kind: [TOKENS] for kind in kinds})
        for side, factor in ((editor.OURS, 1.0), (editor.WITH_CHATS, 2.5), (editor.LLAMA, 2.0))
    }
    found = editor.outcome(editor.QUICK, {name: sides})
    rows = [(row[0], row[4]) for row in found.tables[0].rows]
    assert rows == [("Coder-0.5B, line", "2.00"), ("Coder-0.5B, jump", "2.00")]
    assert [target.met for target in found.targets] == [True, False, True] * 2
    json.dumps(found.result)
