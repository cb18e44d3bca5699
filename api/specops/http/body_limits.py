"""What is large about a body: its bytes, or the parts of its JSON.

The event loop has to parse and to check a body, which takes time by the names, objects and lists in
it rather than by its bytes: 87,000 names, in 1 MB, take 0.1 s. So they are counted first, which
takes at most 3 ms. What else takes time by the parts of a large body is done on a thread.
"""

from __future__ import annotations

from specops.http.errors import ApiError
from specops.text.json_values import TooManyParts, check_parts

LARGE_BODY_BYTES = 1 << 16
"""A larger body is rare: it has 16,000 tokens."""


def refuse_complex(body: bytes | bytearray) -> None:
    """Refuse a body with too many parts, whatever it claims to be.

    Raises:
        ApiError: there are too many.
    """
    try:
        check_parts(body)
    except TooManyParts as error:
        raise ApiError(413, f"the body has {error}", code="body_too_large") from None
