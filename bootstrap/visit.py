"""A look at a swarm from outside, step by step: what each of its doors says, what the run is, how fast versions come.

    addresses --Hello--> doors --ManifestRequest, StatusRequest, ChainRequest--> the run --a version's blob--> rates

A visitor has a key of its own for as long as it looks. It sends no heartbeat and enters no directory, so nobody counts
it as a peer; a door forgets its hello within seconds.
"""

import asyncio
import itertools
import os
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from protocols import PROTOCOL
from protocols.directory import check_manifest
from protocols.envelopes import is_of, unseal_either
from protocols.faults import PeerFault, TransportFault
from protocols.identity import short
from protocols.manifest import Manifest
from protocols.messages import (
    CHAIN_PAGE_MAX,
    Announcement,
    BlobRef,
    ChainRequest,
    Envelopes,
    Hello,
    HelloReply,
    ManifestRequest,
    Refused,
    Reply,
    Request,
    RunEnd,
    Status,
    StatusRequest,
    Verdict,
    decode_reply,
    encode,
)
from protocols.paths import cheapest
from swarm.blobs import BlobStore
from swarm.exchange import Exchange
from swarm.host import Host, HostConfig
from swarm.identity import KEY_FILE, load_identity
from swarm.node import now_ms

CONNECT_S = 8.0  # as a peer that joins
ANSWER_S = 5.0
HELLOS = 4  # the quickest of them tells the clock best: one that is delayed is off by half of its delay
DOWN_S = 5.0  # a link shows its rate within a second or two; who looks waits for it
DOWN_BYTES = 16 * 1024 * 1024  # 2.5 s at 50 Mbit/s
DOWN_TICK_S = 0.02
UP_BYTES = 256 * 1024  # a second at 2 Mbit/s; a hello of this size is a quarter of what a call may hold
UP_S = 6.0
INTERVALS_MAX = 20  # the newest, whose median says how often versions come


