"""The rules of the DHT on virtual time: who may store what, where, for how long (cases B48, B101, B102)."""

import math
import random

import msgpack
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from protocols import directory
from protocols.directory import (
    HEAD_LIFE_S,
    LEASE_LIFE_MAX_S,
    MANIFEST_LIFE_S,
    PEER_LIFE_S,
    SKEW_S,
    DirectoryRules,
    RecordKey,
    RecordKind,
    shard_of,
)
from protocols.election import TERM_EPOCH_S, check_term
from protocols.envelopes import Sealed, seal
from protocols.faults import PeerFault
from protocols.identity import peer_id_of, public_bytes, run_id_of
from protocols.manifest import CoordinationSpec, Manifest
from protocols.messages import AdapterRef, Announcement, BlobRef, CapacityAd, Lease, TrainedOn

NOW_S = TERM_EPOCH_S + 1_000_000.0
TEN_YEARS_S = 10 * 365 * 86400.0


def key_of(number: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)


OWNER, TRAINER, PEER, STRANGER = map(key_of, range(1, 5))
RUN = run_id_of("demo", public_bytes(OWNER))
MANIFEST = RecordKey(RUN, RecordKind.MANIFEST)
HEAD = RecordKey(RUN, RecordKind.HEAD)
PEERS = RecordKey(RUN, RecordKind.PEERS)
COORDINATOR = RecordKey(RUN, RecordKind.COORDINATOR)
LEASE_S = 10.0


def name(key: Ed25519PrivateKey) -> str:
    return peer_id_of(public_bytes(key))


def stored(sealed: Sealed) -> bytes:
    return msgpack.packb(sealed.raw)


def manifest(revision: int = 1, signer: Ed25519PrivateKey = OWNER, **changes: object) -> bytes:
    content = Manifest(run=RUN, revision=revision, trainers=(name(TRAINER),), issued_ms=0)
    return stored(seal(signer, replace(content, **changes)))


def head(version: int = 0, signer: Ed25519PrivateKey = TRAINER, run: str = RUN) -> bytes:
    adapter = AdapterRef(digest=bytes(32), keyframe=BlobRef(root=bytes(32), size=1))
    trained_on = TrainedOn(count=0, max_lag=0, root=bytes(32))
    return stored(
        seal(
            signer,
            Announcement(
                run=run,
                version=version,
                parent=bytes(32),
                adapter=adapter,
                trained_on=trained_on,
                bound=4,
                created_ms=0,
            ),
        )
    )


def advert(signer: Ed25519PrivateKey = PEER, issued_s: float = NOW_S, run: str = RUN, **changes: object) -> bytes:
    content = CapacityAd(run=run, session=bytes(16), role="inference", issued_ms=int(issued_s * 1000))
    return stored(seal(signer, replace(content, **changes)))


def signed_lease(
    signer: Ed25519PrivateKey = TRAINER, term: int = 1, until_s: float = NOW_S + LEASE_S, **changes: object
) -> Sealed[Lease]:
    return seal(signer, replace(Lease(RUN, term, "claimed", int(until_s * 1000)), **changes))


def lease(*args: object, **changes: object) -> bytes:
    return stored(signed_lease(*args, **changes))


@pytest.fixture
def rules() -> DirectoryRules:
    rules = DirectoryRules(RUN)
    rules.check(MANIFEST, None, manifest(), NOW_S + 600, NOW_S)
    return rules


def refusal(
    rules: DirectoryRules, key: RecordKey, subkey: str | None, value: bytes, expires_s: float, now_s: float = NOW_S
) -> str:
    with pytest.raises(PeerFault) as caught:
        rules.check(key, subkey, value, expires_s, now_s)
    return caught.value.reason


# ---------------------------------------------------------------------- what stands


def test_honest_records_stand_and_may_be_stored_again(rules: DirectoryRules) -> None:
    for _ in range(2):
        rules.check(MANIFEST, None, manifest(), NOW_S + MANIFEST_LIFE_S, NOW_S)
        rules.check(HEAD, name(TRAINER), head(3), NOW_S + HEAD_LIFE_S, NOW_S)
        rules.check(PEERS, name(PEER), advert(), NOW_S + PEER_LIFE_S, NOW_S)
        rules.check(COORDINATOR, name(TRAINER), lease(), NOW_S + LEASE_S, NOW_S)


