"""Keeps the newest items of /v1/responses in memory, for clients that send references to them.

OpenAI's service stores answers, so clients may send an `item_reference` with the id of the
assistant's earlier text, reasoning or call; the Vercel AI SDK does so unless it sends `store:
false`. This service stores nothing, but keeps new items for as long as a conversation with tools
takes; a reference to an older one is left out and named.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from specops.text.json_values import dumps

MAX_BYTES = 1 << 21
"""Maximum of all items together, which are some thousands."""


class RecentItems:
    """Items by client and id. The least recently used ones make room for new ones.

    Args:
        most_bytes: maximum bytes of the items' JSON.
    """

    def __init__(self, most_bytes: int = MAX_BYTES) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._items: OrderedDict[tuple[str, str], bytes] = OrderedDict()
        self._lock = threading.Lock()  # long answers are written, and read, on threads

    def keep(self, client: str, items: Iterable[Mapping[str, Any]]) -> None:
        """Keep a client's items under their ids."""
        with self._lock:
            for item in items:
                text = dumps(item)
                self._bytes += len(text) - len(self._items.pop((client, item["id"]), b""))
                self._items[client, item["id"]] = text
            while self._bytes > self._most_bytes:
                self._bytes -= len(self._items.popitem(last=False)[1])

    def get(self, client: str, ids: Iterable[str]) -> dict[str, bytes]:
        """Return the JSON of a client's items, by id, without those that are no longer kept.

        A request may refer to all items, which take long to parse: the caller sees their size.
        """
        kept = {}
        with self._lock:
            for item_id in ids:
                if (text := self._items.get((client, item_id))) is not None:
                    self._items.move_to_end((client, item_id))
                    kept[item_id] = text
        return kept
