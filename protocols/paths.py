"""Ways to a version: which blobs lead there, which is the cheapest, and which are worth keeping (DESIGN section 7).

    keyframe of v3 --delta--> v4 --delta--> v5 ...     from nothing: a keyframe, then every delta since
              held v4 --delta--> v5                    from a version in memory: the deltas since

Each announcement offers its version whole (a keyframe), as a delta to the version before it in the chain, or both.
So every way to a version ends with an unbroken run of deltas, and differs from others only in where that run begins.
"""

from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from protocols.adapters import Adapter, decode_adapter
from protocols.codecs import CODECS, decode_delta
from protocols.faults import LocalFault
from protocols.messages import Announcement, BlobRef


class Hop(NamedTuple):
    """One blob on the way: what makes a version out of nothing, or out of the version before it."""

    version: int
    codec: str | None
    """None: a keyframe."""
    blob: BlobRef


def follow(hop: Hop, blob: bytes, parent: Adapter | None, parent_digest: bytes | None = None) -> Adapter:
    """The version that this hop leads to, from the one before it; a keyframe needs none.

    Raises PeerFault for a blob that does not fit, LocalFault for a delta without a parent: no way begins with one.
    """
    if hop.codec is None:
        return decode_adapter(blob)
    if parent is None:
        raise LocalFault(f"v{hop.version}: a delta needs the version before it")
    return decode_delta(hop.codec, blob, parent, parent_digest)


def cheapest(
    entries: Sequence[Announcement],
    target: int,
    held: int | None,
    on_disk: Callable[[bytes], bool],
    refused: Container[bytes] = (),
) -> list[Hop] | None:
    """The way to version `target` with the fewest bytes to download, of those the one with the fewest hops.

    `entries` is the chain or its newest part, oldest first; `held` a version in memory; what is on disk costs
    nothing; what is refused is no way, nor is a delta of a codec that is not known here. None: there is no way.
    """
    at = next((at for at in reversed(range(len(entries))) if entries[at].version == target), None)
    best: list[Hop] | None = None
    best_bytes = 0
    deltas: list[Hop] = []  # from the entry under consideration on; newest first
    num_bytes = 0
    while at is not None and (best is None or num_bytes < best_bytes):
        entry = entries[at]
        if entry.version == held:
            return deltas[::-1]  # further back begins no shorter way
        keyframe = _keyframe(entry, refused)
        if keyframe is not None:
            whole_bytes = num_bytes + _to_download(keyframe, on_disk)
            if best is None or whole_bytes < best_bytes:
                best, best_bytes = [keyframe, *deltas[::-1]], whole_bytes
        delta = _delta(entry, refused) if at > 0 else None
        if delta is None:
            break
        deltas.append(delta)
        num_bytes += _to_download(delta, on_disk)
        at -= 1
    return best


def kept(entries: Sequence[Announcement], versions: int, bytes_max: int) -> set[bytes]:
    """Roots of the blobs worth keeping.

    First those by which a newcomer reaches the head, whatever their size. Then, as long as all together stay within
    `bytes_max`, the delta and the keyframe of the head, of the version before it, and so on: at most `versions` of
    them, for peers that are a little late.
    """
    if not entries:
        return set()
    way = cheapest(entries, entries[-1].version, None, lambda root: False) or []
    roots = {hop.blob.root for hop in way}
    num_bytes = sum(hop.blob.size for hop in way)
    for entry in entries[: -versions - 1 : -1]:
        for hop in (_delta(entry), _keyframe(entry)):
            if hop is None or hop.blob.root in roots:
                continue
            if num_bytes + hop.blob.size > bytes_max:
                return roots
            roots.add(hop.blob.root)
            num_bytes += hop.blob.size
    return roots


def _keyframe(entry: Announcement, refused: Container[bytes] = ()) -> Hop | None:
    blob = entry.adapter.keyframe
    return Hop(entry.version, None, blob) if blob is not None and blob.root not in refused else None


def _delta(entry: Announcement, refused: Container[bytes] = ()) -> Hop | None:
    delta = entry.adapter.delta
    if delta is None or delta.codec not in CODECS or delta.blob.root in refused:
        return None
    return Hop(entry.version, delta.codec, delta.blob)


def _to_download(hop: Hop, on_disk: Callable[[bytes], bool]) -> int:
    return 0 if on_disk(hop.blob.root) else hop.blob.size