@dataclass(frozen=True, slots=True)
class Door:
    """A peer that answers at an address of the invitation."""

    address: str
    peer_id: str
    verdict: Verdict
    detail: str
    protocol: str
    offset_s: float
    """Its clock minus ours."""
    round_trip_s: float
    """Of the quickest hello: the offset is exact to half of it."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the doors say of the run; signatures are checked, the status is their word."""

    manifest: Manifest
    status: Status | None
    announcements: tuple[Announcement, ...]
    """The newest, oldest first; each signed by a trainer of the manifest."""

    @property
    def newcomer_blobs(self) -> tuple[BlobRef, ...]:
        """What a peer with an empty disk downloads first; only the head's own if the way is longer than we know."""
        if not self.announcements:
            return ()
        head = self.announcements[-1]
        hops = cheapest(self.announcements, head.version, None, lambda root: False)
        return tuple(hop.blob for hop in hops) if hops is not None else _own_blobs(head)

    @property
    def version_bytes(self) -> int | None:
        """What a peer that keeps up downloads for the newest version."""
        return (
            min((ref.size for ref in _own_blobs(self.announcements[-1])), default=None) if self.announcements else None
        )

    @property
    def interval_s(self) -> float | None:
        """How often versions came lately: the median; None before there are two."""
        made_ms = [each.created_ms for each in self.announcements[-1 - INTERVALS_MAX :]]
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(made_ms))
        return gaps[len(gaps) // 2] / 1000 if gaps else None


def _own_blobs(said: Announcement) -> tuple[BlobRef, ...]:
    delta = said.adapter.delta
    return tuple(ref for ref in (said.adapter.keyframe, delta.blob if delta is not None else None) if ref is not None)


@dataclass(frozen=True, slots=True)
class Rate:
    """A transfer that was measured."""

    num_bytes: int
    elapsed_s: float

    @property
    def bytes_per_s(self) -> float:
        """With the round trips in it: of a small transfer, a lower bound."""
        return self.num_bytes / self.elapsed_s


@asynccontextmanager
async def visiting(listen: tuple[str, ...] = ()) -> AsyncIterator[Host]:
    """A host with a throw-away identity, whose key is gone as soon as p2pd has read it. Raises TransportFault."""
    with tempfile.TemporaryDirectory(prefix="swarm-visit-") as folder:
        identity, _ = load_identity(Path(folder) / KEY_FILE)
        host = await Host.start(identity, HostConfig(listen=listen))
    try:
        yield host
    finally:
        await host.close()


async def greet(host: Host, address: str, run: str) -> Door | TransportFault:
    """Who answers at this address, and what they say."""
    try:
        peer_id = await host.connect(address, CONNECT_S)
        heard = [await _hello(host, peer_id, run) for _ in range(HELLOS)]
    except TransportFault as fault:
        return fault
    except PeerFault as fault:
        return TransportFault("protocol mismatch", f"{short(peer_id)} answers: {fault}")
    round_trip_s, offset_s, reply = min(heard, key=lambda each: each[0])
    return Door(address, peer_id, reply.verdict, reply.detail, reply.protocol, offset_s, round_trip_s)


async def _hello(host: Host, peer_id: str, run: str) -> tuple[float, float, HelloReply]:
    """(round trip, offset, answer), in seconds."""
    began_s, sent_ms = time.monotonic(), now_ms()
    reply = await ask(host, peer_id, Hello(PROTOCOL, run, _session_of(host), sent_ms))
    round_trip_s = time.monotonic() - began_s
    if not isinstance(reply, HelloReply):
        raise PeerFault("unexpected reply", type(reply).__name__)
    return round_trip_s, (reply.now_ms - sent_ms) / 1000 - round_trip_s / 2, reply


def _session_of(host: Host) -> bytes:
    """The same for all hellos of a visitor, or they would look like two processes with one key."""
    return host.peer_id.encode()[-16:]


async def ask(host: Host, peer_id: str, request: Request) -> Reply:
    """One request to one peer. Raises TransportFault, or PeerFault for an answer that is none."""
    return decode_reply(await host.call(peer_id, encode(request), ANSWER_S))


async def read_run(host: Host, doors: Sequence[Door], run: str) -> Run:
    """The run as its doors know it.

    Raises TransportFault: 'no manifest' or 'unknown run' where that is what all of them say; PeerFault for a manifest
    that its owner did not sign.
    """
    manifest: Manifest | None = None
    refusals: list[str] = []
    for door in doors:
        reply = await ask(host, door.peer_id, ManifestRequest(run))
        if isinstance(reply, Refused):
            refusals.append(reply.reason)
        for raw in reply.envelopes if isinstance(reply, Envelopes) else ():
            found = check_manifest(raw, run).message
            if manifest is None or found.revision > manifest.revision:
                manifest = found
    if manifest is None:
        known = any(reason != "unknown run" for reason in refusals)
        raise TransportFault("no manifest" if known else "unknown run", ", ".join(dict.fromkeys(refusals)))
    status = await _status(host, doors, run)
    head = status.head if status is not None else None
    announcements = await _announcements(host, doors, manifest, head) if head is not None else ()
    return Run(manifest, status, announcements)


async def _status(host: Host, doors: Sequence[Door], run: str) -> Status | None:
    """The one that knows the newest version."""
    known = [reply for door in doors if isinstance(reply := await ask(host, door.peer_id, StatusRequest(run)), Status)]
    return max(known, key=lambda status: -1 if status.head is None else status.head, default=None)


async def _announcements(host: Host, doors: Sequence[Door], manifest: Manifest, head: int) -> tuple[Announcement, ...]:
    """The last page of the chain, from the first door that has one. Raises PeerFault for a false signature."""
    first = max(0, head + 1 - CHAIN_PAGE_MAX * manifest.publish_every)
    for door in doors:
        reply = await ask(host, door.peer_id, ChainRequest(manifest.run, first))
        raws = reply.envelopes if isinstance(reply, Envelopes) else ()
        sealed = [unseal_either(raw, Announcement, RunEnd) for raw in raws]
        said = [each for each in sealed if is_of(each, Announcement) and each.message.run == manifest.run]
        if any(each.sender not in manifest.trainers for each in said):
            raise PeerFault("not a trainer", f"signed a version that {short(door.peer_id)} tells of")
        if said:
            return tuple(each.message for each in said)
    return ()


async def measure_down(host: Host, ref: BlobRef, sources: Sequence[str]) -> Rate:
    """Download a blob, or as much of it as tells the rate. Raises TransportFault 'no source', OSError."""
    with tempfile.TemporaryDirectory(prefix="swarm-visit-") as folder:
        exchange = Exchange(host, BlobStore(Path(folder)))
        began_s = time.monotonic()
        download = asyncio.create_task(exchange.fetch(ref, lambda: sources))
        received = 0
        try:
            while received < min(DOWN_BYTES, ref.size) and time.monotonic() - began_s < DOWN_S:
                done, _ = await asyncio.wait({download}, timeout=DOWN_TICK_S)
                if done:
                    download.result()
                    received = ref.size
                elif ref.root in exchange.downloads:
                    received = exchange.downloads[ref.root].received_bytes
            elapsed_s = time.monotonic() - began_s
        finally:
            download.cancel()
            with suppress(asyncio.CancelledError, TransportFault, PeerFault, OSError):
                await download
    return Rate(received, elapsed_s)


async def measure_up(host: Host, peer_id: str) -> Rate:
    """A hello with a field that nobody knows, and that everybody reads over. Raises TransportFault, PeerFault."""
    hello = msgspec.msgpack.decode(encode(Hello(PROTOCOL, None, _session_of(host), now_ms())))
    raw = msgspec.msgpack.encode(hello | {"padding": os.urandom(UP_BYTES)})
    began_s = time.monotonic()
    decode_reply(await host.call(peer_id, raw, UP_S))
    return Rate(len(raw), time.monotonic() - began_s)
