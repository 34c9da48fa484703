"""What may stand in the DHT, under which key, and for how long (DESIGN section 4).

    key (hashed by the DHT)   subkey        value, enveloped      lifetime
    <run>/manifest            -             Manifest, by owner    10 min, republished by every peer
    <run>/head                trainer id    newest Announcement   10 min, refreshed each minute
    <run>/peers/<shard>       peer id       CapacityAd            60 s, renewed each 20 s
    <run>/coordinator         candidate id  Lease                 the manifest's lease_s, renewed four times

Every storing node runs these rules, bootstrap peers included, and every reader runs them again. The DHT
keeps the record with the latest expiry, so a record that claims to live longer than its kind allows is
refused: nobody can pin a key. Rules remember what they have seen and never let a record go back.
"""

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache

from protocols import PROTOCOL
from protocols.election import check_term
from protocols.envelopes import M, Sealed, unseal
from protocols.faults import PeerFault
from protocols.identity import public_of, run_id_of
from protocols.manifest import Manifest
from protocols.messages import Announcement, CapacityAd, Lease
from protocols.msgpack_guard import unwrap_bin

SKEW_S = 3.0  # hivemind refuses peers whose clock is further off than this
MANIFEST_LIFE_S = 600.0
HEAD_LIFE_S = 600.0
HEAD_REFRESH_S = 60.0
PEER_LIFE_S = 60.0
PEER_RENEW_S = 20.0  # a third of the lifetime: two lost renewals do not hide a peer
PEERS_PER_SHARD_MAX = 4096  # at about 300 B a record; then the next power of two of shards is due
SHARD_BYTES_MAX = 1536 * 1024  # of values; with subkeys and expiries a full shard stays under hivemind's 2 MiB message
LEASE_LIFE_MAX_S = 600.0  # the longest lease_s a manifest may ask for
VERIFIED_MAX = 4096  # envelopes whose signature need not be checked again (0.25 ms each): one full shard


class RecordKind(StrEnum):
    """The kinds of key a run has."""

    MANIFEST = "manifest"
    HEAD = "head"
    PEERS = "peers"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class RecordKey:
    """One key of one run; `text` is what the DHT hashes."""

    run: str
    kind: RecordKind
    shard: int = 0

    @property
    def text(self) -> str:
        """`<run>/<kind>`, with the shard behind it for peers."""
        return f"{self.run}/{self.kind}" + (f"/{self.shard}" if self.kind is RecordKind.PEERS else "")


def shard_of(peer_id: str, shards: int) -> int:
    """First byte of the peer id's hash, modulo the number of shards."""
    return hashlib.sha256(peer_id.encode()).digest()[0] % shards


@lru_cache(maxsize=VERIFIED_MAX)
def _verified(raw: bytes, kind: type[M]) -> Sealed[M]:
    """`unseal`, remembered: every read of a shard checks every record in it."""
    return unseal(raw, kind)


def check_manifest(raw: bytes, run: str) -> Sealed[Manifest]:
    """A manifest of this run, signed by the owner that the run id names. Raises PeerFault."""
    sealed = _verified(raw, Manifest)
    name = run.rpartition("-")[0]
    if sealed.message.run != run or run_id_of(name, public_of(sealed.sender)) != run:
        raise PeerFault("foreign manifest", sealed.message.run)
    if sealed.message.protocol != PROTOCOL:
        raise PeerFault("protocol mismatch", f"the run speaks {sealed.message.protocol}, this is {PROTOCOL}")
    return sealed


class _Shard:
    """Who has a record in one shard, until when and of which size, so that the whole can always be read."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[float, int]] = {}
        self._num_bytes = 0

    def admit(self, peer_id: str, until_s: float, num_bytes: int, now_s: float) -> None:
        """Make room for a record in place of the peer's last one. Raises PeerFault 'directory full'."""
        if not self._fits(peer_id, num_bytes):
            for other in [other for other, (expires_s, _) in self._held.items() if expires_s < now_s]:
                self._num_bytes -= self._held.pop(other)[1]
            if not self._fits(peer_id, num_bytes):
                raise PeerFault("directory full")
        last_until_s, last_bytes = self._held.get(peer_id, (0.0, 0))
        self._held[peer_id] = (max(until_s, last_until_s), num_bytes)
        self._num_bytes += num_bytes - last_bytes

    def _fits(self, peer_id: str, num_bytes: int) -> bool:
        last_bytes = self._held.get(peer_id, (0.0, 0))[1]
        room = peer_id in self._held or len(self._held) < PEERS_PER_SHARD_MAX
        return room and self._num_bytes - last_bytes + num_bytes <= SHARD_BYTES_MAX


