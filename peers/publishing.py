"""From the learner's weights to the blobs of a version, and to the reference that an announcement carries.

    target (F32) --codec, against the parent--> delta, rebuilt --encode_adapter--> keyframe
                                                  |    |                             |
                                                  |    the policy from here on       |
                                                  +--------- stored, read back ------+--> AdapterRef

Keyframes: where there is no parent, each `keyframe_every` versions, and once the deltas since the last one add up to
more than a keyframe: so nobody ever needs more than about two of them. A delta that is not smaller than a keyframe is
left out, and the keyframe then holds all that its dtype can.

After a restart the disk may not hold what was announced: what is `missing` is made again, where that is possible.
"""

import errno
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocols.adapters import Adapter, adapter_digest, decode_adapter, encode_adapter
from protocols.choice import Choice, Cost
from protocols.codecs import Encoded, decode_delta, encode_delta, rounded, widened
from protocols.faults import LocalFault, PeerFault
from protocols.manifest import TransferSpec
from protocols.messages import AdapterRef, Announcement, BlobRef, DeltaRef
from protocols.paths import Hop, cheapest, follow
from protocols.transfer import blob_ref
from swarm.blobs import BlobStore

log = logging.getLogger(__name__)

RAW = "raw"  # a keyframe and nothing else


@dataclass(frozen=True, slots=True)
class Published:
    """One version, ready to be stored and announced."""

    digest: bytes
    rebuilt: Adapter
    """What receivers get, bit for bit: the policy."""
    keyframe: bytes | None
    delta: tuple[str, bytes] | None
    """Codec and blob."""
    encode_s: dict[str, float] = field(default_factory=dict)
    """Seconds by codec, of those that were only tried too."""

    @property
    def codec(self) -> str:
        """How it travels to whoever has its parent."""
        return self.delta[0] if self.delta is not None else RAW


class Publisher:
    """The versions of one run, one after the other. Synchronous; call it from one thread at a time."""

    def __init__(self, spec: TransferSpec) -> None:
        self.parent: Adapter | None = None
        """The version that was published last; None: the next one is a keyframe."""
        self.whole_next = False
        """Offer the next version whole in any case: the way to the last one is broken."""
        self._parent_digest: bytes | None = None
        self._spec = spec
        self._choice = Choice() if spec.codec == "auto" else None
        self._versions = 0  # since the last keyframe
        self._delta_bytes = 0  # of those versions

    def resume(self, parent: Adapter | None, entries: Sequence[Announcement]) -> None:
        """Go on after the last of these announcements, whose adapter `parent` is (None: it is lost)."""
        self.parent = parent
        self._parent_digest = adapter_digest(parent) if parent is not None else None
        self._versions = self._delta_bytes = 0
        for said in reversed(entries):
            if said.adapter.keyframe is not None or said.adapter.delta is None:
                return
            self._versions += 1
            self._delta_bytes += said.adapter.delta.blob.size

    def publish(self, target: Adapter, link_bytes_per_s: float | None = None, step_s: float | None = None) -> Published:
        """The next version, of a finite F32 `target`. What `auto` chooses by: the link's rate, seconds of a step.

        LocalFault for tensors that are no LoRA matrices: engines cannot serve modules that were trained as a whole.
        """
        if strange := sorted(name for name in target if not name.endswith((".lora_A", ".lora_B"))):
            raise LocalFault(f"no LoRA matrices: {', '.join(strange[:3])}")
        encode_s: dict[str, float] = {}
        codec = self._codec(link_bytes_per_s, step_s)
        blob, rebuilt = self._encoded(codec, target, encode_s)
        if codec != RAW and len(blob) >= _payload_bytes(rebuilt):
            codec = RAW
            blob, rebuilt = self._encoded(codec, target, encode_s)
        keyframe = blob if codec == RAW else encode_adapter(rebuilt) if self._is_keyframe(blob, rebuilt) else None
        other = self._choice.due() if self._choice is not None and self.parent is not None else None
        if other is not None:
            self._encoded(other, target, encode_s)

        digest = adapter_digest(rebuilt)
        self.parent, self._parent_digest = rebuilt, digest
        self.whole_next = False
        self._versions = self._versions + 1 if keyframe is None else 0
        self._delta_bytes = self._delta_bytes + len(blob) if keyframe is None else 0
        return Published(digest, rebuilt, keyframe, (codec, blob) if codec != RAW else None, encode_s)

    def _codec(self, link_bytes_per_s: float | None, step_s: float | None) -> str:
        if self.parent is None:
            return RAW
        return self._choice.pick(link_bytes_per_s, step_s) if self._choice is not None else self._spec.codec

    def _encoded(self, codec: str, target: Adapter, encode_s: dict[str, float]) -> Encoded:
        """The blob of one codec and what it rebuilds; measured, and for `auto` remembered."""
        begun_s = time.perf_counter()
        if codec == RAW:
            whole = rounded(target, self._spec.dtype)
            encoded = Encoded(encode_adapter(whole), whole)
        else:
            assert self.parent is not None
            encoded = encode_delta(codec, target, self.parent, self._parent_digest)
        encode_s[codec] = time.perf_counter() - begun_s
        if self._choice is not None:
            decode_s = self._choice.decode_s(codec)
            if decode_s is None:
                decode_s = self._decode_s(codec, encoded)
            self._choice.learn(codec, Cost(encode_s[codec], len(encoded.blob), decode_s))
        return encoded

    def _decode_s(self, codec: str, encoded: Encoded) -> float:
        """Seconds in which a receiver rebuilds it; that it is what was encoded is checked on the way."""
        begun_s = time.perf_counter()
        if codec == RAW:
            got = decode_adapter(encoded.blob)
        else:
            assert self.parent is not None
            got = decode_delta(codec, encoded.blob, self.parent, self._parent_digest)
        took_s = time.perf_counter() - begun_s
        if got != encoded.rebuilt:
            raise LocalFault(f"{codec}: what is decoded is not what was encoded")
        return took_s

    def _is_keyframe(self, delta: bytes, rebuilt: Adapter) -> bool:
        """Whether a version with this delta is offered whole too."""
        due = self._versions + 1 >= self._spec.keyframe_every
        return self.whole_next or due or self._delta_bytes + len(delta) > _payload_bytes(rebuilt)


