"""Ways to a version, and what is worth keeping: tables, and every way tried out on random chains."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence

import pytest

from protocols.messages import AdapterRef, Announcement, BlobRef, DeltaRef
from protocols.paths import Hop, cheapest, kept
from tests.samples import announcement

SEEDS = range(300)


def blob(name: str, size: int) -> BlobRef:
    return BlobRef(name.encode().ljust(32, b"."), size)


def entry(version: int, keyframe: int | None = None, delta: int | None = None, codec: str = "xor") -> Announcement:
    """A version with blobs of these sizes; `K3` and `D3` are the names of version 3's."""
    reference = AdapterRef(
        bytes(32),
        None if keyframe is None else blob(f"K{version}", keyframe),
        None if delta is None else DeltaRef(codec, blob(f"D{version}", delta)),
    )
    return announcement(version, adapter=reference).message


def name(root: bytes) -> str:
    return root.decode().rstrip(".")


def way(hops: list[Hop] | None) -> str | None:
    return None if hops is None else " ".join(name(hop.blob.root) for hop in hops)


def names(roots: set[bytes]) -> set[str]:
    return {name(root) for root in roots}


def having(*held: str) -> Callable[[bytes], bool]:
    return lambda root: name(root) in held


CHAIN = [entry(0, keyframe=100), *(entry(v, delta=10) for v in (1, 2, 3)), entry(4, 100, 10), entry(5, delta=10)]
SKIPPING = [entry(0, keyframe=100), entry(3, delta=10), entry(7, delta=10)]
BROKEN = [entry(0, keyframe=100), entry(1, delta=10, codec="from next year"), entry(2, delta=10)]
RAW = [entry(version, keyframe=100) for version in range(4)]
CASES = [
    # chain, target, held, on disk, way
    (CHAIN, 5, None, (), "K4 D5"),
    (CHAIN, 5, 4, (), "D5"),
    (CHAIN, 5, 3, (), "D4 D5"),
    (CHAIN, 5, 0, (), "D1 D2 D3 D4 D5"),
    (CHAIN, 5, 5, (), ""),
    (CHAIN, 3, 5, (), "K0 D1 D2 D3"),  # no delta leads back
    (CHAIN, 5, None, ("K0", "D1"), "K0 D1 D2 D3 D4 D5"),  # 40 bytes where K4 D5 takes 110
    (CHAIN, 5, None, ("K4", "D5"), "K4 D5"),
    (CHAIN, 5, 2, ("K4",), "K4 D5"),
    (CHAIN, 5, 3, ("D4",), "D4 D5"),  # as many bytes as K4 D5, and as many hops: nothing is read whole
    (CHAIN, 6, None, (), None),
    (CHAIN[2:4], 3, None, (), None),
    (CHAIN[2:4], 3, 2, (), "D3"),
    (CHAIN[2:4], 3, 1, (), None),  # the delta of the oldest known version is to one that is not known
    (SKIPPING, 7, 3, (), "D7"),
    (SKIPPING, 7, 5, (), "K0 D3 D7"),  # version 5 is not on this chain
    (BROKEN, 2, None, (), None),
    (BROKEN, 2, 1, (), "D2"),
    (BROKEN, 2, 0, (), None),
    (RAW, 3, 2, (), "K3"),
    ([], 0, None, (), None),
]


@pytest.mark.parametrize(("chain", "target", "held", "on_disk", "expected"), CASES)
def test_the_cheapest_way(
    chain: Sequence[Announcement], target: int, held: int | None, on_disk: tuple[str, ...], expected: str | None
) -> None:
    assert way(cheapest(chain, target, held, having(*on_disk))) == expected


def test_what_is_refused_is_gone_around_or_there_is_no_way() -> None:
    def without(*roots: str, held: int | None = None) -> str | None:
        return way(cheapest(CHAIN, 5, held, having(), {root.encode().ljust(32, b".") for root in roots}))

    assert without("K4") == "K0 D1 D2 D3 D4 D5"
    assert without("D4", held=3) == "K4 D5"
    assert without("D4", "K4", held=3) is None
    assert without("D5", held=4) is None


def test_a_hop_names_its_codec() -> None:
    assert cheapest(CHAIN, 5, None, having()) == [Hop(4, None, blob("K4", 100)), Hop(5, "xor", blob("D5", 10))]