def test_keys_are_told_apart_and_cover_every_shard() -> None:
    texts = [key.text for key in DirectoryRules(RUN).keys()]  # noqa: SIM118
    assert texts[:4] == [f"{RUN}/manifest", f"{RUN}/head", f"{RUN}/coordinator", f"{RUN}/peers/0"]
    assert len(set(texts)) == len(texts) == 259
    assert {shard_of(name(key_of(number)), 8) for number in range(200)} == set(range(8))


# ---------------------------------------------------------------------- lifetimes


@pytest.mark.parametrize(
    ("key", "subkey", "value", "life_s"),
    [
        (MANIFEST, None, manifest(), MANIFEST_LIFE_S),
        (HEAD, name(TRAINER), head(), HEAD_LIFE_S),
        (PEERS, name(PEER), advert(), PEER_LIFE_S),
        (COORDINATOR, name(TRAINER), lease(until_s=NOW_S + LEASE_S + SKEW_S), LEASE_S),
    ],
)
def test_b48_a_record_lives_no_longer_than_its_kind_allows(
    rules: DirectoryRules, key: RecordKey, subkey: str | None, value: bytes, life_s: float
) -> None:
    for expires_s in (
        NOW_S + life_s + SKEW_S + 0.01,
        NOW_S + TEN_YEARS_S,
        NOW_S - SKEW_S - 0.01,
        math.inf,
        -math.inf,
        math.nan,
    ):
        assert refusal(rules, key, subkey, value, expires_s) == "bad expiry"
    rules.check(key, subkey, value, NOW_S + life_s + SKEW_S, NOW_S)


def test_b102_an_old_capacity_record_cannot_be_kept_alive_by_storing_it_again(rules: DirectoryRules) -> None:
    yesterday = advert(issued_s=NOW_S)
    rules.check(PEERS, name(PEER), yesterday, NOW_S + 60, NOW_S + 20)
    assert refusal(rules, PEERS, name(PEER), yesterday, NOW_S + 80, NOW_S + 40) == "bad expiry"
    assert refusal(rules, PEERS, name(PEER), yesterday, NOW_S + 90_000, NOW_S + 86_400) == "bad expiry"


def test_b48_a_clock_an_hour_ahead_is_refused(rules: DirectoryRules) -> None:
    assert refusal(rules, PEERS, name(PEER), advert(issued_s=NOW_S + 3600), NOW_S + 60) == "bad expiry"
    rules.check(PEERS, name(PEER), advert(issued_s=NOW_S + SKEW_S - 0.01), NOW_S + 60, NOW_S)


# ---------------------------------------------------------------------- other people's names


def test_b101_nobody_stores_under_another_peers_name(rules: DirectoryRules) -> None:
    assert refusal(rules, PEERS, name(PEER), advert(signer=STRANGER), NOW_S + 60) == "sender is not the subkey"
    assert refusal(rules, HEAD, name(TRAINER), head(signer=STRANGER), NOW_S + 60) == "sender is not the subkey"


def test_b101_only_the_manifests_trainers_announce(rules: DirectoryRules) -> None:
    assert refusal(rules, HEAD, name(STRANGER), head(signer=STRANGER), NOW_S + 60) == "not a trainer"
    assert refusal(DirectoryRules(RUN), HEAD, name(TRAINER), head(), NOW_S + 60) == "no manifest yet"


def test_b101_only_the_owner_writes_the_manifest() -> None:
    rules = DirectoryRules(RUN)
    assert refusal(rules, MANIFEST, None, manifest(signer=TRAINER), NOW_S + 60) == "foreign manifest"
    assert rules.manifest is None
    other = run_id_of("demo", public_bytes(STRANGER))
    assert refusal(rules, MANIFEST, None, manifest(signer=STRANGER, run=other), NOW_S + 60) == "foreign manifest"


def test_b102_records_of_another_run_are_refused(rules: DirectoryRules) -> None:
    other = run_id_of("other", public_bytes(OWNER))  # the same owner, the same trainer key
    assert refusal(rules, HEAD, name(TRAINER), head(run=other), NOW_S + 60) == "foreign run"
    assert refusal(rules, PEERS, name(PEER), advert(run=other), NOW_S + 60) == "foreign run"
    assert refusal(rules, MANIFEST, None, manifest(run=other), NOW_S + 60) == "foreign manifest"


