"""Whole transfers in virtual time, on many seeds: how long, how many copies, how much in vain.

Each rule of protocols/transfer.py has a mutation here that breaks it, and the property that then fails.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import mean, median

import pytest

from protocols import transfer
from protocols.transfer import CHUNK_BYTES, Event, Offered, Schedule, Seeding
from tests.transfer_simulation import Host, Link, Simulation, mbit

MB8 = 8_000_000
HOME = mbit(20)
SLOW = Link(1000, 2_500_000)  # drips
FAST = mbit(1000, latency_s=0.0002)

Check = Callable[[], None]


def swarm(seed: int, peers: int, size: int = MB8, link: Link = HOME) -> Simulation:
    return Simulation(seed, size, link, [link] * peers)


def runs(make: Callable[[int], Simulation], seeds: int, until_s: float = 300.0) -> list[Simulation]:
    """All complete."""
    done = [make(seed).run(until_s) for seed in range(seeds)]
    for sim in done:
        assert not sim.unfinished, f"seed {sim.seed}: {sim.unfinished} at {sim.now_s:.1f} s"
    return done


def relative(sims: list[Simulation]) -> list[float]:
    """Times over the ideal."""
    return [sim.took_s / sim.ideal_s for sim in sims]


def troubled(seed: int, trouble: Callable[[Host], None], at_s: float | None) -> Simulation:
    """Eight peers; two of them make trouble, from the beginning or at a moment."""
    sim = swarm(seed, 8)
    for peer in sim.peers[:2]:
        if at_s is None:
            trouble(peer)
        else:
            sim.after(at_s, trouble, peer)
    return sim


def lie(host: Host) -> None:
    host.lies = True


# ---------------------------------------------------------------------- properties


def eight_take_twice_the_ideal_at_most() -> None:
    sims = runs(lambda seed: swarm(seed, 8), 8)
    assert max(relative(sims)) <= 2.0
    assert max(sim.copies for sim in sims) <= 1.5
    assert max(sim.wasted for sim in sims) <= 0.02


def many_take_little_longer() -> None:
    eight, many = (runs(lambda seed, peers=peers: swarm(seed, peers), 4) for peers in (8, 24))
    assert median(sim.took_s for sim in many) <= 4 / 3 * median(sim.took_s for sim in eight)
    assert max(sim.copies for sim in many) <= 1.5
    assert max(sim.wasted for sim in many) <= 0.03


def one_alone_uses_the_link() -> None:
    for link, size in ((mbit(1), MB8 // 4), (HOME, MB8), (FAST, 16 * MB8)):
        sims = runs(lambda seed, link=link, size=size: swarm(seed, 1, size, link), 5)
        assert max(relative(sims)) <= 1.25
        assert max(sim.copies for sim in sims) <= 1.01


def far_and_fast_is_a_third_of_the_link() -> None:
    sims = runs(lambda seed: swarm(seed, 1, 8 * MB8, mbit(200, latency_s=0.025)), 5)  # 100 to 200 ms there and back
    assert max(relative(sims)) <= 3.0


def a_fast_network_takes_one_copy() -> None:
    sims = runs(lambda seed: swarm(seed, 8, 8 * MB8, FAST), 2)
    assert max(relative(sims)) <= 3.0
    assert max(sim.copies for sim in sims) <= 1.5


def slow_links_are_used_too() -> None:
    sims = runs(lambda seed: swarm(seed, 8, link=mbit(5)), 5)
    assert max(relative(sims)) <= 2.0
    assert max(sim.copies for sim in sims) <= 1.5


def unequal_links_are_bounded() -> None:
    def make(seed: int) -> Simulation:
        rng = random.Random(seed)
        links = [
            mbit(rng.choice([2, 5, 20, 100]), rng.choice([20, 50, 100]), rng.choice([0.002, 0.02])) for _ in range(12)
        ]
        return Simulation(seed, MB8, HOME, links)

    sims = runs(make, 5)
    assert median(relative(sims)) <= 4.5
    assert max(sim.copies for sim in sims) <= 2.5
    assert max(sim.wasted for sim in sims) <= 0.12


def late_joiners_take_it_from_the_others() -> None:
    def make(seed: int) -> Simulation:
        sim = swarm(seed, 8)
        for peer in sim.peers[4:]:
            peer.starts_s = 3.0 + sim.peers.index(peer)
        return sim

    sims = runs(make, 5)
    assert max(sim.copies for sim in sims) <= 1.8
    assert max(sim.took_s for sim in sims) <= 10.0 + 2.0 * sims[0].ideal_s


def the_trainer_is_not_needed_after_one_copy() -> None:
    def make(seed: int) -> Simulation:
        sim = swarm(seed, 8)

        def look() -> None:
            if sum(1 for index in range(sim.chunks.count) if any(peer.have >> index & 1 for peer in sim.peers)) < (
                sim.chunks.count
            ):
                sim.after(0.05, look)
            else:
                sim.trainer.die()

        look()
        return sim

    sims = runs(make, 10)
    assert all(sim.trainer.dead for sim in sims)
    assert max(relative(sims)) <= 2.5


def the_dead_cost_little() -> None:
    sims = runs(lambda seed: troubled(seed, Host.die, 2.0), 10)
    assert max(relative(sims)) <= 3.5
    assert max(sim.wasted for sim in sims) <= 0.15  # with what the dead had


def the_stopped_cost_some_seconds() -> None:
    sims = runs(lambda seed: troubled(seed, Host.freeze, 2.0), 10)
    assert max(sim.took_s for sim in sims) <= 2 * sims[0].ideal_s + 2 * transfer.STALL_S
    assert max(sim.wasted for sim in sims) <= 0.15


def all_but_one_stopped_leave_the_trainer() -> None:
    def make(seed: int) -> Simulation:
        sim = swarm(seed, 4)
        for peer in sim.peers[1:]:
            sim.after(1.5, peer.freeze)
        return sim

    sims = runs(make, 10)
    assert max(sim.took_s for sim in sims) <= 1.5 + sims[0].ideal_s + 3 * transfer.STALL_S


def who_drips_holds_up_nobody() -> None:
    def make(seed: int) -> Simulation:
        return Simulation(seed, MB8, HOME, [SLOW] * 2 + [HOME] * 6)

    sims = runs(make, 5)
    assert max(relative(sims)) <= 4.0
    assert max(sim.wasted for sim in sims) <= 0.05


def a_lone_dripping_holder_is_left_at_last() -> None:
    # The only holder drips; after a while there is another.
    def make(seed: int) -> Simulation:
        sim = Simulation(seed, 4 * CHUNK_BYTES, SLOW, [HOME, HOME])
        second = sim.peers[1]
        second.have, second.done_s = sim.chunks.all, 0.0
        return sim

    sims = runs(make, 5)
    assert max(sim.took_s for sim in sims) <= 10.0


def liars_cost_a_chunk_each() -> None:
    sims = runs(lambda seed: troubled(seed, lie, None), 10)
    assert max(relative(sims)) <= 4.0
    for sim in sims:
        assert max(peer.refused for peer in sim.peers) <= 2 * 2  # of each liar, one or what was behind it


def holds(sim: Simulation, peers: list[Host], chunks: int) -> None:
    """These have the chunks from the beginning."""
    for peer in peers:
        peer.have = chunks
        peer.done_s = 0.0 if chunks == sim.chunks.all else None


def what_only_one_has_moves_first() -> None:
    # All but four chunks are with three others too; who has those four serves about ten chunks, and dies.
    def make(seed: int) -> Simulation:
        sim = Simulation(seed, 2 * MB8, HOME, [mbit(20, 100)] * 4)
        sim.trainer.sparing = False
        for peer in sim.peers[1:]:
            peer.schedule = Schedule(sim.chunks.count, sim.chunks.all >> 4, peer.rng)
            peer.starts_s = 1000.0
        holds(sim, sim.peers[1:], sim.chunks.all >> 4)
        sim.after(1.3, sim.trainer.die)
        return sim

    for seed in range(10):
        sim = make(seed)
        sim.run(60.0)
        assert sim.peers[0].done_s is not None, f"seed {seed}: what only one had went with it"


def who_joins_a_whole_swarm_takes_nothing_of_the_trainer() -> None:
    def make(seed: int) -> Simulation:
        sim = swarm(seed, 6)
        holds(sim, sim.peers[1:], sim.chunks.all)
        return sim

    assert mean(sim.copies for sim in runs(make, 20)) <= 0.05  # what was asked for before the others were heard


def stopped_holders_make_room() -> None:
    # Forty have it, one of them awake: ten at a time are asked.
    def make(seed: int) -> Simulation:
        sim = swarm(seed, 41, 2_000_000)
        sim.trainer.die()
        holds(sim, sim.peers[1:], sim.chunks.all)
        for peer in sim.peers[2:]:
            sim.after(0.15, peer.freeze)
        return sim

    sims = runs(make, 10)
    assert max(sim.took_s for sim in sims) <= 25.0  # five turns of ten, STALL_S each


def nobody_gets_a_chunk_twice() -> None:
    for sim in runs(lambda seed: swarm(seed, 6, 4_000_000), 30):
        got = sum(peer.have.bit_count() for peer in sim.peers)
        assert sum(peer.twice for peer in sim.peers) <= 0.01 * got
        assert sum(peer.asked for peer in sim.peers) <= 1.05 * got


def whatever_happens_all_who_live_complete() -> None:
    for seed in range(120):
        rng = random.Random(f"any/{seed}")
        rates = [1, 2, 5, 20, 100]
        links = [mbit(rng.choice(rates), rng.choice(rates[2:]), rng.choice([0.001, 0.02])) for _ in range(1, 7)]
        sim = Simulation(seed, rng.randrange(1, 3_000_000), mbit(rng.choice([5, 20])), links)
        for peer in rng.sample(sim.peers, rng.randrange(3)):
            trouble = rng.choice([Host.freeze, Host.die, lie])
            sim.after(rng.uniform(0.0, 3.0), trouble, peer)
        sim.run(200.0)
        assert not sim.unfinished, f"seed {seed}: {sim.unfinished}"


PROPERTIES: list[Check] = [
    eight_take_twice_the_ideal_at_most,
    many_take_little_longer,
    one_alone_uses_the_link,
    far_and_fast_is_a_third_of_the_link,
    a_fast_network_takes_one_copy,
    slow_links_are_used_too,
    unequal_links_are_bounded,
    late_joiners_take_it_from_the_others,
    the_trainer_is_not_needed_after_one_copy,
    the_dead_cost_little,
    the_stopped_cost_some_seconds,
    all_but_one_stopped_leave_the_trainer,
    who_drips_holds_up_nobody,
    a_lone_dripping_holder_is_left_at_last,
    liars_cost_a_chunk_each,
    what_only_one_has_moves_first,
    who_joins_a_whole_swarm_takes_nothing_of_the_trainer,
    stopped_holders_make_room,
    nobody_gets_a_chunk_twice,
    whatever_happens_all_who_live_complete,
]


@pytest.mark.parametrize("check", PROPERTIES, ids=lambda check: check.__name__)
def test_of_a_swarm(check: Check) -> None:
    check()


# ---------------------------------------------------------------------- what each rule is for


Patch = pytest.MonkeyPatch


def rarest_by_lot(patch: Patch) -> None:
    patch.setattr(Schedule, "_rarest", lambda self, wanted: wanted)


def sparing_is_ignored(patch: Patch) -> None:
    def handle(self: Schedule, event: Event, now_s: float) -> list[transfer.Action]:
        return honest(self, replace(event, sparing=False) if isinstance(event, Offered) else event, now_s)

    honest = Schedule.handle
    patch.setattr(Schedule, "handle", handle)


def all_is_offered_to_all(patch: Patch) -> None:
    patch.setattr(Seeding, "offer", lambda self, asker, now_s: sum(self._sent))


def promises_bind_for_a_moment(patch: Patch) -> None:
    patch.setattr(transfer, "PROMISE_S", 0.1)


def promises_bind_for_ever(patch: Patch) -> None:
    patch.setattr(transfer, "PROMISE_S", 1e9)


def turns_bind_for_ever(patch: Patch) -> None:
    patch.setattr(transfer, "TURN_S", 1e9)


def turns_bind_for_a_moment(patch: Patch) -> None:
    patch.setattr(transfer, "TURN_S", 0.0)


def few_are_promised(patch: Patch) -> None:
    patch.setattr(transfer, "SEEDED_MAX", transfer.SEEDED_MIN)


def many_are_promised(patch: Patch) -> None:
    patch.setattr(transfer, "SEEDED_MIN", transfer.SEEDED_MAX)


def nothing_is_late(patch: Patch) -> None:
    patch.setattr(transfer, "LATE_UNKNOWN_S", 1e9)
    patch.setattr(transfer, "LATE_MIN_S", 1e9)


def all_is_late(patch: Patch) -> None:
    patch.setattr(transfer, "LATE_UNKNOWN_S", 0.1)
    patch.setattr(transfer, "LATE_MIN_S", 0.1)
    patch.setattr(transfer, "LATE_FACTOR", 0.1)


def nothing_stalls(patch: Patch) -> None:
    patch.setattr(transfer, "STALL_S", 1e9)


def one_in_flight(patch: Patch) -> None:
    patch.setattr(transfer, "IN_FLIGHT_MIN", 1)
    patch.setattr(transfer, "IN_FLIGHT_MAX", 1)


def two_in_flight(patch: Patch) -> None:
    patch.setattr(transfer, "IN_FLIGHT_MAX", 2)


def overtaken_goes_on(patch: Patch) -> None:
    def arrived(self: Schedule, name: str, index: int, now_s: float) -> list[transfer.Action]:
        known = self._sources.get(name)
        if known is not None and (took_s := known.arrived(index, now_s)) is not None:
            self._usual_s = transfer._mean(self._usual_s, took_s)
        self.have |= 1 << index
        return []

    patch.setattr(Schedule, "_arrived", arrived)


@pytest.mark.slow  # a minute for all
@pytest.mark.parametrize(
    ("broken", "check"),
    [
        (rarest_by_lot, what_only_one_has_moves_first),
        (sparing_is_ignored, who_joins_a_whole_swarm_takes_nothing_of_the_trainer),
        (all_is_offered_to_all, eight_take_twice_the_ideal_at_most),
        (promises_bind_for_a_moment, eight_take_twice_the_ideal_at_most),
        (promises_bind_for_ever, the_stopped_cost_some_seconds),
        (turns_bind_for_a_moment, eight_take_twice_the_ideal_at_most),
        (turns_bind_for_ever, the_stopped_cost_some_seconds),
        (few_are_promised, far_and_fast_is_a_third_of_the_link),
        (many_are_promised, eight_take_twice_the_ideal_at_most),
        (nothing_is_late, who_drips_holds_up_nobody),
        (all_is_late, eight_take_twice_the_ideal_at_most),
        (nothing_stalls, stopped_holders_make_room),
        (one_in_flight, one_alone_uses_the_link),
        (two_in_flight, far_and_fast_is_a_third_of_the_link),
        (overtaken_goes_on, unequal_links_are_bounded),
    ],
    ids=lambda function: function.__name__,
)
def test_without_a_rule(broken: Callable[[Patch], None], check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    broken(monkeypatch)
    with pytest.raises(AssertionError):
        check()
