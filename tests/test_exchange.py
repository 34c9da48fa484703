"""Blobs between hosts: sources that cut, lie, stall or go, and what a disk does (cases B26, B27, B30, B31, B35)."""

import asyncio
import itertools
import random
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import protocols.transfer
import swarm.downloads
import swarm.uploads
from protocols.faults import PeerFault, TransportFault
from protocols.messages import BlobHave, BlobOffer, BlobOpen, BlobRef, ChunkAsk, ChunkHead, decode_blob_asker
from protocols.transfer import CHUNK_BYTES, blob_ref, chunk_hashes, to_bitmap
from swarm.blobs import BlobStore
from swarm.exchange import Exchange, Fetched
from swarm.frames import BLOB_PROTOCOL, frame, read_frame
from swarm.host import Host
from tests.hosts import hosts, until

pytestmark = pytest.mark.network

COUNT = 5
BLOB = random.Random(1).randbytes((COUNT - 1) * CHUNK_BYTES + 1000)
OLDER = random.Random(2).randbytes((COUNT - 1) * CHUNK_BYTES + 1000)
REF = blob_ref(BLOB)
ALL = to_bitmap((1 << COUNT) - 1)

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]]


async def link(one: Host, other: Host) -> None:
    """Two that dial one another at the same moment may both hang up: then once more."""
    try:
        await one.connect(other.addresses[0], 10.0)
    except TransportFault:
        await one.connect(other.addresses[0], 10.0)


@asynccontextmanager
async def exchanges(folder: Path, count: int) -> AsyncIterator[list[Exchange]]:
    """Linked hosts with a blob store each; the first one asks, the second holds BLOB, the others are the test's."""
    async with hosts(folder, count) as linked:
        pairs = itertools.combinations(linked, 2)  # each with each: finding a way takes p2pd a moment
        await asyncio.gather(*(link(one, other) for one, other in pairs))
        made = [Exchange(host, BlobStore(folder / f"blobs{number}")) for number, host in enumerate(linked)]
        await made[1].start()
        made[1].blobs.put(BLOB)
        yield made


async def fetch(asker: Exchange, *sources: Exchange, ref: BlobRef = REF) -> Fetched:
    return await asker.fetch(ref, lambda: [source.host.peer_id for source in sources])


def names(exchange: Exchange) -> list[str]:
    return sorted(path.name for path in exchange.blobs.folder.iterdir())


async def hear(reader: asyncio.StreamReader) -> object:
    return decode_blob_asker(await read_frame(reader))


def offers(blob: bytes, hashes: bytes, cut: int | None = None, then_hold: bool = False) -> Handler:
    """A source that offers all chunks and sends these bytes, `cut` of them at most; then it closes or holds."""

    left = len(blob) if cut is None else cut

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        nonlocal left
        assert isinstance(await hear(reader), BlobOpen)
        writer.write(frame(BlobOffer(True, hashes, ALL)))
        while left > 0:
            asked = await hear(reader)
            assert isinstance(asked, ChunkAsk)
            data = blob[asked.index * CHUNK_BYTES : (asked.index + 1) * CHUNK_BYTES]
            writer.write(frame(ChunkHead(asked.index)) + data[:left])
            await writer.drain()
            left -= len(data)
        if then_hold:
            await reader.read()

    return handler