class DirectoryRules:
    """The rules of one run, with what they have learnt: newest manifest, newest head of each trainer."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.manifest: Sealed[Manifest] | None = None
        self._head_version: dict[str, int] = {}
        self._shards: dict[int, _Shard] = {}

    def keys(self) -> list[RecordKey]:
        """Every key these rules accept: all that 256 shards could need."""
        fixed = [RecordKey(self.run, kind) for kind in RecordKind if kind is not RecordKind.PEERS]
        return fixed + [RecordKey(self.run, RecordKind.PEERS, shard) for shard in range(256)]

    def learn(self, sealed: Sealed[Manifest]) -> bool:
        """Keep a checked manifest if its revision is the highest so far; True if it is kept.

        Raises PeerFault for a revision that changes the staleness bound: it is a promise for the whole run.
        """
        if self.manifest is not None:
            if sealed.message.revision < self.manifest.message.revision:
                return False
            if sealed.message.max_lag != self.manifest.message.max_lag:
                raise PeerFault("bound changed", f"{self.manifest.message.max_lag} to {sealed.message.max_lag}")
        self.manifest = sealed
        return True

    def check(self, key: RecordKey, subkey: str | None, value: bytes, expires_s: float, now_s: float) -> None:
        """Raises PeerFault unless this record may stand. `value` is as stored: one MessagePack bin."""
        if not now_s - SKEW_S <= expires_s <= now_s + self._life_s(key.kind) + SKEW_S:  # also refuses NaN
            raise PeerFault("bad expiry", f"{key.kind}: {expires_s - now_s:.0f} s from now")
        if (subkey is None) != (key.kind is RecordKind.MANIFEST):
            raise PeerFault("bad subkey", f"{key.kind} is {'plain' if subkey is not None else 'a dictionary'}")
        raw = unwrap_bin(value)
        match key.kind:
            case RecordKind.MANIFEST:
                if not self.learn(check_manifest(raw, self.run)):
                    raise PeerFault("old manifest")
            case RecordKind.HEAD:
                self._check_head(raw, subkey or "")
            case RecordKind.PEERS:
                self._check_peer(key, raw, subkey or "", expires_s, now_s)
            case RecordKind.COORDINATOR:
                self._check_lease(raw, subkey or "", expires_s, now_s)

    def check_lease(self, sealed: Sealed[Lease], now_s: float) -> None:
        """Raises PeerFault unless this lease may be believed, in the DHT or in gossip (case B48)."""
        said = sealed.message
        if said.run != self.run:
            raise PeerFault("foreign run")
        if self.manifest is None:
            raise PeerFault("no manifest yet")
        if sealed.sender not in self.manifest.message.eligible:
            raise PeerFault("not eligible")
        if not now_s - SKEW_S <= said.until_ms / 1000 <= now_s + self.lease_s + SKEW_S:
            raise PeerFault("bad expiry", f"lease until {said.until_ms / 1000 - now_s:.0f} s from now")
        check_term(said.term, now_s + SKEW_S)

    @property
    def lease_s(self) -> float:
        """The run's lease; the longest possible before the manifest is known."""
        return self.manifest.message.coordination.lease_s if self.manifest is not None else LEASE_LIFE_MAX_S

    def _life_s(self, kind: RecordKind) -> float:
        match kind:
            case RecordKind.PEERS:
                return PEER_LIFE_S
            case RecordKind.COORDINATOR:
                return self.lease_s
        return MANIFEST_LIFE_S

    def _check_lease(self, raw: bytes, subkey: str, expires_s: float, now_s: float) -> None:
        sealed = _verified(raw, Lease)
        if sealed.sender != subkey:
            raise PeerFault("sender is not the subkey")
        self.check_lease(sealed, now_s)
        if expires_s > sealed.message.until_ms / 1000 + SKEW_S:
            raise PeerFault("bad expiry", "the record outlives its lease")

    def _check_head(self, raw: bytes, subkey: str) -> None:
        sealed = _verified(raw, Announcement)
        if sealed.sender != subkey:
            raise PeerFault("sender is not the subkey")
        if sealed.message.run != self.run:
            raise PeerFault("foreign run")
        if self.manifest is None:
            raise PeerFault("no manifest yet")
        if subkey not in self.manifest.message.trainers:
            raise PeerFault("not a trainer")
        if sealed.message.version < self._head_version.get(subkey, 0):
            raise PeerFault("old head")
        self._head_version[subkey] = sealed.message.version

    def _check_peer(self, key: RecordKey, raw: bytes, subkey: str, expires_s: float, now_s: float) -> None:
        sealed = _verified(raw, CapacityAd)
        if sealed.sender != subkey:
            raise PeerFault("sender is not the subkey")
        if sealed.message.run != self.run:
            raise PeerFault("foreign run")
        shards = self.manifest.message.directory_shards if self.manifest else 1
        if key.shard != shard_of(subkey, shards):
            raise PeerFault("wrong shard")
        issued_s = sealed.message.issued_ms / 1000
        if issued_s > now_s + SKEW_S or expires_s > issued_s + PEER_LIFE_S + SKEW_S:
            raise PeerFault("bad expiry", "capacity outlives its issue")
        self._shards.setdefault(key.shard, _Shard()).admit(subkey, expires_s, len(raw), now_s)
