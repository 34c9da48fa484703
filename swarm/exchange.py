"""Blobs between peers, over libp2p streams; the rules are in protocols/transfer.py.

    asker   -> frame(BlobRequest)
    holder  -> frame(BlobReply: found, size, hashes), then the chunks asked for, back to back

A frame is a uint32 little-endian length and a message. Chunk sizes follow from the blob's size, so chunks
need no frame of their own.
"""

import asyncio
import logging
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import BinaryIO

from protocols import PROTOCOL
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.messages import (
    UNARY_BYTES_MAX,
    BlobRef,
    BlobReply,
    BlobRequest,
    decode_blob_reply,
    decode_blob_request,
    encode,
)
from protocols.transfer import CHUNK_BYTES, Download, Want, served_range
from swarm.blobs import BlobStore
from swarm.host import Host

log = logging.getLogger(__name__)

BLOB_PROTOCOL = f"/{PROTOCOL}/blob"
STALL_S = 5.0  # no byte for this long is a stall (FIELD: Parallax, Psyche)
CHUNK_S = 30.0  # for one chunk: 9 KB/s, slower than any link worth waiting for
CHECKED_AT_ONCE = 4  # chunks hashed on a thread while the next ones arrive; one each would cost more than it saves
LIED_S = 600.0  # how long a source that sent wrong bytes is asked last
FAILED_S = 15.0  # the same for one that stalled, closed or had nothing: it may only have been busy
SHUNNED_MAX = 1024
UPLOADS_MAX = 32  # at once; 8 MiB of chunks in memory at most

Chunk = tuple[int, bytes]
"""Index and bytes."""


