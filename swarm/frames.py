"""Messages and chunks on a byte stream: a frame is a uint32 little-endian length and a message.

A chunk has no frame: its size follows from the blob's.
"""

import asyncio
import struct
from collections.abc import Callable

from msgspec import Struct

from protocols import PROTOCOL
from protocols.faults import PeerFault
from protocols.messages import UNARY_BYTES_MAX, encode

BLOB_PROTOCOL = f"/{PROTOCOL}/blob"


def frame(message: Struct) -> bytes:
    """A message as it is written."""
    body = encode(message)
    return struct.pack("<I", len(body)) + body


def write(writer: asyncio.StreamWriter, *parts: bytes) -> None:
    """Write to a stream. Raises ConnectionResetError when it is closed; uvloop's own error is a RuntimeError."""
    if writer.is_closing():
        raise ConnectionResetError("closed")
    try:
        for part in parts:
            writer.write(part)
    except RuntimeError as error:
        raise ConnectionResetError("closed") from error


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next message's bytes. Raises PeerFault for one that is too large, IncompleteReadError at the end."""
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    if length > UNARY_BYTES_MAX:
        raise PeerFault("frame too large", f"{length} bytes")
    return await reader.readexactly(length)


async def read_bytes(reader: asyncio.StreamReader, size: int, on_bytes: Callable[[int], None]) -> bytes:
    """`size` bytes; `on_bytes` is told of each piece as it comes. Raises IncompleteReadError at the end."""
    pieces: list[bytes] = []
    while size > 0:
        piece = await reader.read(size)
        if not piece:
            raise asyncio.IncompleteReadError(b"".join(pieces), size)
        on_bytes(len(piece))
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)