def test_a_record_of_one_kind_is_not_one_of_another(rules: DirectoryRules) -> None:
    for key, subkey, value in ((HEAD, name(TRAINER), advert(signer=TRAINER)), (PEERS, name(PEER), head(signer=PEER))):
        assert refusal(rules, key, subkey, value, NOW_S + 60) == "bad signature", "the kind is part of what is signed"


def test_plain_records_and_dictionaries_do_not_replace_each_other(rules: DirectoryRules) -> None:
    assert refusal(rules, MANIFEST, name(OWNER), manifest(), NOW_S + 60) == "bad subkey"
    assert refusal(rules, HEAD, None, head(), NOW_S + 60) == "bad subkey"
    assert refusal(rules, PEERS, None, advert(), NOW_S + 60) == "bad subkey"


# ---------------------------------------------------------------------- leases


def lease_refusal(rules: DirectoryRules, sealed: Sealed[Lease], now_s: float = NOW_S) -> str:
    """Why it is refused, by gossip and in the DHT alike, whatever expiry the record is given."""
    with pytest.raises(PeerFault) as caught:
        rules.check_lease(sealed, now_s)
    for expires_s in (now_s, now_s + LEASE_S / 2, now_s + LEASE_S):
        assert refusal(rules, COORDINATOR, sealed.sender, stored(sealed), expires_s, now_s) == caught.value.reason
    return caught.value.reason


def test_b48_a_lease_that_reaches_into_the_future_is_refused_everywhere(rules: DirectoryRules) -> None:
    for ahead_s in (LEASE_S + SKEW_S + 0.01, 3600.0 + LEASE_S, TEN_YEARS_S):  # a hair, a clock an hour ahead, a liar
        sealed = signed_lease(until_s=NOW_S + ahead_s)
        assert lease_refusal(rules, sealed) == "bad expiry"
        assert refusal(rules, COORDINATOR, name(TRAINER), stored(sealed), NOW_S + ahead_s) == "bad expiry"
    rules.check_lease(signed_lease(until_s=NOW_S + LEASE_S + SKEW_S), NOW_S)


def test_b102_a_lease_that_has_run_out_is_refused(rules: DirectoryRules) -> None:
    for ago_s in (SKEW_S + 0.01, 86_400.0):
        assert lease_refusal(rules, signed_lease(until_s=NOW_S - ago_s)) == "bad expiry"
    rules.check_lease(signed_lease(until_s=NOW_S - SKEW_S), NOW_S)


def test_b48_a_record_that_outlives_its_lease_is_refused(rules: DirectoryRules) -> None:
    # Stored again by anybody, with a later expiry: a dead holder's lease is free after LEASE_S + SKEW_S at most.
    old = lease(until_s=NOW_S + LEASE_S)
    rules.check(COORDINATOR, name(TRAINER), old, NOW_S + LEASE_S + SKEW_S, NOW_S + LEASE_S)
    later = refusal(rules, COORDINATOR, name(TRAINER), old, NOW_S + LEASE_S + SKEW_S + 0.1, NOW_S + LEASE_S)
    assert later == "bad expiry"


@pytest.mark.parametrize("term", [1_000_000 + int(SKEW_S) + 1, 2**32 - 1])
def test_b48_a_term_ahead_of_its_time_is_refused_everywhere(rules: DirectoryRules, term: int) -> None:
    assert lease_refusal(rules, signed_lease(term=term)) == "term ahead of its time"


def test_b48_the_highest_term_that_may_be_claimed_holds_the_next_one_up_for_seconds_only(rules: DirectoryRules) -> None:
    top = 1_000_000 + int(SKEW_S)
    rules.check_lease(signed_lease(term=top), NOW_S)
    freed_s = NOW_S + LEASE_S
    above = signed_lease(STRANGER, top + 1, freed_s + LEASE_S)
    rules.check(MANIFEST, None, manifest(2, trainers=(name(TRAINER), name(STRANGER))), NOW_S + 600, NOW_S)
    rules.check_lease(above, freed_s)
    check_term(top + 1, NOW_S + 1 + SKEW_S)  # even had it fallen silent at once


