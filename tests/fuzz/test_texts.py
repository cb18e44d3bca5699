"""Long texts reach every endpoint that encodes one; `make fuzz ARGS="--only texts"` sends them."""

import json

from specops.http.protocols import PROTOCOLS
from specops.http.security.request_body import MAX_BODY_BYTES
from tests.fuzz import texts


def test_every_endpoint_with_a_prompt_gets_long_texts() -> None:
    assert PROTOCOLS.prompts.keys() <= texts._BODIES.keys()
    asked = [texts.request(seed, "model")[0] for seed in range(400)]
    assert {ask.path for ask in asked} == texts._BODIES.keys()
    assert max(len(ask.content()) for ask in asked) > MAX_BODY_BYTES  # some are refused unread
    whole = [ask for ask in asked if isinstance(ask.body, bytes) and len(ask.body) < MAX_BODY_BYTES]
    assert all(json.loads(ask.body)["model"] == "model" for ask in whole)  # type: ignore[arg-type]
