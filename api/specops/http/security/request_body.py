"""Limits the size of a request's body, and decompresses it.

The event loop parses and checks bodies, which takes time by their names, objects and lists rather
than by their bytes: 87,000 names, in 1 MB, take 0.1 s. So they are counted first, in at most 3 ms.
Other work by the parts of a large body is done on a thread.

Gzip, deflate and zstd are accepted. A few kilobytes can expand to gigabytes, and even without that
a kilobyte can take as long as a megabyte. So a body may expand only to the limit of uncompressed
bodies, and a separate thread decompresses it.
"""

import asyncio
import zlib
from concurrent.futures import Executor

from zstandard import ZstdCompressor, ZstdDecompressor, ZstdError

from specops.http.errors import ApiError
from specops.text.json_values import MAX_VALUES, TooManyParts, check_parts

MAX_BODY_BYTES = 1 << 20
MAX_BATCH_BYTES = 1 << 22
"""Of texts to embed, or their tokens: as many as OpenAI accepts in one request."""
MAX_BATCH_TOKENS = 300_000
_MAX_BATCH_VALUES = MAX_BATCH_TOKENS + (1 << 12)  # with the lists that hold them
LARGE_BODY_BYTES = 1 << 16
"""A larger body is rare: it has 16,000 tokens."""
_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's numbers
_ACCEPTED = "gzip, deflate, zstd"
_PIECE_BYTES = 4096  # small, as bytes after the end of a member are copied
_WINDOW_BYTES = 8 << 20  # the maximum that every zstd decoder supports (RFC 8878)
_END = b"\0"  # not in any JSON
_LAST_FRAME = ZstdCompressor().compress(_END)
_CM_DEFLATE = 8  # the lower half of the first byte of zlib's form


def refuse_complex(body: bytes | bytearray, most_bytes: int) -> None:
    """Refuse a body with too many parts, whatever its media type.

    Args:
        body: the body.
        most_bytes: maximum bytes of a body of its endpoint.

    Raises:
        ApiError: there are too many.
    """
    values = MAX_VALUES if most_bytes == MAX_BODY_BYTES else _MAX_BATCH_VALUES
    try:
        check_parts(body, values)
    except TooManyParts as error:
        raise ApiError(413, f"the body has {error}", code="body_too_large") from None


def body_encoding(header: str | None) -> str | None:
    """Return how a body is compressed; None if it is not.

    Args:
        header: the request's `Content-Encoding`.

    Raises:
        ApiError: this server does not support that encoding.
    """
    encoding = (header or "identity").strip().lower()
    if encoding == "identity":
        return None
    if encoding.removeprefix("x-") not in _ACCEPTED.split(", "):
        raise ApiError(
            415,
            f"this server does not read the content encoding {encoding[:64]!r}: send the body "
            "uncompressed, or compressed with gzip, deflate or zstd",
            code="unsupported_encoding",
            headers={"accept-encoding": _ACCEPTED},
        )
    return encoding.removeprefix("x-")


async def decompressed(
    body: bytearray, encoding: str, most_bytes: int, thread: Executor
) -> bytearray:
    """Return a body decompressed.

    Args:
        body: the body as sent.
        encoding: the result of `body_encoding`.
        most_bytes: maximum bytes of the result.
        thread: does the work.

    Raises:
        ApiError: the result is too large, or the body is not compressed with that encoding.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(thread, _decompress, body, encoding, most_bytes)


def _decompress(body: bytearray, encoding: str, most: int) -> bytearray:
    try:
        text = _unzstd(body, most) if encoding == "zstd" else _inflate(body, encoding, most)
    except (zlib.error, ZstdError, EOFError):
        message = f"the body is not valid {encoding}, though Content-Encoding says so"
        raise ApiError(400, message, code="invalid_encoding") from None
    if len(text) > most:
        message = f"the body is larger than {most} bytes once it is decompressed"
        raise ApiError(413, message, code="body_too_large")
    return text


def _inflate(body: bytearray, encoding: str, most: int) -> bytearray:
    """Decompress gzip, which may have several members, or deflate."""
    window = _GZIP if encoding == "gzip" else _ZLIB if _in_zlibs_form(body) else _RAW
    text, inflater = bytearray(), zlib.decompressobj(window)
    for start in range(0, len(body), _PIECE_BYTES):
        piece = bytes(body[start : start + _PIECE_BYTES])
        while piece and len(text) <= most:
            if inflater.eof:
                if window != _GZIP:
                    raise EOFError
                inflater = zlib.decompressobj(window)
            text += inflater.decompress(piece, most + 1 - len(text))
            piece = inflater.unused_data
    if not inflater.eof and len(text) <= most:
        raise EOFError
    return text


def _unzstd(body: bytearray, most: int) -> bytearray:
    """Decompress zstd; an added frame shows whether the body was complete, as readers do not."""
    source = bytes(body) + _LAST_FRAME
    with ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(
        source, read_across_frames=True
    ) as reader:
        text = bytearray(reader.read(most + 1 + len(_END)))
    if len(text) <= most + len(_END) and not text.endswith(_END):
        raise EOFError
    return text[: -len(_END)]


def _in_zlibs_form(body: bytearray) -> bool:
    return body[:1] != b"" and body[0] & 15 == _CM_DEFLATE and int.from_bytes(body[:2]) % 31 == 0
