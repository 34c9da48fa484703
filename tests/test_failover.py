"""Peers that die, sleep, leave and come back, among real processes: a coordinator, a trainer, workers."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.failover import ENDLESS, WORKERS, end, kill_leader
from protocols.directory import RecordKey, RecordKind
from protocols.envelopes import Sealed, seal, unseal
from protocols.faults import PeerFault
from protocols.ledger import audit
from protocols.messages import CapacityAd, Directive, Status, StatusRequest
from protocols.presence import BEAT_S, SILENT_S
from protocols.rounds import STALL_MIN_S
from swarm.identity import KEY_FILE, load_identity
from swarm.node import Node, NodeConfig, now_ms
from tests.peer_process import RUN
from tests.processes import LEASE_S, Electorate, Member, wait_until
from tests.test_crashes import states

pytestmark = pytest.mark.e2e

EXIT_S = 10.0  # to leave in good order: a goodbye, a last record, the end of p2pd; 2 to 5 s on busy cores
RESTARTED_S = SILENT_S  # from a trainer that is ready to its next step: before anybody is thought to starve


@pytest.fixture
def swarm(tmp_path: Path) -> Iterator[Electorate]:
    swarm = Electorate(tmp_path)
    yield swarm
    swarm.close()


@asynccontextmanager
async def stranger(swarm: Electorate) -> AsyncIterator[Node]:
    """A node in this process: it hears what is said in the run, and reads what the directory holds."""
    home = swarm.folder / "stranger"
    config = NodeConfig(role="inference", bootstrap=tuple(swarm.addresses.values()), listen=("/ip4/127.0.0.1/tcp/0",))
    node = await Node.start(load_identity(home / KEY_FILE)[0], home, config, [RUN])
    try:
        await node.followers[RUN].find_manifest()
        yield node
    finally:
        await node.close()


# ---------------------------------------------------------------------- the trainer dies, and the end is missed


def first_step(swarm: Electorate, trainer: Member) -> float:
    """Seconds from its being ready to its first new step; the version it came back with was announced before."""
    ready = trainer.wait_for_event("ready", since_s=trainer.started_s)
    step = trainer.wait_for_event("step", since_s=trainer.started_s)
    loads = [event for worker in swarm.workers if worker.alive for event in worker.events("adapter")]
    assert [e["t"] for e in loads if e["version"] == step["step"] - 1 and e["t"] < step["t"]], "not announced again"
    return float(step["t"] - ready["t"])


@pytest.mark.slow
def test_b44_b43_a_trainer_comes_back_to_workers_of_any_version_and_all_go_home(swarm: Electorate) -> None:
    # Goal: after a restart nobody waits for anybody for ever, nor at the end, whether they heard of it or not.
    # Method: max_lag 0, so that nothing older than the head is of use. The trainer dies with v7 announced to nobody
    # (the worker at v6), with both at v9, and at v11 with nobody left but a peer that has an empty home.
    arguments = ("--max-lag", "0", "--steps", "13")
    swarm.start_all(1, *arguments, "--crash", "before-announce:7")
    begin = swarm.trainer.arguments[:-2]
    (worker,) = swarm.workers

    assert swarm.trainer.wait() == -9
    assert max(event["version"] for event in worker.events("adapter")) == 6
    swarm.trainer = swarm.start("trainer", *begin, "--crash", "after-step:10")
    taken_s = [first_step(swarm, swarm.trainer)]
    assert worker.wait_for_event("adapter", version=7)["t"] < swarm.trainer.wait_for_event("step", step=8)["t"]

    assert swarm.trainer.wait() == -9
    worker.wait_for_event("adapter", version=9)
    swarm.trainer = swarm.start("trainer", *begin, "--crash", "after-step:12")
    taken_s.append(first_step(swarm, swarm.trainer))

    assert swarm.trainer.wait() == -9
    tell_to_go(worker)
    impatient = swarm.start("impatient", *arguments, "--patience", "5")
    swarm.workers = [swarm.start("empty", *arguments)]
    assert impatient.wait() == 1, "who has not heard of the end goes by itself"
    assert impatient.lines()[-1].startswith("error trainer gone")
    silent_s = time.time() - impatient.started_s
    assert silent_s > 5
    swarm.trainer = swarm.start("trainer", *begin)
    swarm.workers[0].wait_for("ready")
    taken_s.append(first_step(swarm, swarm.trainer))
    assert max(taken_s) < RESTARTED_S

    over_s = swarm.trainer.wait_for_event("step", step=13)["t"]
    assert swarm.trainer.wait(30) == 0
    assert swarm.workers[0].wait(30) == 0
    gone_s = time.time() - over_s
    assert gone_s < 30
    print(f"ready to next step: {taken_s} s; all gone {gone_s:.1f} s after the last, trainer gone: {silent_s:.1f} s")
    for peer in swarm.alive:
        peer.kill(signal.SIGTERM)
        assert peer.wait(EXIT_S) == 0
    report = audit((swarm.folder / "trainer" / "ledger.echo").read_bytes())
    assert (report.problems, report.head, report.ended, report.histogram) == ([], 13, True, {0: 13 * 4})


# ---------------------------------------------------------------------- workers sleep and leave


def rounds(swarm: Electorate, since_s: float) -> list[dict]:
    return swarm.trainer.events("round", since_s)


@pytest.mark.slow
def test_b34_b92_a_worker_sleeps_in_a_round_and_another_leaves_one(swarm: Electorate) -> None:
    # Goal: in sequential mode a round waits neither for who sleeps nor for who goes, and takes back who is well again.
    # Method: three workers of a group a second; one stops itself while it loads v3. A newcomer, of whom as much is
    # expected, is slow, and told to go while it generates.
    swarm.start_bootstrap("--home", "bootstrap-1")
    silent = swarm.start_bootstrap("--home", "bootstrap-2")
    swarm.trainer = swarm.start("trainer", "--mode", "sequential", "--batch", "6", "--steps", "100000", "--lease", "6")
    swarm.trainer.wait_for("ready")
    second = ("--slow", "0.3")
    sleeper = swarm.start("sleeper", *second, "--stop-at-load", "3", "--patience", "8")
    others = [swarm.start(f"worker-{number}", *second) for number in (1, 2)]
    sleeper.wait_paused()
    stopped_s = swarm.trainer.wait_for_event("step", step=3)["t"]
    swarm.trainer.wait_for_event("step", step=7)
    gap_s = max(after - before for before, after in pairwise(swarm.step_times(stopped_s)))
    assert gap_s < STALL_MIN_S
    late = next(event for event in rounds(swarm, stopped_s) if event["version"] == 3)
    assert late["moved"] > 0
    # It is suspect once: after that nothing is asked of it, so it cannot stall a round again.
    assert [peer_id for event in rounds(swarm, stopped_s) for peer_id in event["stalled"]] == [sleeper.peer_id]
    others[0].wait_for_event("adapter", version=7)

    wait_until(lambda: time.time() - stopped_s > 8 + BEAT_S, 30)  # longer than its patience
    resumed_s = time.time()
    sleeper.resume()
    wait_until(lambda: [e for e in rounds(swarm, resumed_s) if e["peers"] == 3], 30, swarm.trainer)
    back = next(e for e in rounds(swarm, resumed_s) if e["peers"] == 3)
    print(f"slept: gap {gap_s:.2f} s, back in a round {back['t'] - resumed_s:.2f} s after SIGCONT")
    loaded = [e["version"] for e in sleeper.events("adapter", resumed_s) if e["t"] < back["t"]]
    assert max(loaded) >= back["version"] > 6

    leaver = swarm.start("leaver", "--slow", "2")
    wait_until(lambda: leaver.events("adapter") and leaver.lines()[-1] == "generating", 60, leaver)
    told_s, gone_s = tell_to_go(leaver)
    step_s = wait_until(lambda: swarm.step_times(told_s), 30, swarm.trainer)[0]
    print(f"told to go: {gone_s - told_s:.2f} s, the round was done without it {step_s - told_s:.2f} s after that")
    assert step_s - told_s < 5.0
    peers = swarm.trainer.wait_for_event("peers", since_s=gone_s + BEAT_S)
    assert leaver.peer_id not in [row["peer_id"] for row in peers["peers"]]
    assert asyncio.run(record_of(swarm, leaver.peer_id)).online is False

    silent.pause()  # a goodbye to it takes its whole second
    told_s = time.time()
    sleeper.kill(signal.SIGTERM)
    wait_until(lambda: time.time() - told_s > 0.2, 1)  # two signals that come at once are one
    sleeper.kill(signal.SIGTERM)
    assert sleeper.wait(0.5) == 130, "the second signal is for those who cannot wait"
    silent.resume()
    report = end(swarm)
    assert report.problems == []
    assert set(report.histogram) == {0}


def tell_to_go(worker: Member) -> tuple[float, float]:
    """SIGTERM; when it was told, and when it was gone, in good order."""
    told_s = time.time()
    worker.kill(signal.SIGTERM)
    assert worker.wait(EXIT_S) == 0
    return told_s, time.time()


async def record_of(swarm: Electorate, peer_id: str) -> CapacityAd:
    async with stranger(swarm) as node:
        records = await node.directory.get(RecordKey(RUN, RecordKind.PEERS))
        return unseal(records[peer_id], CapacityAd).message


# ---------------------------------------------------------------------- coordinators


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Electorate]:
    """A swarm that trains until the last test is over; then its ledger must prove the bound."""
    swarm = Electorate(tmp_path_factory.mktemp("endless"))
    try:
        swarm.start_all(WORKERS, *ENDLESS)
        yield swarm
    finally:
        swarm.close()


def test_the_coordinator_is_killed_and_another_leads_within_two_leases(endless: Electorate) -> None:
    elected = endless.wait_for_leader()
    for _ in range(2):
        kill, elected = kill_leader(endless, elected)
        print(kill)
        assert kill.failover_s < 2 * LEASE_S
        assert kill.role == "trainer" or kill.idle_s < 2 * LEASE_S
    assert_nobody_obeyed_two(endless)


def assert_nobody_obeyed_two(swarm: Electorate) -> None:
    """At every peer terms only rise, and one term has one coordinator at all of them."""
    leaders: dict[int, set[str]] = {}
    for peer in swarm.alive:
        obeyed = [(event["term"], event["coordinator"]) for event in peer.events("leader", peer.started_s)]
        assert [term for term, _ in obeyed] == sorted(term for term, _ in obeyed), f"{peer.home.name}: {obeyed}"
        for term, coordinator in obeyed:
            leaders.setdefault(term, set()).update({coordinator} - {None})
    assert all(len(each) <= 1 for each in leaders.values()), leaders


async def test_b46_a_coordinator_that_slept_steps_down_first_and_its_orders_change_nothing(endless: Electorate) -> None:
    # Goal: at no time does a peer obey two, whatever an old leader says when it wakes.
    # Method: SIGSTOP until another leads, SIGCONT. All that is ordered is heard here; then its key signs an order of
    # its old term once more, as if it had not looked at the clock. That such orders arrive, one of a higher term shows.
    old = await asyncio.to_thread(endless.wait_for_leader)
    async with stranger(endless) as node:
        heard: list[tuple[float, Sealed[Directive]]] = []
        topic = node.followers[RUN].control.name
        await node.host.subscribe(topic, lambda _, raw: heard.extend(as_directive(raw)))
        await asyncio.to_thread(wait_until, lambda: heard, 30)
        await asyncio.to_thread(old.leader.pause)
        new = await asyncio.to_thread(endless.wait_for_leader, old.term)
        resumed_s = time.time()
        old.leader.resume()
        await asyncio.to_thread(
            old.leader.wait_for_event, "coordinator", 10, resumed_s, state="stepped down", term=old.term
        )
        await asyncio.to_thread(old.leader.wait_for_event, "leader", 10, resumed_s, term=new.term)
        first = old.leader.events("coordinator", resumed_s)[0]
        print(f"stepped down {first['t'] - resumed_s:.3f} s after SIGCONT: {first['reason']}")
        late = [sealed.message for at_s, sealed in heard if at_s > resumed_s and sealed.sender == old.leader.peer_id]
        assert [said for said in late if said.term == old.term] == []

        key = load_identity(old.leader.home / KEY_FILE)[0].key
        stale_s = time.time()
        await node.host.publish(topic, seal(key, order(old.term)).raw)
        await node.host.publish(topic, seal(key, order(old.term)).raw)
        await asyncio.to_thread(endless.wait_for_steps, 5, stale_s + BEAT_S)
        assert {peer.obeys for peer in endless.alive} == {(new.leader.peer_id, new.term)}
        await node.host.publish(topic, seal(key, order(new.term + 1)).raw)
        for peer in endless.alive:
            await asyncio.to_thread(peer.wait_for_event, "leader", 10, stale_s, coordinator=old.leader.peer_id)
    await asyncio.to_thread(endless.wait_for_leader, new.term + 1, None, 2 * LEASE_S + SILENT_S)
    assert_nobody_obeyed_two(endless)


def order(term: int) -> Directive:
    return Directive(run=RUN, term=term, number=1_000_000, mode="async", min_version=1_000_000, issued_ms=now_ms())


def as_directive(raw: bytes) -> list[tuple[float, Sealed[Directive]]]:
    try:
        return [(time.time(), unseal(raw, Directive))]
    except PeerFault:
        return []  # a lease


async def test_b92_a_worker_goes_and_the_coordinator_gives_its_work_to_others_at_once(endless: Electorate) -> None:
    leader = (await asyncio.to_thread(endless.wait_for_leader)).leader
    goer = endless.workers[-1]
    await asyncio.to_thread(wait_until, lambda: goer.lines()[-1] == "generating", 10, goer)
    async with stranger(endless) as node:
        await node.followers[RUN].neighbourhood.reach(leader.peer_id)
        told_s, gone_s = await asyncio.to_thread(tell_to_go, goer)
        status = await node.ask(leader.peer_id, StatusRequest(RUN))
        assert isinstance(status, Status)
        assert status.leading
        listed = {row.peer_id for row in status.peers}
    assert goer.peer_id not in listed
    assert {worker.peer_id for worker in endless.workers[:-1]} <= listed
    await asyncio.to_thread(endless.wait_for_steps, 5, gone_s)
    gap_s = max(after - before for before, after in pairwise(endless.step_times(told_s - BEAT_S)))
    print(f"gone after {gone_s - told_s:.2f} s; longest time between two steps {gap_s:.2f} s")
    assert gap_s < 5.0


def test_the_ledger_proves_the_bound_after_all_that(endless: Electorate) -> None:
    report = end(endless)
    print(report.histogram)
    assert report.problems == []
    assert report.groups == 4 * (report.versions - 1)
    assert max(report.histogram) <= report.bound == 4
    counts = states(endless.folder)
    assert counts.pop("trained") == report.groups
    assert set(counts) <= {"queued", "stale", "no_signal"}, (
        "an accepted group has no outcome, and does not wait for one"
    )
