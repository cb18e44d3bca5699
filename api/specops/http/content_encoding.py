"""Bodies that clients compress: gzip and deflate are read, within the limit of any other body.

A few kilobytes can stand for gigabytes, and even without that a kilobyte can take as long as a
megabyte. So no more is made of a body than may be sent as it is, and a thread of its own makes it.
"""

from __future__ import annotations

import asyncio
import zlib
from concurrent.futures import ThreadPoolExecutor

from specops.http.errors import ApiError

_GZIP, _ZLIB, _RAW = 31, 15, -15  # zlib's numbers
_READ = {"gzip": _GZIP, "x-gzip": _GZIP, "deflate": _ZLIB}
_ACCEPTED = "gzip, deflate"
# One thread: zlib lets the interpreter go meanwhile, but it takes a core.
_INFLATER = ThreadPoolExecutor(1, "inflate")
_CM_DEFLATE = 8  # the lower half of the first byte of zlib's form


def body_encoding(header: str | None) -> str | None:
    """Return how a body is compressed; None if it is not.

    Args:
        header: the request's `Content-Encoding`.

    Raises:
        ApiError: this server does not read that.
    """
    encoding = (header or "identity").strip().lower()
    if encoding == "identity":
        return None
    if encoding not in _READ:
        raise ApiError(
            415,
            f"this server does not read the content encoding {encoding[:64]!r}: send the body as "
            "it is, or compressed with gzip or deflate",
            code="unsupported_encoding",
            headers={"accept-encoding": _ACCEPTED},
        )
    return encoding


async def decompressed(body: bytearray, encoding: str, most_bytes: int) -> bytearray:
    """Return a compressed body as it was.

    Args:
        encoding: as `body_encoding` returns it.
        most_bytes: that it may have.

    Raises:
        ApiError: it has more, or is not compressed like that.
    """
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_INFLATER, _inflate, body, encoding, most_bytes)


def _inflate(body: bytearray, encoding: str, most_bytes: int) -> bytearray:
    window = _READ[encoding]
    if window == _ZLIB and not _in_zlibs_form(body):
        window = _RAW  # which some clients call deflate, too
    inflater = zlib.decompressobj(window)
    try:
        text = inflater.decompress(body, most_bytes + 1)
    except zlib.error:
        raise _broken(encoding) from None
    if len(text) > most_bytes:
        message = f"the body is larger than {most_bytes} bytes once it is decompressed"
        raise ApiError(413, message, code="body_too_large")
    if not inflater.eof or inflater.unused_data:
        raise _broken(encoding)
    return bytearray(text)


def _in_zlibs_form(body: bytearray) -> bool:
    return body[:1] != b"" and body[0] & 15 == _CM_DEFLATE and int.from_bytes(body[:2]) % 31 == 0


def _broken(encoding: str) -> ApiError:
    message = f"the body is not valid {encoding}, though Content-Encoding says so"
    return ApiError(400, message, code="invalid_encoding")