def test_b48_a_leader_is_who_the_manifest_makes_eligible(rules: DirectoryRules) -> None:
    by_peer = signed_lease(PEER)
    assert lease_refusal(rules, by_peer) == "not eligible"
    assert lease_refusal(rules, signed_lease(OWNER)) == "not eligible"
    spec = CoordinationSpec(coordinators=(name(PEER),))
    rules.check(MANIFEST, None, manifest(2, coordination=spec), NOW_S + 600, NOW_S)
    rules.check(COORDINATOR, name(PEER), stored(by_peer), NOW_S + LEASE_S, NOW_S)
    rules.check(MANIFEST, None, manifest(3), NOW_S + 600, NOW_S)
    assert lease_refusal(rules, by_peer) == "not eligible", "a revision takes the right away"


def test_b101_nobody_stores_a_lease_under_another_candidates_name(rules: DirectoryRules) -> None:
    trainers = (name(TRAINER), name(STRANGER))
    rules.check(MANIFEST, None, manifest(2, trainers=trainers), NOW_S + 600, NOW_S)
    by_stranger = lease(STRANGER)
    assert refusal(rules, COORDINATOR, name(TRAINER), by_stranger, NOW_S + LEASE_S) == "sender is not the subkey"
    assert refusal(rules, COORDINATOR, None, lease(), NOW_S + LEASE_S) == "bad subkey"


def test_b102_a_lease_of_another_run_and_a_record_of_another_kind_are_refused(rules: DirectoryRules) -> None:
    other = run_id_of("other", public_bytes(OWNER))
    assert lease_refusal(rules, signed_lease(run=other)) == "foreign run"
    for key, value in ((COORDINATOR, head()), (COORDINATOR, advert(signer=TRAINER)), (HEAD, lease())):
        reason = refusal(rules, key, name(TRAINER), value, NOW_S + LEASE_S)
        assert reason in ("bad signature", "envelope too large"), "the kind is part of what is signed"


def test_before_the_manifest_is_known_no_lease_is_believed_and_none_may_outlive_the_longest() -> None:
    rules = DirectoryRules(RUN)
    assert rules.lease_s == LEASE_LIFE_MAX_S
    assert lease_refusal(rules, signed_lease()) == "no manifest yet"
    far_s = NOW_S + LEASE_LIFE_MAX_S + SKEW_S + 1
    assert refusal(rules, COORDINATOR, name(TRAINER), lease(), far_s) == "bad expiry"


@pytest.mark.parametrize("lease_s", [6.0, 60.0, LEASE_LIFE_MAX_S])
def test_a_lease_is_as_long_as_the_manifest_says(rules: DirectoryRules, lease_s: float) -> None:
    rules.check(MANIFEST, None, manifest(2, coordination=CoordinationSpec(lease_s=lease_s)), NOW_S + 600, NOW_S)
    assert rules.lease_s == lease_s
    rules.check(COORDINATOR, name(TRAINER), lease(until_s=NOW_S + lease_s), NOW_S + lease_s, NOW_S)
    with pytest.raises(PeerFault, match="bad expiry"):
        rules.check_lease(signed_lease(until_s=NOW_S + lease_s + SKEW_S + 1), NOW_S)


# ---------------------------------------------------------------------- never back


def test_b45_manifest_and_head_never_go_back(rules: DirectoryRules) -> None:
    rules.check(MANIFEST, None, manifest(revision=5), NOW_S + 600, NOW_S)
    assert refusal(rules, MANIFEST, None, manifest(revision=4), NOW_S + 600) == "old manifest"
    assert rules.manifest is not None
    assert rules.manifest.message.revision == 5
    rules.check(HEAD, name(TRAINER), head(9), NOW_S + 600, NOW_S)
    assert refusal(rules, HEAD, name(TRAINER), head(0), NOW_S + 600) == "old head"
    rules.check(HEAD, name(TRAINER), head(10), NOW_S + 600, NOW_S)


def test_a_new_revision_takes_a_trainers_right_away(rules: DirectoryRules) -> None:
    rules.check(HEAD, name(TRAINER), head(1), NOW_S + 600, NOW_S)
    rules.check(MANIFEST, None, manifest(revision=2, trainers=(name(STRANGER),)), NOW_S + 600, NOW_S)
    assert refusal(rules, HEAD, name(TRAINER), head(2), NOW_S + 600) == "not a trainer"
    rules.check(HEAD, name(STRANGER), head(1, signer=STRANGER), NOW_S + 600, NOW_S)


# ---------------------------------------------------------------------- shards