def all_ways(chain: Sequence[Announcement], target: int, held: int | None) -> Iterator[list[Hop]]:
    """Every way by definition: a beginning, and then each delta until the target."""
    at = {each.version: number for number, each in enumerate(chain)}
    for start, each in enumerate(chain[: at[target] + 1]):
        deltas = [
            Hop(later.version, later.adapter.delta.codec, later.adapter.delta.blob)
            for later in chain[start + 1 : at[target] + 1]
            if later.adapter.delta is not None and later.adapter.delta.codec == "xor"
        ]
        if len(deltas) < at[target] - start:
            continue
        if each.version == held:
            yield deltas
        if each.adapter.keyframe is not None:
            yield [Hop(each.version, None, each.adapter.keyframe), *deltas]


def random_chain(rng: random.Random) -> list[Announcement]:
    versions = itertools.accumulate(rng.choice((1, 1, 1, 3)) for _ in range(rng.randint(1, 12)))
    sizes = (1, 5, 10, 10, 30)
    chain = []
    for version in versions:
        keyframe = rng.choice((40, 50, 60)) if rng.random() < 0.4 else None
        delta = rng.choice(sizes) if keyframe is None or rng.random() < 0.8 else None
        chain.append(entry(version, keyframe, delta, "xor" if rng.random() < 0.95 else "unknown"))
    return chain


@pytest.mark.parametrize("seed", SEEDS)
def test_no_way_is_cheaper_and_none_of_the_same_bytes_is_shorter(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng)
    versions = [each.version for each in chain]
    for _ in range(20):
        target, held = rng.choice(versions), rng.choice((None, *versions))
        stored = {f"{kind}{version}" for kind in "KD" for version in versions if rng.random() < 0.2}

        def cost(hops: list[Hop], stored: set[str] = stored) -> tuple[int, int]:
            return sum(hop.blob.size for hop in hops if name(hop.blob.root) not in stored), len(hops)

        found = cheapest(chain, target, held, having(*stored))
        ways = [cost(each) for each in all_ways(chain, target, held)]
        assert (None if found is None else cost(found)) == min(ways, default=None)


def test_kept_is_the_way_of_a_newcomer_and_what_latecomers_lack() -> None:
    assert names(kept(CHAIN, 0, 0)) == {"K4", "D5"}
    assert names(kept(CHAIN, 1, 10**6)) == {"K4", "D5"}
    assert names(kept(CHAIN, 2, 10**6)) == {"K4", "D5", "D4"}
    assert names(kept(CHAIN, 4, 10**6)) == {"K4", "D5", "D4", "D3", "D2"}
    assert names(kept(CHAIN, 99, 10**6)) == {"K4", "D5", "D4", "D3", "D2", "D1", "K0"}
    assert names(kept(RAW, 2, 10**6)) == {"K3", "K2"}
    assert kept([], 4, 10**6) == set()


def test_b35_the_oldest_are_dropped_first_and_the_way_to_the_head_never() -> None:
    assert names(kept(CHAIN, 99, 129)) == {"K4", "D5", "D4"}
    assert names(kept(CHAIN, 99, 130)) == {"K4", "D5", "D4", "D3"}
    assert names(kept(CHAIN, 99, 50)) == {"K4", "D5"}
    assert names(kept(RAW, 3, 250)) == {"K3", "K2"}


@pytest.mark.parametrize("seed", SEEDS)
def test_kept_never_loses_the_head_and_keeps_within_its_bounds(seed: int) -> None:
    rng = random.Random(seed)
    chain = random_chain(rng)
    size_of = {
        ref.root: ref.size
        for each in chain
        for ref in (each.adapter.keyframe, each.adapter.delta.blob if each.adapter.delta is not None else None)
        if ref is not None
    }
    head = chain[-1].version
    way_to_head = {hop.blob.root for hop in cheapest(chain, head, None, having()) or ()}
    before: set[bytes] = set()
    for bytes_max in range(0, 400, 20):
        roots = kept(chain, 5, bytes_max)
        assert way_to_head <= roots
        assert sum(size_of[root] for root in roots) <= max(bytes_max, sum(size_of[root] for root in way_to_head))
        assert before <= roots, "more room, and something else went"
        before = roots
        newest = {each.version for each in chain[-5:]}
        assert {int(name(root)[1:]) for root in roots - way_to_head} <= newest
