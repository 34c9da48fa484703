"""Blobs in chunks: no byte is kept that its hash does not name; what is asked of whom, and offered to whom.

Whole transfers in virtual time are in tests/test_transfer_swarm.py.
"""

import hashlib
import random
import time
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.adapters import ADAPTER_BYTES_MAX
from protocols.faults import LocalFault, PeerFault
from protocols.messages import CHUNKS_MAX, BlobRef
from protocols.transfer import (
    CHUNK_BYTES,
    HASH_BYTES,
    IN_FLIGHT_MAX,
    IN_FLIGHT_MIN,
    IN_FLIGHT_TOTAL_MIN,
    LATE_FACTOR,
    LATE_MIN_S,
    LATE_UNKNOWN_S,
    PROMISE_S,
    SEEDED_GROWTH,
    SEEDED_MAX,
    SEEDED_MIN,
    SLOW_S,
    STALL_S,
    WAIT_S,
    Arrived,
    Ask,
    ChunkList,
    Event,
    Leave,
    Lost,
    Offered,
    Schedule,
    Seeding,
    Ticked,
    blob_ref,
    chunk_hashes,
    from_bitmap,
    num_chunks,
    root_of,
    to_bitmap,
)
from tests.samples import indexes

BLOB = random.Random(1).randbytes(3 * CHUNK_BYTES + 1000)
HASHES = chunk_hashes(BLOB)


