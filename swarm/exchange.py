"""Blobs between peers: serves those of this peer, and fetches others from many sources at once.

fetch -> swarm/downloads.py    the asker's side of streams
serve -> swarm/uploads.py      the holder's
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocols.faults import TransportFault
from protocols.messages import BlobRef
from swarm.blobs import BlobStore
from swarm.downloads import Download, Progress, Shunned
from swarm.frames import BLOB_PROTOCOL
from swarm.host import Host
from swarm.uploads import Arriving, Uploads


@dataclass(frozen=True, slots=True)
class Fetched:
    """A blob, verified and stored."""

    blob: bytes
    received: dict[str, int] = field(default_factory=dict)
    """Bytes by source; empty when it was here."""


class Exchange:
    """The blobs of a peer, as others see them and as it gets them."""

    def __init__(self, host: Host, blobs: BlobStore) -> None:
        self.host = host
        self.blobs = blobs
        self.downloads: dict[bytes, Progress] = {}
        """Under way now, by root."""
        self.received_bytes = 0
        self.refusals: Counter[str] = Counter()
        self._arriving: dict[bytes, Arriving] = {}
        self.uploads = Uploads(blobs, self._arriving)
        self._shunned = Shunned()

    @property
    def sent_bytes(self) -> int:
        """Bytes of chunks that went out."""
        return self.uploads.sent_bytes

    async def start(self) -> None:
        """Begin to serve."""
        await self.host.serve_stream(BLOB_PROTOCOL, self.uploads.serve)

    async def fetch(self, ref: BlobRef, sources: Callable[[], Sequence[str]]) -> Fetched:
        """The verified blob, stored. `sources` is asked again and again while it arrives.

        Sources that stall, lie or lack the blob are left for others; verified chunks stay, also for the next call.
        Raises TransportFault 'no source' when nobody is left to ask, PeerFault for a blob that is too large, OSError
        for a full disk.
        """
        while True:
            here = await asyncio.to_thread(self.blobs.get, ref.root)
            if here is not None:
                return Fetched(here)
            arriving = self._arriving.get(ref.root)
            if arriving is None:
                break
            async with arriving.grown:  # another caller fetches it
                await arriving.grown.wait()
        download = Download(self.host, self.blobs, ref, sources, self._shunned, self.refusals)
        self._arriving[ref.root] = download.arriving
        self.downloads[ref.root] = download.progress
        try:
            with self.blobs.in_use(ref.root):
                await download.run()
        finally:
            del self._arriving[ref.root], self.downloads[ref.root]
            self.received_bytes += sum(download.received.values())
            download.close()
            await download.arriving.tell()
        blob = await asyncio.to_thread(self.blobs.path(ref.root).read_bytes)
        if len(blob) != ref.size:
            raise TransportFault("no source", f"blob {ref.root.hex()[:12]} was removed meanwhile")
        return Fetched(blob, dict(download.received))
