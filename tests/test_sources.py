"""Whom a peer asks for a version: holders, the trainers, and those that may be fetching it too."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from protocols.envelopes import seal
from protocols.messages import CapacityAd, Role
from swarm.neighbourhood import SOURCES, Neighbourhood
from tests.samples import RUN, STRANGER

ME = "me"
TRAINERS = ["trainer 1", "trainer 2"]


class Surroundings:
    """A neighbourhood with advertisements of our choice."""

    def __init__(self, seed: int = 0) -> None:
        self.ignored: set[str] = set()
        node = SimpleNamespace(session=seed.to_bytes(16, "big"), peer_id=ME, neighbours={})
        follower: Any = SimpleNamespace(
            node=node, trainers=lambda: list(TRAINERS), ignores=lambda peer: peer in self.ignored
        )
        self.near = Neighbourhood(follower)

    def add(
        self,
        name: str,
        version: int | None,
        storage: bool = True,
        role: Role = "inference",
        dialable: bool = True,
    ) -> None:
        ad = CapacityAd(
            run=RUN,
            session=bytes(16),
            role=role,
            issued_ms=0,
            version=version,
            storage=storage,
            addresses=(f"/ip4/203.0.113.7/tcp/4001/p2p/{name}",) if dialable else (),
        )
        self.near.ads[name] = seal(STRANGER, ad)
        self.near.heard_of(name, version)

    def crowd(self, kind: str, count: int, version: int | None) -> set[str]:
        names = {f"{kind} {number}" for number in range(count)}
        for name in sorted(names):
            self.add(name, version)
        return names


def test_holders_first_then_the_trainers_then_those_who_may_be_fetching_it_too() -> None:
    around = Surroundings()
    holders, others = around.crowd("holder", 3, 7), around.crowd("other", 20, 6)
    found = around.near.sources(7)
    assert set(found[:3]) == holders
    assert found[3:5] == TRAINERS
    assert set(found[5:]) <= others
    assert len(found) == SOURCES + len(TRAINERS) == len(set(found))


def test_never_too_many_and_everybody_has_a_turn() -> None:
    around = Surroundings()
    holders = around.crowd("holder", 40, 7)
    around.crowd("other", 40, None)
    calls = [around.near.sources(7) for _ in range(200)]
    assert all(len(found) == SOURCES + len(TRAINERS) for found in calls)
    turns = Counter(peer for found in calls for peer in found)
    assert set(turns) == holders | set(TRAINERS)
    assert max(turns[peer] for peer in holders) < 3 * 200 * SOURCES / 40


def test_who_came_meanwhile_is_among_them() -> None:
    around = Surroundings()
    assert around.near.sources(7) == TRAINERS
    around.add("newcomer", None)
    assert "newcomer" in around.near.sources(7)
    around.near.heard_of("newcomer", 7)
    assert around.near.sources(7)[0] == "newcomer"


def test_whom_nobody_can_dial_is_asked_only_over_a_connection_that_is_there() -> None:
    around = Surroundings()
    around.add("behind a NAT", 7, dialable=False)
    around.add("another", 7, dialable=False)
    assert around.near.sources(7) == TRAINERS
    around.near.told_of(("another",), 7)
    assert around.near.sources(7) == TRAINERS, "the coordinator's word opens no way"
    around.near.linked = frozenset({"behind a NAT"})
    assert around.near.sources(7) == ["behind a NAT", *TRAINERS]


@pytest.mark.parametrize("seed", range(20))
def test_whom_the_coordinator_named_is_asked_in_any_case(seed: int) -> None:
    around = Surroundings(seed)
    around.crowd("holder", 40, 7)
    around.near.told_of(("holder 3", "stranger", TRAINERS[0], ME), 7)
    found = around.near.sources(7)
    assert {"holder 3", "stranger"} <= set(found)
    assert found.count(TRAINERS[0]) == 1
    assert ME not in found
    assert around.near.sources(8)[: len(TRAINERS)] == TRAINERS, "it was named for v7"


def test_b35_a_peer_without_room_is_asked_only_for_what_it_holds() -> None:
    around = Surroundings()
    around.add("full", 6, storage=False)
    assert "full" in around.near.sources(6)
    assert "full" not in around.near.sources(7)


def test_neither_ourselves_nor_the_ignored_nor_other_roles_are_asked() -> None:
    around = Surroundings()
    around.add(ME, 7)
    around.add("liar", 7)
    around.add("fellow trainer's bootstrap", None, role="bootstrap")
    around.ignored = {"liar", TRAINERS[1]}
    assert around.near.sources(7) == TRAINERS[:1]