def chunk(index: int, blob: bytes = BLOB) -> bytes:
    return blob[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def started() -> ChunkList:
    chunks = ChunkList(blob_ref(BLOB))
    chunks.take_hashes(HASHES)
    return chunks


def flipped(raw: bytes, bit: int) -> bytes:
    return raw[: bit // 8] + bytes([raw[bit // 8] ^ 1 << bit % 8]) + raw[bit // 8 + 1 :]


# ---------------------------------------------------------------------- hashes


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_any_size_round_trips(size: int) -> None:
    blob = BLOB[:size]
    chunks = ChunkList(blob_ref(blob))
    chunks.take_hashes(chunk_hashes(blob))
    assert chunks.count == num_chunks(size) == chunks.all.bit_count()
    for index in range(chunks.count):
        assert chunks.size(index) == len(chunk(index, blob))
        chunks.check(index, chunk(index, blob))
        chunks.check(index, memoryview(chunk(index, blob)))
    assert chunks.bytes_of(chunks.all) == size


def test_bytes_of_a_set_count_the_short_last_chunk() -> None:
    chunks = started()
    assert [chunks.bytes_of(each) for each in (0, 0b1, 0b1000, 0b1010)] == [
        0,
        CHUNK_BYTES,
        1000,
        CHUNK_BYTES + 1000,
    ]


def test_a_root_names_size_and_chunks() -> None:
    roots = {
        blob_ref(BLOB).root,
        root_of(len(BLOB) + 1, HASHES),
        root_of(len(BLOB), HASHES[:-1] + b"x"),
        root_of(0, b""),
    }
    assert len(roots) == 4


@pytest.mark.parametrize("index", range(4))
def test_b30_a_flipped_bit_in_any_chunk_is_refused(index: int) -> None:
    chunks, good = started(), chunk(index)
    for bit in (0, 8 * len(good) // 2, 8 * len(good) - 1):
        with pytest.raises(PeerFault, match=f"wrong chunk: {index} of 4"):
            chunks.check(index, flipped(good, bit))
    chunks.check(index, good)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.999])
def test_b30_a_cut_chunk_is_refused(share: float) -> None:
    chunks = started()
    with pytest.raises(PeerFault, match="wrong chunk"):
        chunks.check(0, chunk(0)[: int(share * CHUNK_BYTES)])
    with pytest.raises(PeerFault, match="wrong chunk"):
        chunks.check(3, chunk(3) + b"\0")


def test_b30_every_flipped_bit_of_the_hash_list_is_refused() -> None:
    chunks = ChunkList(blob_ref(BLOB))
    for bit in range(8 * len(HASHES)):
        with pytest.raises(PeerFault, match="hash list"):
            chunks.take_hashes(flipped(HASHES, bit))
    for hashes in (HASHES[:-HASH_BYTES], HASHES + bytes(HASH_BYTES), HASHES[:-1], b""):
        with pytest.raises(PeerFault, match="hash list"):
            chunks.take_hashes(hashes)
    assert chunks.hashes is None
    chunks.take_hashes(HASHES)


def test_b30_an_older_valid_blob_is_refused_as_a_whole_and_by_chunk() -> None:
    older = random.Random(2).randbytes(len(BLOB))
    with pytest.raises(PeerFault, match="hash list"):
        ChunkList(blob_ref(BLOB)).take_hashes(chunk_hashes(older))
    for index in range(4):
        with pytest.raises(PeerFault, match="wrong chunk"):
            started().check(index, chunk(index, older))


def test_b30_a_chunk_in_the_place_of_another_is_refused() -> None:
    with pytest.raises(PeerFault, match="wrong chunk"):
        started().check(0, chunk(1))


def test_a_signed_list_that_lies_about_the_size_is_refused() -> None:
    # A trainer can sign a root over hashes of chunks that are not of the size they must have.
    hashes = hashlib.sha256(b"short").digest() + hashlib.sha256(b"x").digest()
    size = CHUNK_BYTES + 1
    chunks = ChunkList(BlobRef(root_of(size, hashes), size))
    chunks.take_hashes(hashes)
    with pytest.raises(PeerFault, match="5 bytes"):
        chunks.check(0, b"short")
    chunks.check(1, b"x")


def test_a_chunk_before_the_list_is_our_own_fault() -> None:
    with pytest.raises(LocalFault):
        ChunkList(blob_ref(BLOB)).check(0, chunk(0))


def test_a_blob_over_the_limit_is_refused_before_a_byte_is_fetched() -> None:
    assert ChunkList(BlobRef(bytes(32), ADAPTER_BYTES_MAX)).count == CHUNKS_MAX
    for size in (ADAPTER_BYTES_MAX + 1, 2**48 - 1):
        with pytest.raises(PeerFault, match="blob too large"):
            ChunkList(BlobRef(bytes(32), size))


@given(st.integers(0, CHUNKS_MAX), st.data())
def test_bitmaps_round_trip_and_bits_behind_the_end_are_ignored(count: int, data: st.DataObject) -> None:
    chunks = data.draw(st.integers(0, (1 << count) - 1))
    bitmap = to_bitmap(chunks)
    assert len(bitmap) <= (count + 7) // 8
    assert from_bitmap(bitmap, count) == chunks
    assert sum(1 << index for index in indexes(chunks)) == chunks
    padded = chunks | 0b101 << count
    assert from_bitmap(to_bitmap(padded), count) == chunks


def test_the_first_chunk_is_the_lowest_bit_of_the_first_byte() -> None:
    assert to_bitmap(0b1_0000_0010) == bytes([0b10, 0b1])
    assert list(indexes(0b1_0000_0010)) == [1, 8]


# ---------------------------------------------------------------------- what is asked of whom


class Asker:
    """A schedule, with its asks by source and what it left."""

    def __init__(self, count: int, have: int = 0, seed: int = 0) -> None:
        self.schedule = Schedule(count, have, random.Random(seed))
        self.now_s = 100.0
        self.asks: dict[str, list[int]] = {}
        self.left: dict[str, str] = {}

    def handle(self, *events: Event) -> "Asker":
        for event in events:
            for action in self.schedule.handle(event, self.now_s):
                match action:
                    case Ask(source, index):
                        assert source not in self.left
                        self.asks.setdefault(source, []).append(index)
                    case Leave(source, reason):
                        self.left[source] = reason
        return self

    def wait(self, for_s: float, *heard: str, of_chunk: bool = True) -> "Asker":
        """Time passes, in ticks; these sources are heard."""
        until_s = self.now_s + for_s
        while self.now_s < until_s:
            self.now_s = min(self.now_s + 0.25, until_s)
            for source in heard:
                self.schedule.heard(source, of_chunk, self.now_s)
            self.handle(Ticked())
        return self

    def pump(self, source: str, times: int, chunk_s: float) -> None:
        """So many chunks arrive, the oldest asked first."""
        for _ in range(times):
            index = next(index for index in self.asks[source] if self.schedule.asked(source, index))
            self.now_s += chunk_s
            self.schedule.heard(source, True, self.now_s)
            self.handle(Arrived(source, index))

    def in_flight(self, source: str) -> int:
        return sum(self.schedule.asked(source, index) for index in self.asks.get(source, []))


@pytest.mark.parametrize("seed", range(20))
def test_the_rarest_chunk_is_asked_for_first(seed: int) -> None:
    asker = Asker(6, seed=seed).handle(Offered("b", 0b001111), Offered("a", 0b111111))
    assert set(asker.asks["a"]) == {4, 5}  # nobody else offers these two


@given(st.integers(1, 255), st.lists(st.integers(0, 255), max_size=3), st.integers(0, 2**32))
def test_rarest_counts_every_source(offer: int, others: list[int], seed: int) -> None:
    asker = Asker(8 + 2 * len(others), seed=seed)
    for n, other in enumerate(others):  # each is busy with two chunks that only it has
        own = 0b11 << (8 + 2 * n)
        asker.handle(Offered(f"other {n}", own), Offered(f"other {n}", own | other))
    asker.handle(Offered("a", offer))
    count = {index: sum(other >> index & 1 for other in others) for index in indexes(offer)}
    assert sorted(count[index] for index in asker.asks["a"]) == sorted(count.values())[:IN_FLIGHT_MIN]


def test_equally_rare_chunks_are_drawn_by_lot() -> None:
    first = [Asker(32, seed=seed).handle(Offered("a", (1 << 32) - 1)).asks["a"][0] for seed in range(50)]
    assert len(set(first)) > 20


def test_nothing_is_asked_for_that_is_here_or_not_offered() -> None:
    asker = Asker(8, have=0b00001111).handle(Offered("a", 0b00111100))
    assert sorted(asker.asks["a"]) == [4, 5]
    assert Asker(8).handle(Offered("a", 0)).asks == {}
    assert Asker(3).handle(Offered("a", 0b1000)).asks == {}  # a bit behind the end


def test_no_chunk_is_asked_for_twice_while_it_is_not_late() -> None:
    asker = Asker(4)
    for source in "abcd":
        asker.handle(Offered(source, 0b1111)).wait(0.4)
    asked = [index for indexes_of in asker.asks.values() for index in indexes_of]
    assert sorted(asked) == [0, 1, 2, 3]


def test_a_late_chunk_is_asked_for_elsewhere_when_it_is_late_with_all_that_were_asked() -> None:
    asker = Asker(1).handle(Offered("a", 1), Offered("b", 1), Offered("c", 1))
    for asked in range(1, 4):
        assert sum(len(indexes_of) for indexes_of in asker.asks.values()) == asked
        asker.wait(LATE_UNKNOWN_S - 0.5, *"abc")
        assert sum(len(indexes_of) for indexes_of in asker.asks.values()) == asked
        asker.wait(1.0, *"abc")
    assert asker.asks == {"a": [0], "b": [0], "c": [0]}
    asker.wait(4 * LATE_UNKNOWN_S, *"abc")
    assert asker.asks == {"a": [0], "b": [0], "c": [0]}  # none is asked twice
    asker.handle(Arrived("b", 0))
    assert asker.left == {"a": "overtaken", "c": "overtaken"}  # what they still send would come twice
    assert asker.schedule.done


def test_who_is_late_is_asked_for_nothing_more_and_keeps_nothing_from_others() -> None:
    asker = Asker(40).handle(*(Offered(f"s{n}", (1 << 40) - 1) for n in range(4)))
    assert sum(len(asked) for asked in asker.asks.values()) == IN_FLIGHT_TOTAL_MIN
    asker.wait(LATE_UNKNOWN_S + 0.5, "s0", "s1", "s2", "s3")
    before = {source: list(asked) for source, asked in asker.asks.items()}
    asker.handle(Offered("new", (1 << 40) - 1))
    assert {source: asked for source, asked in asker.asks.items() if source != "new"} == before
    assert len(asker.asks["new"]) == IN_FLIGHT_MIN


def test_late_is_some_times_the_usual_and_not_less_than_a_moment() -> None:
    for chunk_s, late_s in ((0.01, LATE_MIN_S), (1.0, LATE_FACTOR * 2.0)):  # two in flight: each waits for the other
        asker = Asker(40).handle(Offered("a", (1 << 40) - 1))
        asker.pump("a", 20, chunk_s)
        flying = [index for index in asker.asks["a"] if asker.schedule.asked("a", index)]
        asker.handle(Offered("b", sum(1 << index for index in flying)))
        asker.wait(0.6 * late_s, "a")
        assert "b" not in asker.asks
        asker.wait(0.6 * late_s, "a")
        assert asker.asks["b"][0] in flying


def test_a_sparing_source_is_asked_only_for_what_no_other_offers() -> None:
    asker = Asker(4).handle(Offered("other", 0b0011), Offered("trainer", 0b1110, sparing=True))
    assert sorted(asker.asks["trainer"]) == [2, 3]
    asker = Asker(4).handle(Offered("other", 0b1111), Offered("trainer", 0b1111, sparing=True))
    assert "trainer" not in asker.asks
    assert len(asker.asks["other"]) == IN_FLIGHT_MIN  # the rest is its too, later
    asker.handle(Lost("other"))
    assert len(asker.asks["trainer"]) == IN_FLIGHT_MIN


def test_a_sparing_source_is_asked_when_those_who_offer_are_late() -> None:
    asker = Asker(4).handle(Offered("other", 0b1111), Offered("trainer", 0b1111, sparing=True))
    asker.wait(LATE_UNKNOWN_S + 0.5, "other")
    assert set(asker.asks["trainer"]) & set(range(4)) - set(asker.asks["other"])


def test_two_sparing_sources_do_not_wait_for_each_other() -> None:
    both = (Offered("a", 0b11, sparing=True), Offered("b", 0b11, sparing=True))
    assert sum(len(asked) for asked in Asker(2).handle(*both).asks.values()) == 2


def test_a_new_source_has_two_in_flight_and_a_quick_one_more() -> None:
    asker = Asker(1000).handle(Offered("a", (1 << 1000) - 1))
    assert asker.in_flight("a") == IN_FLIGHT_MIN
    asker.pump("a", 50, 0.001)
    assert asker.in_flight("a") == IN_FLIGHT_MAX
    slow = Asker(1000).handle(Offered("a", (1 << 1000) - 1))
    slow.pump("a", 50, 1.0)
    assert IN_FLIGHT_MIN <= slow.in_flight("a") <= IN_FLIGHT_MIN + 2  # a round trip is two chunks here


def test_what_is_in_flight_everywhere_is_bound_and_evenly_shared() -> None:
    asker = Asker(100)
    for n in range(10):
        asker.schedule.handle(Offered(f"s{n}", 0), asker.now_s)
    for n in range(10):
        asker.handle(Offered(f"s{n}", (1 << 100) - 1))
    assert sum(len(asked) for asked in asker.asks.values()) == IN_FLIGHT_TOTAL_MIN


def test_b27_a_source_that_sends_no_byte_is_stalled() -> None:
    asker = Asker(4).handle(Offered("a", 0b1111)).wait(STALL_S - 0.5)
    assert asker.left == {}
    asker.wait(1.0)
    assert asker.left == {"a": "stalled"}
    assert Asker(4).handle(Offered("a", 0)).wait(10 * STALL_S).left == {}  # nothing was asked of it


def test_b27_signs_of_life_help_for_a_while() -> None:
    asker = Asker(4).handle(Offered("a", 0b1111)).wait(WAIT_S - 0.5, "a", of_chunk=False)
    assert asker.left == {}
    assert asker.wait(1.0, "a", of_chunk=False).left == {"a": "stalled"}


def test_b27_a_source_that_drips_is_slow() -> None:
    asker = Asker(4).handle(Offered("a", 0b1111)).wait(SLOW_S - 0.5, "a")
    assert asker.left == {}
    assert asker.wait(1.0, "a").left == {"a": "slow"}


def test_what_a_lost_source_was_asked_for_is_free() -> None:
    asker = Asker(2).handle(Offered("a", 0b11), Offered("b", 0b11))
    assert asker.asks == {"a": asker.asks["a"]}
    asker.handle(Lost("a"))
    assert sorted(asker.asks["b"]) == [0, 1]
    asker.handle(Lost("a"), Lost("nobody"))  # twice is nothing


def test_nothing_is_asked_of_a_source_that_was_left() -> None:
    asker = Asker(8).handle(Offered("a", 0xFF)).wait(STALL_S + 1)
    assert asker.left == {"a": "stalled"}
    asked = list(asker.asks["a"])
    asker.schedule.heard("a", True, asker.now_s)
    asker.wait(10.0).handle(Arrived("a", asked[0]), Lost("a"))
    assert asker.asks["a"] == asked
    assert asker.schedule.have == 1 << asked[0]  # what still came of it is kept


def test_offered_says_what_is_missing_and_to_be_had() -> None:
    asker = Asker(4, have=0b0001).handle(Offered("a", 0b0011), Offered("b", 0b0110))
    assert asker.schedule.offered == 0b0110
    asker.handle(Lost("b"))
    assert asker.schedule.offered == 0b0010


@pytest.mark.parametrize("count", [0, 1, 40])
def test_done_when_every_chunk_is_here(count: int) -> None:
    asker = Asker(count).handle(Offered("a", (1 << count) - 1))
    for arrived in range(count):
        assert not asker.schedule.done
        asker.pump("a", 1, 0.01)
        assert asker.schedule.have.bit_count() == arrived + 1
    assert asker.schedule.done
    assert sorted(asker.asks.get("a", [])) == list(range(count))


# ---------------------------------------------------------------------- what is offered to whom


def offered(seeding: Seeding, asker: str, now_s: float) -> set[int]:
    return set(indexes(seeding.offer(asker, now_s)))


def sent(seeding: Seeding, asker: str, index: int, now_s: float, took_s: float = 0.1) -> None:
    """Asked for, sent and acknowledged."""
    seeding.asked(asker, index, now_s)
    seeding.sent(asker, index, took_s, now_s)
    seeding.has(asker, 1 << index)


def test_each_asker_is_offered_chunks_that_nobody_else_is() -> None:
    seeding = Seeding(32, random.Random(0))
    seen: set[int] = set()
    for n in range(8):
        seeding.joined(f"{n}", 0)
        mine = offered(seeding, f"{n}", 0.0)
        assert len(mine) == SEEDED_MIN
        assert not mine & seen
        seen |= mine


def test_no_chunk_is_repeated_while_there_is_one_that_nobody_was_promised() -> None:
    seeding, now_s = Seeding(100, random.Random(0)), 0.0
    taken: dict[str, set[int]] = {asker: set() for asker in "abc"}
    for asker in taken:
        seeding.joined(asker, 0)
    order: list[int] = []
    while set().union(*(offered(seeding, asker, now_s) for asker in taken)) != set(range(100)):
        for asker, mine in taken.items():
            now_s += 0.05
            index = min(offered(seeding, asker, now_s) - mine)
            sent(seeding, asker, index, now_s)
            mine.add(index)
            order.append(index)
    assert len(order) == len(set(order)) > 20


def test_who_takes_more_is_offered_more_up_to_a_bound() -> None:
    seeding = Seeding(1000, random.Random(0))
    seeding.joined("a", 0)
    taken: set[int] = set()
    for _ in range(200):
        index = min(offered(seeding, "a", 0.0) - taken)
        sent(seeding, "a", index, 0.0)
        taken.add(index)
        pending = len(offered(seeding, "a", 0.0) - taken)
        assert pending == min(SEEDED_MAX, SEEDED_MIN + len(taken) // SEEDED_GROWTH)


def test_what_an_asker_has_is_not_offered_to_it() -> None:
    seeding = Seeding(8, random.Random(0))
    seeding.joined("a", 0b11110000)
    seeding.has("a", 0b0011)
    assert offered(seeding, "a", 0.0) == {2, 3}


def test_what_was_sent_is_left_to_the_askers_to_spread_for_a_while() -> None:
    seeding = Seeding(1, random.Random(0))
    for asker in "ab":
        seeding.joined(asker, 0)
    assert offered(seeding, "a", 0.0) == {0}
    assert offered(seeding, "b", 0.0) == set()
    sent(seeding, "a", 0, now_s=1.0, took_s=0.5)
    assert offered(seeding, "b", 1.0 + 0.9 * 0.5) == set()
    assert seeding.wakes_s() <= 1.0 + 0.5
    assert offered(seeding, "b", 1.0 + 1.1 * 0.5) == {0}


def test_a_promise_that_is_not_taken_does_not_last() -> None:
    seeding = Seeding(2, random.Random(0))
    for asker in "ab":
        seeding.joined(asker, 0)
    assert offered(seeding, "a", 0.0) == {0, 1}
    assert offered(seeding, "b", 0.9 * PROMISE_S) == set()
    assert offered(seeding, "b", 1.1 * PROMISE_S) == {0, 1}
    assert offered(seeding, "a", 1.1 * PROMISE_S) == {0, 1}  # offers only grow


def test_what_an_asker_that_left_was_promised_is_free() -> None:
    seeding = Seeding(2, random.Random(0))
    for asker in "ab":
        seeding.joined(asker, 0)
    assert offered(seeding, "a", 0.0) == {0, 1}
    seeding.left("a")
    seeding.left("a")  # twice is nothing
    assert offered(seeding, "b", 0.0) == {0, 1}
    seeding.sent("a", 0, 0.1, 0.0)  # counted all the same: it went out


def test_what_an_asker_found_elsewhere_is_free_and_it_is_offered_another() -> None:
    seeding = Seeding(8, random.Random(0))
    seeding.joined("a", 0)
    first = offered(seeding, "a", 0.0)
    seeding.has("a", 1 << min(first))
    assert len(offered(seeding, "a", 0.0) - first) == 1
    seeding.joined("b", ~(1 << min(first)) & 0xFF)
    assert offered(seeding, "b", 0.0) == {min(first)}


# ---------------------------------------------------------------------- what it costs


def test_an_event_of_the_largest_blob_takes_no_time_worth_mentioning() -> None:
    # 6,144 chunks from 10 sources: about 45 us an event on a desktop core. The bound is wide for a busy machine.
    count, rng, took_s = CHUNKS_MAX, random.Random(0), list[float]()
    schedule, now_s, flying = Schedule(count, 0, rng), 0.0, list[Ask]()

    def handle(event: Event) -> None:
        begun_s = time.perf_counter()
        actions = schedule.handle(event, now_s)
        took_s.append(time.perf_counter() - begun_s)
        flying.extend(action for action in actions if isinstance(action, Ask))

    for n in range(10):
        handle(Offered(f"s{n}", (1 << count) - 1 if n < 3 else rng.getrandbits(count), sparing=n == 0))
    for _ in range(2000):
        now_s += 0.001
        ask = flying.pop(0)
        handle(Arrived(ask.source, ask.index))
    assert median(took_s) < 500e-6

    seeding, took_s = Seeding(count, rng), []
    for n in range(24):
        seeding.joined(f"{n}", 0)
    for turn in range(2000):
        begun_s = time.perf_counter()
        chunks = seeding.offer(f"{turn % 24}", turn / 1000)
        sent(seeding, f"{turn % 24}", chunks.bit_length() - 1, turn / 1000)
        took_s.append(time.perf_counter() - begun_s)
    assert median(took_s) < 500e-6
