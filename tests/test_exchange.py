"""Blobs between hosts: sources that cut, lie, stall or go, and what a disk does (cases B26, B27, B30, B31)."""

import asyncio
import itertools
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import swarm.exchange
from protocols.faults import PeerFault, TransportFault
from protocols.messages import BlobRef, BlobReply, decode_blob_request, encode
from protocols.transfer import CHUNK_BYTES, blob_ref, chunk_hashes
from swarm.blobs import BlobStore
from swarm.exchange import BLOB_PROTOCOL, UPLOADS_MAX, Exchange
from tests.hosts import hosts, until

pytestmark = pytest.mark.network

BLOB = random.Random(1).randbytes(4 * CHUNK_BYTES + 1000)
OLDER = random.Random(2).randbytes(4 * CHUNK_BYTES + 1000)
REF = blob_ref(BLOB)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]]


@asynccontextmanager
async def exchanges(folder: Path, count: int) -> AsyncIterator[list[Exchange]]:
    """Linked hosts with a blob store each; the first one asks, the second holds BLOB, the others are the test's."""
    async with hosts(folder, count) as linked:
        pairs = itertools.combinations(linked, 2)  # each with each: finding a way takes p2pd a moment
        await asyncio.gather(*(one.connect(other.addresses[0], 10.0) for one, other in pairs))
        made = [Exchange(host, BlobStore(folder / f"blobs{number}")) for number, host in enumerate(linked)]
        await made[1].start()
        made[1].blobs.put(BLOB)
        yield made


def frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


async def asked(reader: asyncio.StreamReader) -> None:
    (length,) = struct.unpack("<I", await reader.readexactly(4))
    decode_blob_request(await reader.readexactly(length))