def test_a_peer_belongs_to_one_shard(rules: DirectoryRules) -> None:
    rules.check(MANIFEST, None, manifest(revision=2, directory_shards=16), NOW_S + 600, NOW_S)
    right = shard_of(name(PEER), 16)
    rules.check(RecordKey(RUN, RecordKind.PEERS, right), name(PEER), advert(), NOW_S + 60, NOW_S)
    for shard in set(range(256)) - {right}:
        assert (
            refusal(rules, RecordKey(RUN, RecordKind.PEERS, shard), name(PEER), advert(), NOW_S + 60) == "wrong shard"
        )


def test_a_full_shard_takes_renewals_and_has_room_when_records_expire(
    rules: DirectoryRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directory, "PEERS_PER_SHARD_MAX", 3)
    keys = [key_of(number) for number in range(10, 14)]
    for key in keys[:3]:
        rules.check(PEERS, name(key), advert(key), NOW_S + 60, NOW_S)
    assert refusal(rules, PEERS, name(keys[3]), advert(keys[3]), NOW_S + 60) == "directory full"
    for key in keys[:2]:
        rules.check(PEERS, name(key), advert(key, NOW_S + 20), NOW_S + 80, NOW_S + 20)
    later_s = NOW_S + 61
    rules.check(PEERS, name(keys[3]), advert(keys[3], later_s), later_s + 60, later_s)
    assert refusal(rules, PEERS, name(keys[2]), advert(keys[2], later_s), later_s + 60, later_s) == "directory full"


def test_a_shard_stays_small_enough_to_be_read_however_large_its_records(
    rules: DirectoryRules, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 4 KB records of 500 made-up peers would make a dictionary that no message can carry.
    fat = advert(addresses=tuple("x" * 256 for _ in range(12)))
    monkeypatch.setattr(directory, "SHARD_BYTES_MAX", len(fat) + 1000)
    rules.check(PEERS, name(PEER), fat, NOW_S + 60, NOW_S)
    other = advert(STRANGER, addresses=tuple("x" * 256 for _ in range(12)))
    assert refusal(rules, PEERS, name(STRANGER), other, NOW_S + 60) == "directory full"
    rules.check(PEERS, name(STRANGER), advert(STRANGER), NOW_S + 60, NOW_S)
    rules.check(PEERS, name(PEER), advert(), NOW_S + 60, NOW_S)
    rules.check(PEERS, name(STRANGER), other, NOW_S + 60, NOW_S)


def test_full_size_shard_fits_in_a_message() -> None:
    per_record = 1 + 54 + 5 + 9 + 3  # array, subkey, two bin headers, expiry, spare
    whole = directory.SHARD_BYTES_MAX + directory.PEERS_PER_SHARD_MAX * per_record
    assert whole < 2 * 1024 * 1024


# ---------------------------------------------------------------------- any bytes


@pytest.mark.parametrize("seed", range(10))
def test_s7_no_bytes_raise_anything_but_peerfault(rules: DirectoryRules, seed: int) -> None:
    rng = random.Random(seed)
    honest = [
        (MANIFEST, None, manifest()),
        (HEAD, name(TRAINER), head(1)),
        (PEERS, name(PEER), advert()),
        (COORDINATOR, name(TRAINER), lease()),
    ]
    refused = 0
    for _ in range(400):
        key, subkey, good = rng.choice(honest)
        raw = bytearray(good)
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(raw)) if raw else 0
            match rng.randrange(4):
                case 0:
                    raw[at : at + 1] = bytes(byte ^ 1 << rng.randrange(8) for byte in raw[at : at + 1])
                case 1:
                    del raw[at : at + 1]
                case 2:
                    raw.insert(at, rng.randrange(256))
                case 3:
                    raw = raw[: at + 1]
        try:
            rules.check(key, subkey, bytes(raw), NOW_S + 5, NOW_S)
        except PeerFault:
            refused += 1
        else:
            assert bytes(raw) == good, "a changed record must not stand"
    assert refused > 390


@pytest.mark.parametrize("subkey", ["", "x", "\0", "é" * 64, name(STRANGER)[:-1], None])
def test_odd_subkeys_are_refused(rules: DirectoryRules, subkey: str | None) -> None:
    assert refusal(rules, PEERS, subkey, advert(), NOW_S + 60) in ("sender is not the subkey", "bad subkey")
    assert refusal(rules, HEAD, subkey, head(), NOW_S + 60) in ("sender is not the subkey", "bad subkey")