@dataclass(slots=True)
class Exchange:
    """Serves a peer's blobs and fetches those it lacks."""

    host: Host
    blobs: BlobStore
    received_bytes: int = 0
    sent_bytes: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    _uploads: int = 0
    _shunned_until: dict[str, float] = field(default_factory=dict)

    async def start(self) -> None:
        """Begin to serve."""
        await self.host.serve_stream(BLOB_PROTOCOL, self._serve)

    async def fetch(self, ref: BlobRef, sources: Iterable[str]) -> tuple[bytes, str]:
        """The verified blob, stored, and the source that finished it. Sources are asked in the order given.

        A source that stalls, lies or lacks the blob is left for the next; verified chunks stay. Raises
        TransportFault 'no source' when none is left, PeerFault for a blob that is too large, OSError for a full disk.
        """
        here = await asyncio.to_thread(self.blobs.get, ref.root)
        if here is not None:
            return here, "disk"
        download = Download(ref)
        tried: list[str] = []
        for source in self._trusted_first(sources):
            try:
                await self._fetch_from(download, source)
            except PeerFault as fault:
                self.refusals[fault.reason] += 1
                self._shun(source, LIED_S)
                tried.append(f"{short(source)}: {fault}")
                log.warning("blob %s: %s sent %s", ref.root.hex()[:12], short(source), fault)
            except (TransportFault, OSError, asyncio.IncompleteReadError) as error:
                self._shun(source, FAILED_S)
                tried.append(f"{short(source)}: {str(error) or 'closed'}")
            if download.done:
                blob = download.blob()
                await asyncio.to_thread(self.blobs.put_verified, blob, download.hashes)
                return blob, source
        raise TransportFault("no source", f"blob {ref.root.hex()[:12]}: {'; '.join(tried) or 'nobody to ask'}")

    def _trusted_first(self, sources: Iterable[str]) -> list[str]:
        """In the order given, those that failed or lied lately last: they are better than nobody."""
        now_s = time.monotonic()
        return sorted(sources, key=lambda source: self._shunned_until.get(source, 0.0) > now_s)

    def _shun(self, source: str, for_s: float) -> None:
        self._shunned_until[source] = time.monotonic() + for_s
        while len(self._shunned_until) > SHUNNED_MAX:
            del self._shunned_until[next(iter(self._shunned_until))]

    async def _fetch_from(self, download: Download, source: str) -> None:
        async with self._stream(source) as (reader, writer):
            while (want := download.want()) is not None:
                request = BlobRequest(download.ref.root, want.first, want.count, want.hashes)
                writer.write(_frame(encode(request)))
                await writer.drain()
                await self._receive(download, want, reader)

    async def _receive(self, download: Download, want: Want, reader: asyncio.StreamReader) -> None:
        reply = decode_blob_reply(await _patient(_read_frame(reader)))
        if not reply.found:
            raise TransportFault("gone")
        if want.hashes:
            download.take_hashes(reply.size, reply.hashes)
        end = want.first + want.count
        arrived: list[Chunk] = []
        failures: list[BaseException] = []
        for first in range(want.first, end, CHECKED_AT_ONCE):
            ahead, coming = range(first, min(first + CHECKED_AT_ONCE, end)), list[Chunk]()
            outcomes = await asyncio.gather(
                self._read_chunks(download, ahead, reader, coming),
                asyncio.to_thread(_check, download, arrived),
                return_exceptions=True,
            )
            arrived, failures = coming, [each for each in outcomes if each is not None]
            if failures:
                break
        await asyncio.to_thread(_check, download, arrived)  # what came before a source failed is kept, if it is good
        for failure in failures:
            raise failure

    async def _read_chunks(
        self, download: Download, indexes: Sequence[int], reader: asyncio.StreamReader, into: list[Chunk]
    ) -> None:
        for index in indexes:
            data = await _read_chunk(reader, download.chunk_size(index))
            self.received_bytes += len(data)
            into.append((index, data))

    @asynccontextmanager
    async def _stream(self, source: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await self.host.open_stream(source, BLOB_PROTOCOL, STALL_S)
        try:
            yield reader, writer
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        if self._uploads >= UPLOADS_MAX:
            raise PeerFault("too many uploads")
        self._uploads += 1
        try:
            while True:
                try:
                    async with asyncio.timeout(STALL_S):  # askers ask at once; an idle one holds no slot
                        raw = await _read_frame(reader)
                except (asyncio.IncompleteReadError, TimeoutError):
                    return
                await self._answer(decode_blob_request(raw), writer)
        finally:
            self._uploads -= 1

    async def _answer(self, request: BlobRequest, writer: asyncio.StreamWriter) -> None:
        info = self.blobs.info(request.root)
        try:
            file = info.path.open("rb") if info is not None else None
        except FileNotFoundError:
            file = None
        if info is None or file is None:
            writer.write(_frame(encode(BlobReply(False))))
            return
        with file:  # open files are read to their end even when the blob is removed meanwhile
            writer.write(_frame(encode(BlobReply(True, info.size, info.hashes if request.hashes else b""))))
            await self._send_chunks(served_range(info.size, request.first, request.count), file, writer)

    async def _send_chunks(self, indexes: Sequence[int], file: BinaryIO, writer: asyncio.StreamWriter) -> None:
        if indexes:
            file.seek(indexes[0] * CHUNK_BYTES)
        for _ in indexes:
            data = file.read(CHUNK_BYTES)
            if not data:
                raise OSError("the file was cut short meanwhile")
            writer.write(data)
            self.sent_bytes += len(data)
            async with asyncio.timeout(CHUNK_S):
                await writer.drain()


def _check(download: Download, chunks: Sequence[Chunk]) -> None:
    for index, data in chunks:
        download.take_chunk(index, data)


async def _read_chunk(reader: asyncio.StreamReader, size: int) -> bytes:
    """`size` bytes. Raises TransportFault 'stalled' or 'slow', IncompleteReadError when the source closes early."""
    pieces: list[bytes] = []
    try:
        async with asyncio.timeout(CHUNK_S):
            while size > 0:
                piece = await _patient(reader.read(size))
                if not piece:
                    raise asyncio.IncompleteReadError(b"", size)
                pieces.append(piece)
                size -= len(piece)
    except TimeoutError as error:
        raise TransportFault("slow", f"no chunk in {CHUNK_S:g} s") from error
    return b"".join(pieces)


async def _patient(read: Awaitable[bytes]) -> bytes:
    try:
        async with asyncio.timeout(STALL_S):
            return await read
    except TimeoutError as error:
        raise TransportFault("stalled", f"no byte for {STALL_S:g} s") from error


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    if length > UNARY_BYTES_MAX:
        raise PeerFault("frame too large", f"{length} bytes")
    return await reader.readexactly(length)