def sends(head: bytes, body: bytes, hold: bool = False) -> Handler:
    """A source that answers with these bytes and then closes, or says nothing more."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        await asked(reader)
        writer.write(head + body)
        await writer.drain()
        if hold:
            await reader.read()

    return handler


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
    """A source that closes at once."""


def flipped(blob: bytes, at: int) -> bytes:
    return blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]


GOOD = frame(encode(BlobReply(True, len(BLOB), chunk_hashes(BLOB))))
OLD = frame(encode(BlobReply(True, len(OLDER), chunk_hashes(OLDER))))
WRONG_SIZE = frame(encode(BlobReply(True, 10, chunk_hashes(BLOB))))
CASES = {
    # name: (source, its refusal, whole chunks of it that are good and come first)
    "cut at 10 %": (sends(GOOD, BLOB[: len(BLOB) // 10]), None, 0),
    "cut at 99.9 %": (sends(GOOD, BLOB[: len(BLOB) * 999 // 1000]), None, 3),
    "one bit flipped": (sends(GOOD, flipped(BLOB, 2 * CHUNK_BYTES + 7)), "wrong chunk", 2),
    "an older valid blob": (sends(OLD, OLDER), "wrong blob", 0),
    "right list, older bytes": (sends(GOOD, OLDER), "wrong chunk", 0),
    "wrong size": (sends(WRONG_SIZE, BLOB), "wrong blob", 0),
    "no byte": (sends(b"", b"", hold=True), None, 0),
    "stalls half way": (sends(GOOD, BLOB[: 2 * CHUNK_BYTES + 10], hold=True), None, 2),
    "closes at once": (closes, None, 0),
    "garbage": (sends(frame(b"\xc1garbage"), b""), "malformed blob reply", 0),
    "a huge frame": (sends(struct.pack("<I", 2**32 - 1), b""), "frame too large", 0),
    "nested arrays": (sends(frame(b"\x91" * 200_000), b""), "malformed blob reply", 0),
    "gone": (sends(frame(encode(BlobReply(False))), b""), None, 0),
}


@pytest.mark.parametrize("name", CASES)
async def test_b30_a_source_that_fails_is_left_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    # Goal: every way to serve a blob badly ends at the next source; what was verified is not fetched again, and
    # nothing that was not verified ever gets its name on the disk.
    monkeypatch.setattr(swarm.exchange, "STALL_S", 0.5)
    source, reason, kept = CASES[name]
    async with exchanges(tmp_path, 3) as (asker, holder, bad):
        await bad.host.serve_stream(BLOB_PROTOCOL, source)
        with pytest.raises(TransportFault) as alone:
            await asker.fetch(REF, [bad.host.peer_id])
        assert alone.value.code == "no source"
        assert list(asker.blobs.folder.iterdir()) == []
        assert dict(asker.refusals) == ({} if reason is None else {reason: 1})

        asker = Exchange(asker.host, asker.blobs)  # one that has not met the bad source yet
        async with asyncio.timeout(5.0):
            blob, last = await asker.fetch(REF, [bad.host.peer_id, holder.host.peer_id])
        assert (blob, last) == (BLOB, holder.host.peer_id)
        assert [path.name for path in asker.blobs.folder.iterdir()] == [REF.root.hex()]
        assert holder.sent_bytes <= len(BLOB) - kept * CHUNK_BYTES
        assert dict(asker.refusals) == ({} if reason is None else {reason: 1})


async def test_a_slow_source_is_not_a_stalled_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A chunk may take many times STALL_S as long as bytes come; a home's uplink needs seconds for one.
    monkeypatch.setattr(swarm.exchange, "STALL_S", 0.4)

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        await asked(reader)
        whole = GOOD + BLOB
        for at in range(0, len(whole), 64 * 1024):
            writer.write(whole[at : at + 64 * 1024])
            await writer.drain()
            await asyncio.sleep(0.15)

    async with exchanges(tmp_path, 3) as (asker, _, source):
        await source.host.serve_stream(BLOB_PROTOCOL, slow)
        assert (await asker.fetch(REF, [source.host.peer_id]))[0] == BLOB


async def test_b27_a_source_that_drips_is_dropped_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swarm.exchange, "CHUNK_S", 1.0)

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        await asked(reader)
        writer.write(GOOD)
        for at in range(1000):
            writer.write(BLOB[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.05)

    async with exchanges(tmp_path, 3) as (asker, holder, source):
        await source.host.serve_stream(BLOB_PROTOCOL, drips)
        async with asyncio.timeout(4.0):
            blob, last = await asker.fetch(REF, [source.host.peer_id, holder.host.peer_id])
        assert (blob, last) == (BLOB, holder.host.peer_id)


async def test_b26_a_holder_serves_while_the_first_source_is_gone(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 3) as (asker, holder, other):
        await other.start()
        await other.fetch(REF, [holder.host.peer_id])
        await holder.host.close()
        async with asyncio.timeout(8.0):
            blob, last = await asker.fetch(REF, [holder.host.peer_id, other.host.peer_id])
        assert (blob, last) == (BLOB, other.host.peer_id)


async def test_b31_a_blob_removed_while_it_is_read_is_read_to_its_end_and_then_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        info, real = holder.blobs.info(REF.root), holder._send_chunks

        async def removed_meanwhile(*arguments: Any) -> None:
            holder.blobs.remove(REF.root)
            await real(*arguments)

        monkeypatch.setattr(Exchange, "_send_chunks", lambda self, *arguments: removed_meanwhile(*arguments))
        assert info is not None
        assert (await asker.fetch(REF, [holder.host.peer_id]))[0] == BLOB
        assert not info.path.exists()

        asker.blobs.remove(REF.root)
        with pytest.raises(TransportFault, match="gone") as fault:
            await asker.fetch(REF, [holder.host.peer_id])
        assert fault.value.code == "no source"
        assert holder.host.refusals.total() == 0


@pytest.mark.parametrize("known", [True, False], ids=["after it was served once", "never served"])
@pytest.mark.parametrize("damage", ["bit", "cut"])
async def test_b30_a_damaged_file_is_not_served(tmp_path: Path, known: bool, damage: str) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        if not known:
            holder.blobs = BlobStore(holder.blobs.folder)
        path = holder.blobs.path(REF.root)
        whole = path.read_bytes()
        path.write_bytes(flipped(whole, CHUNK_BYTES + 5) if damage == "bit" else whole[: CHUNK_BYTES + 5])
        async with asyncio.timeout(4.0):
            with pytest.raises(TransportFault, match="no source"):
                await asker.fetch(REF, [holder.host.peer_id])
        assert asker.refusals == {}, "an honest source does not lie because its disk does"
        assert not path.exists()
        assert holder.blobs.info(REF.root) is None


async def test_a_blob_over_the_limit_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        with pytest.raises(PeerFault, match="too large"):
            await asker.fetch(BlobRef(bytes(32), 2**47), [holder.host.peer_id])
        assert holder.sent_bytes == 0


async def test_uploads_are_bounded_and_an_idle_asker_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.exchange, "STALL_S", 0.2)
    monkeypatch.setattr(swarm.exchange, "UPLOADS_MAX", 3)
    assert UPLOADS_MAX > 3
    async with exchanges(tmp_path, 3) as (asker, holder, idler):
        streams = [await idler.host.open_stream(holder.host.peer_id, BLOB_PROTOCOL) for _ in range(3)]
        for _, writer in streams:
            writer.write(b"\x01")
        await until(lambda: holder._uploads == 3)
        with pytest.raises(TransportFault, match="no source"):
            await asker.fetch(REF, [holder.host.peer_id])
        assert holder.host.refusals["too many uploads"] == 1
        await until(lambda: holder._uploads == 0)
        assert (await asker.fetch(REF, [holder.host.peer_id]))[0] == BLOB


async def test_b35_a_full_disk_raises_and_leaves_nothing_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        real = swarm.files.os.fsync

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("swarm.files.os.fsync", full)
        with pytest.raises(OSError, match="No space"):
            await asker.fetch(REF, [holder.host.peer_id])
        assert list(asker.blobs.folder.iterdir()) == []
        monkeypatch.setattr("swarm.files.os.fsync", real)
        assert (await asker.fetch(REF, [holder.host.peer_id]))[0] == BLOB


def test_a_blob_store_mends_a_damaged_file_and_removes_leftovers(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(BLOB)
    store.path(ref.root).write_bytes(BLOB[:100])
    (tmp_path / ".tmp-half-written").write_bytes(b"x")
    again = BlobStore(tmp_path)
    assert not (tmp_path / ".tmp-half-written").exists()
    assert again.put(BLOB) == ref
    assert again.get(ref.root) == BLOB
    again.keep_only(set())
    assert list(tmp_path.iterdir()) == []
    assert again.info(ref.root) is None


async def test_two_fetches_of_one_blob_at_once_both_end_well(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        results = await asyncio.gather(*(asker.fetch(REF, [holder.host.peer_id]) for _ in range(2)))
        assert [blob for blob, _ in results] == [BLOB, BLOB]
        assert [path.name for path in asker.blobs.folder.iterdir()] == [REF.root.hex()]


async def test_a_source_that_lied_is_asked_last_from_then_on(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 3) as (asker, holder, liar):
        asks = 0

        async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
            nonlocal asks
            asks += 1
            await sends(frame(encode(BlobReply(True, REF.size, bytes(32 * 5)))), b"")(reader, writer, peer_id)

        await liar.host.serve_stream(BLOB_PROTOCOL, lie)
        for _ in range(3):
            blob, source = await asker.fetch(REF, [liar.host.peer_id, holder.host.peer_id])
            assert (blob, source) == (BLOB, holder.host.peer_id)
            asker.blobs.remove(REF.root)
        assert asks == 1