def says(raw: bytes, then_hold: bool = False) -> Handler:
    """A source that answers with these bytes."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        await hear(reader)
        writer.write(raw)
        await writer.drain()
        if then_hold:
            await reader.read()

    return handler


async def closes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
    """A source that closes at once."""


def flipped(blob: bytes, at: int) -> bytes:
    return blob[:at] + bytes([blob[at] ^ 1]) + blob[at + 1 :]


def all_flipped(blob: bytes) -> bytes:
    for at in range(7, len(blob), CHUNK_BYTES):
        blob = flipped(blob, at)
    return blob


HASHES = chunk_hashes(BLOB)
UNASKED = frame(BlobOffer(True, HASHES, b"")) + frame(ChunkHead(0)) + BLOB[:CHUNK_BYTES]
CASES = {
    # name: (source, its refusal, whole chunks of it that are good and come first)
    "cut at 10 %": (offers(BLOB, HASHES, len(BLOB) // 10), None, 0),
    "cut at 60 %": (offers(BLOB, HASHES, len(BLOB) * 6 // 10), None, 1),
    "one bit flipped in each chunk": (offers(all_flipped(BLOB), HASHES), "wrong chunk", 0),
    "another list": (offers(OLDER, chunk_hashes(OLDER)), "wrong blob", 0),
    "right list, older bytes": (offers(OLDER, HASHES), "wrong chunk", 0),
    "a short list": (offers(BLOB, HASHES[:-32]), "wrong blob", 0),
    "a chunk that nobody asked for": (says(UNASKED), "wrong chunk", 0),
    "no byte": (says(b"", then_hold=True), None, 0),
    "stalls half way": (offers(BLOB, HASHES, 2 * CHUNK_BYTES + 10, then_hold=True), None, 1),
    "closes at once": (closes, None, 0),
    "garbage": (says(struct.pack("<I", 8) + b"\xc1garbage"), "malformed blob reply", 0),
    "a huge frame": (says(struct.pack("<I", 2**32 - 1)), "frame too large", 0),
    "nested arrays": (says(struct.pack("<I", 200_000) + b"\x91" * 200_000), "malformed blob reply", 0),
    "gone": (says(frame(BlobOffer(False))), None, 0),
    "offers nothing and goes": (says(frame(BlobOffer(True, HASHES, b""))), None, 0),
}


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols.transfer, "STALL_S", 0.5)
    monkeypatch.setattr(swarm.downloads, "STALL_S", 0.5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("impatient")
async def test_b30_a_source_that_fails_is_left_for_the_others(tmp_path: Path, name: str) -> None:
    # Goal: every way to serve a blob badly ends at another source; what was verified is not fetched again, and
    # nothing that was not verified ever gets its name on the disk.
    source, reason, kept = CASES[name]
    async with exchanges(tmp_path, 3) as (asker, holder, bad):
        await bad.host.serve_stream(BLOB_PROTOCOL, source)
        async with asyncio.timeout(20.0):
            with pytest.raises(TransportFault) as alone:
                await fetch(asker, bad)
        assert alone.value.code == "no source"
        assert not asker.blobs.path(REF.root).exists()
        assert set(asker.refusals) == (set() if reason is None else {reason})

        asker = Exchange(asker.host, asker.blobs)  # one that has not met the bad source yet
        async with asyncio.timeout(20.0):
            fetched = await fetch(asker, bad, holder)
        assert fetched.blob == BLOB
        assert names(asker) == [REF.root.hex()]
        assert sum(fetched.received.values()) <= len(BLOB) - kept * CHUNK_BYTES
        assert kept or set(fetched.received) == {holder.host.peer_id}
        assert set(asker.refusals) <= (set() if reason is None else {reason, "wrong chunk"})


async def test_chunks_come_from_all_sources_at_once_and_none_twice(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 4) as (asker, *holders):
        blob = random.Random(3).randbytes(64 * CHUNK_BYTES)
        ref = blob_ref(blob)
        await asyncio.gather(*(holder.start() for holder in holders[1:]))
        for holder in holders:
            holder.blobs.put(blob)
        fetched = await fetch(asker, *holders, ref=ref)
        assert fetched.blob == blob
        assert set(fetched.received) == {holder.host.peer_id for holder in holders}
        assert sum(fetched.received.values()) == len(blob)
        assert sum(holder.sent_bytes for holder in holders) <= len(blob) + 3 * CHUNK_BYTES


async def test_a_sparing_source_sends_about_one_copy_to_many(tmp_path: Path) -> None:
    # Goal: askers find at each other what the trainer has sent once.
    async with exchanges(tmp_path, 5) as (trainer, *peers):
        blob = random.Random(3).randbytes(48 * CHUNK_BYTES)
        ref = blob_ref(blob)
        trainer.uploads.sparing = True
        trainer.blobs.put(blob)
        await asyncio.gather(*(each.start() for each in (trainer, *peers[1:])))
        async with asyncio.timeout(20.0):
            results = await asyncio.gather(
                *(fetch(peer, trainer, *peers[:at], *peers[at + 1 :], ref=ref) for at, peer in enumerate(peers))
            )
        assert [result.blob == blob for result in results] == [True] * 4
        print(trainer.sent_bytes / len(blob), [p.sent_bytes / len(blob) for p in peers])
        assert trainer.sent_bytes <= 1.5 * len(blob)


async def test_b27_a_source_that_drips_is_overtaken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols.transfer, "LATE_UNKNOWN_S", 1.0)

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        await hear(reader)
        writer.write(frame(BlobOffer(True, HASHES, ALL)))
        asked = await hear(reader)
        assert isinstance(asked, ChunkAsk)
        writer.write(frame(ChunkHead(asked.index)))
        for at in range(1000):
            writer.write(BLOB[at : at + 50])  # 1 KB/s
            await writer.drain()
            await asyncio.sleep(0.05)

    async with exchanges(tmp_path, 3) as (asker, holder, source):
        await source.host.serve_stream(BLOB_PROTOCOL, drips)
        async with asyncio.timeout(20.0):
            fetched = await fetch(asker, source, holder)
        assert fetched.received == {holder.host.peer_id: len(BLOB)}


async def test_b27_a_source_that_only_drips_is_dropped_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocols.transfer, "SLOW_S", 1.0)

    async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        await hear(reader)
        writer.write(frame(BlobOffer(True, HASHES, ALL)) + frame(ChunkHead(0)))
        for at in range(1000):
            writer.write(BLOB[at : at + 1])
            await writer.drain()
            await asyncio.sleep(0.05)

    async with exchanges(tmp_path, 3) as (asker, _, source):
        await source.host.serve_stream(BLOB_PROTOCOL, drips)
        async with asyncio.timeout(15.0):
            with pytest.raises(TransportFault, match=r"slow|not asked"):
                await fetch(asker, source)


async def test_b26_a_holder_serves_while_the_first_source_is_gone(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 3) as (asker, holder, other):
        await other.start()
        await fetch(other, holder)
        await holder.host.close()
        async with asyncio.timeout(8.0):
            fetched = await fetch(asker, holder, other)
        assert fetched == Fetched(BLOB, {other.host.peer_id: len(BLOB)})


async def test_b27_what_was_verified_survives_the_asker(tmp_path: Path) -> None:
    # Goal: after a restart only what is missing is fetched, whatever the disk did to the rest.
    async with exchanges(tmp_path, 3) as (asker, holder, cut):
        await cut.host.serve_stream(BLOB_PROTOCOL, offers(BLOB, HASHES, 3 * CHUNK_BYTES + 5))
        with pytest.raises(TransportFault):
            await fetch(asker, cut)
        (part,) = asker.blobs.folder.iterdir()
        assert part.name == f"{REF.root.hex()}.part"
        have = [
            at for at in range(COUNT) if part.read_bytes()[at * CHUNK_BYTES :][:1000] == BLOB[at * CHUNK_BYTES :][:1000]
        ]
        assert len(have) >= 2
        with part.open("r+b") as file:  # one of them is damaged meanwhile
            file.seek(have[0] * CHUNK_BYTES + 3)
            file.write(b"damage")
        again = Exchange(asker.host, BlobStore(asker.blobs.folder))
        fetched = await fetch(again, holder)
        assert fetched.blob == BLOB
        missing = [at for at in range(COUNT) if at not in have[1:]]
        assert sum(fetched.received.values()) == sum(len(BLOB[at * CHUNK_BYTES :][:CHUNK_BYTES]) for at in missing)


async def test_b31_a_blob_that_is_being_read_is_not_removed_and_later_it_is_gone(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 3) as (asker, holder, reader):
        stream, writer = await reader.host.open_stream(holder.host.peer_id, BLOB_PROTOCOL)
        writer.write(frame(BlobOpen(REF.root)))
        await read_frame(stream)
        holder.blobs.keep_only(set())
        assert holder.blobs.path(REF.root).exists()
        assert (await fetch(asker, holder)).blob == BLOB

        writer.close()
        await until(lambda: not holder.uploads._streams)
        holder.blobs.keep_only(set())
        assert not holder.blobs.path(REF.root).exists()
        asker.blobs.remove(REF.root)
        with pytest.raises(TransportFault, match="has nothing of it") as fault:
            await fetch(asker, holder)
        assert fault.value.code == "no source"
        assert holder.host.refusals.total() == 0


@pytest.mark.parametrize("known", [True, False], ids=["after it was served once", "never served"])
@pytest.mark.parametrize("damage", ["bit", "cut"])
async def test_b30_a_damaged_file_is_not_served(tmp_path: Path, known: bool, damage: str) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        if not known:
            holder.uploads.blobs = holder.blobs = BlobStore(holder.blobs.folder)
        path = holder.blobs.path(REF.root)
        whole = path.read_bytes()
        path.write_bytes(flipped(whole, CHUNK_BYTES + 5) if damage == "bit" else whole[: CHUNK_BYTES + 5])
        async with asyncio.timeout(15.0):
            with pytest.raises(TransportFault, match="no source"):
                await fetch(asker, holder)
        assert asker.refusals == {}, "an honest source does not lie because its disk does"
        assert not path.exists()
        assert holder.blobs.info(REF.root) is None


async def test_a_blob_over_the_limit_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        with pytest.raises(PeerFault, match="too large"):
            await fetch(asker, holder, ref=BlobRef(bytes(32), 2**47))
        assert holder.sent_bytes == 0


async def test_an_empty_blob_needs_nobody(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        assert (await fetch(asker, holder, ref=blob_ref(b""))).blob == b""


async def test_uploads_are_bounded_and_an_idle_asker_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarm.uploads, "UPLOADS_MAX", 3)
    async with exchanges(tmp_path, 3) as (asker, holder, idler):
        streams = [await idler.host.open_stream(holder.host.peer_id, BLOB_PROTOCOL) for _ in range(3)]
        for number, (_, writer) in enumerate(streams):
            writer.write(frame(BlobOpen(holder.blobs.put(b"%d" % number).root)))
        await until(lambda: len(holder.uploads._streams) == 3)
        with pytest.raises(TransportFault, match="no source"):
            await fetch(asker, holder)
        assert holder.host.refusals["too many uploads"] == 1
        monkeypatch.setattr(swarm.uploads, "IDLE_S", 0.0)
        assert (await fetch(Exchange(asker.host, asker.blobs), holder)).blob == BLOB


async def test_an_asker_has_one_stream_a_blob(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        streams = []
        for _ in range(5):
            reader, writer = await asker.host.open_stream(holder.host.peer_id, BLOB_PROTOCOL)
            writer.write(frame(BlobOpen(REF.root)))
            await read_frame(reader)
            streams.append(reader)
        await until(lambda: len(holder.uploads._streams) == 1)
        async with asyncio.timeout(15.0):
            for reader in streams[:-1]:
                assert await reader.read() == b""


async def test_who_takes_chunks_and_acknowledges_none_keeps_nobody_waiting(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 3) as (asker, holder, taker):
        blobs = [random.Random(number).randbytes(8 * CHUNK_BYTES) for number in range(14)]
        writers = []
        for ref in [holder.blobs.put(blob) for blob in blobs]:
            reader, writer = await taker.host.open_stream(holder.host.peer_id, BLOB_PROTOCOL)
            writer.write(frame(BlobOpen(ref.root)))
            await read_frame(reader)
            writer.write(frame(ChunkAsk(0)))
            writers.append(writer)
        await until(lambda: holder.sent_bytes > 0)
        async with asyncio.timeout(15.0):
            assert (await fetch(asker, holder)).blob == BLOB
        assert holder.sent_bytes <= len(BLOB) + 3 * CHUNK_BYTES, "and gets no more meanwhile"


@pytest.mark.parametrize("adds", [frame(BlobHave(b"")), frame(BlobHave(b"\1"))], ids=["nothing", "always the same"])
async def test_an_asker_that_chatters_is_cut_off(tmp_path: Path, adds: bytes) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        _, writer = await asker.host.open_stream(holder.host.peer_id, BLOB_PROTOCOL)
        writer.write(frame(BlobOpen(REF.root)) + adds * 10_000)
        await until(lambda: holder.host.refusals["too many messages"] == 1)


async def test_a_holder_that_chatters_is_left(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 3) as (asker, holder, liar):
        chatter = frame(BlobOffer(True, HASHES, b"")) * 10_000
        await liar.host.serve_stream(BLOB_PROTOCOL, says(chatter, then_hold=True))
        with pytest.raises(TransportFault, match="too many messages"):
            await fetch(asker, liar)
        assert (await fetch(asker, liar, holder)).blob == BLOB


@pytest.mark.usefixtures("impatient")
async def test_sources_that_offer_all_and_send_nothing_do_not_hold_up_the_others(tmp_path: Path) -> None:
    # Goal: asks that liars sit on are asked elsewhere, however many they are and whatever signs of life they give.
    async def sits(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        await hear(reader)
        while True:
            writer.write(frame(BlobOffer(True, HASHES, ALL)))
            await writer.drain()
            await asyncio.sleep(0.3)

    async with exchanges(tmp_path, 6) as (asker, holder, *liars):
        for liar in liars:
            await liar.host.serve_stream(BLOB_PROTOCOL, sits)
        holder.uploads.sparing = True
        async with asyncio.timeout(12.0):
            assert (await fetch(asker, *liars, holder)).received == {holder.host.peer_id: len(BLOB)}


async def test_a_stream_that_closes_at_any_moment_harms_nobody(tmp_path: Path) -> None:
    blob = random.Random(3).randbytes(16 * CHUNK_BYTES)
    async with exchanges(tmp_path, 4) as (asker, *holders):
        await asyncio.gather(*(holder.start() for holder in holders[1:]))
        for holder in holders:
            holder.blobs.put(blob)

        async def abort_some() -> None:
            rng = random.Random(1)
            while True:
                await asyncio.sleep(0.003)
                streams = [stream for holder in holders[1:] for stream in holder.uploads._streams]
                for stream in streams:
                    if rng.random() < 0.2:
                        stream.writer.transport.abort()

        aborting = asyncio.create_task(abort_some())
        try:
            for _ in range(12):
                async with asyncio.timeout(20.0):
                    assert (await fetch(asker, *holders, ref=blob_ref(blob))).blob == blob
                asker.blobs.remove(blob_ref(blob).root)
        finally:
            aborting.cancel()
        assert all(holder.host.refusals["handler failed"] == 0 for holder in holders)


@pytest.mark.parametrize("raw", [
    frame(ChunkAsk(0)),
    frame(BlobOpen(REF.root)) * 2,
    frame(BlobOpen(REF.root)) + frame(ChunkAsk(COUNT)),
    frame(BlobOpen(REF.root)) + frame(ChunkAsk(2**32 - 1)),
    struct.pack("<I", 3) + b"\xc1\xc1\xc1",
], ids=["asks first", "opens twice", "outside", "far outside", "garbage"])  # fmt: skip
async def test_an_asker_that_talks_nonsense_is_cut_off_and_counted(tmp_path: Path, raw: bytes) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        reader, writer = await asker.host.open_stream(holder.host.peer_id, BLOB_PROTOCOL)
        writer.write(raw)
        async with asyncio.timeout(15.0):
            while await reader.read(65536):
                pass
        assert holder.host.refusals.total() == 1
        assert not holder.uploads._streams


async def test_an_asker_may_not_heap_up_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        monkeypatch.setattr(holder.uploads._pacing, "room", lambda *_: False)  # nobody's turn
        monkeypatch.setattr(swarm.uploads, "IN_FLIGHT_MAX", COUNT - 1)
        reader, writer = await asker.host.open_stream(holder.host.peer_id, BLOB_PROTOCOL)
        writer.write(frame(BlobOpen(REF.root)))
        await read_frame(reader)
        for index in range(COUNT):
            writer.write(frame(ChunkAsk(index)))
        await until(lambda: holder.host.refusals["too many asks"] == 1)


async def test_b35_a_full_disk_raises_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with exchanges(tmp_path, 2) as (asker, holder):
        for name in ("posix_fallocate", "pwrite", "fsync"):
            with monkeypatch.context() as patch:
                patch.setattr(f"swarm.blobs.os.{name}", full)
                with pytest.raises(OSError, match="No space"):
                    await fetch(asker, holder)
            assert names(asker) == []
        assert (await fetch(asker, holder)).blob == BLOB


def test_a_blob_store_mends_a_damaged_file_and_removes_leftovers(tmp_path: Path) -> None:
    store = BlobStore(tmp_path)
    ref = store.put(BLOB)
    store.path(ref.root).write_bytes(BLOB[:100])
    (tmp_path / ".tmp-half-written").write_bytes(b"x")
    again = BlobStore(tmp_path)
    assert not (tmp_path / ".tmp-half-written").exists()
    assert again.put(BLOB) == ref
    assert again.get(ref.root) == BLOB
    (tmp_path / f"{'ab' * 32}.part").write_bytes(b"x")
    with again.in_use(ref.root):
        again.keep_only(set())
        assert [path.name for path in tmp_path.iterdir()] == [ref.root.hex()]
    again.keep_only(set())
    assert list(tmp_path.iterdir()) == []
    assert again.info(ref.root) is None


async def test_two_fetches_of_one_blob_at_once_both_end_well(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 2) as (asker, holder):
        results = await asyncio.gather(*(fetch(asker, holder) for _ in range(2)))
        assert [result.blob for result in results] == [BLOB, BLOB]
        assert names(asker) == [REF.root.hex()]
        assert holder.sent_bytes == len(BLOB)


async def test_a_source_that_lied_is_asked_last_from_then_on(tmp_path: Path) -> None:
    async with exchanges(tmp_path, 3) as (asker, holder, liar):
        asks = 0

        async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
            nonlocal asks
            asks += 1
            await offers(OLDER, chunk_hashes(OLDER))(reader, writer, peer_id)

        await liar.host.serve_stream(BLOB_PROTOCOL, lie)
        with pytest.raises(TransportFault):
            await fetch(asker, liar)
        for _ in range(3):
            assert (await fetch(asker, liar, holder)).received == {holder.host.peer_id: len(BLOB)}
            asker.blobs.remove(REF.root)
        assert asks == 1