def store(published: Published, blobs: BlobStore) -> AdapterRef:
    """Put the blobs of a version where they are served, and read each back by its name: what is announced can be had
    (case B26). Raises OSError when there is no room, or when the disk does not hold what was written."""
    keyframe = _put(published.keyframe, blobs) if published.keyframe is not None else None
    delta = DeltaRef(published.delta[0], _put(published.delta[1], blobs)) if published.delta is not None else None
    return AdapterRef(published.digest, keyframe, delta)


def missing(entries: Sequence[Announcement], blobs: BlobStore) -> list[Hop]:
    """Of the blobs by which a newcomer reaches the head, those that are not on disk, or not whole. Reads all of them;
    raises OSError when one cannot be read."""
    return [hop for hop in _way(entries) if blobs.info(hop.blob.root) is None]


def remake(hop: Hop, entries: Sequence[Announcement], published: Adapter, target: Adapter, blobs: BlobStore) -> bool:
    """Store a blob of the head again, if its very bytes can be made of what is at hand.

    `published` is the head; `target` (F32) perhaps what it was made of: a lossless delta follows from the head alone.
    Raises OSError.
    """
    if hop.version != entries[-1].version:
        return False
    if hop.codec is None:
        made = iter([encode_adapter(published)])
    else:
        codec, parent = hop.codec, _rebuilt(_way(entries)[:-1], blobs)
        if parent is None:
            return False
        made = (encode_delta(codec, each, parent).blob for each in (target, widened(published)))
    blob = next((blob for blob in made if blob_ref(blob) == hop.blob), None)
    if blob is not None:
        _put(blob, blobs)
    return blob is not None


def rebuild(entries: Sequence[Announcement], blobs: BlobStore) -> Adapter | None:
    """The adapter of the last of these announcements, from what is on disk; None when that does not lead there."""
    try:
        return _rebuilt(_way(entries), blobs)
    except OSError as error:
        log.warning("v%d cannot be read: %s", entries[-1].version, error)
        return None


def _way(entries: Sequence[Announcement]) -> list[Hop]:
    return cheapest(entries, entries[-1].version, None, lambda root: False) or []


def _rebuilt(way: Sequence[Hop], blobs: BlobStore) -> Adapter | None:
    """Where a way leads; None when a blob is not on disk or does not fit."""
    adapter: Adapter | None = None
    for hop in way:
        blob = blobs.get(hop.blob.root)
        if blob is None:
            return None
        try:
            adapter = follow(hop, blob, adapter)
        except PeerFault:
            return None
    return adapter


def _put(blob: bytes, blobs: BlobStore) -> BlobRef:
    ref = blobs.put(blob)
    if blobs.get(ref.root) is None:
        raise OSError(errno.EIO, "the disk does not hold what was written to it", str(blobs.path(ref.root)))
    return ref


def _payload_bytes(adapter: Adapter) -> int:
    """Bytes of all tensors: a keyframe but for its header."""
    return sum(len(tensor.data) for tensor in adapter.values())
