"""Real partitions: two halves of a swarm, each machine a network namespace, and the cable between them cut.

    half a: bootstrap peer, trainer, inference peer  ====X====  half b: bootstrap peer, inference peer

While it is cut, each half has a coordinator of its own: the one with the trainer trains on, the other waits at the
pipeline's depth. When it is mended, one coordinator is left, and nothing is lost (DESIGN section 11: S1, S3, S4, S6, L1
to L3).
"""

import itertools
import json
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from bootstrap.events import Event, Tail
from bootstrap.folder import RunFolder, open_run
from bootstrap.home import KEY_FILE, METRICS_FILE
from protocols.directory import SKEW_S
from protocols.orders import DIRECTIVE_LIFE_S
from protocols.presence import BEAT_S
from swarm.identity import load_identity
from tests.namespaces import Machine, Network, network, reaches
from tests.processes import wait_until
from tests.terminals import Terminal, Terminals, printed, rewrite

pytestmark = pytest.mark.e2e

LEASE_S = 6.0
BATCH = 8
SETTINGS = {
    "max_steps": "100000",
    "learning.batch_groups": f"{BATCH}",
    "sampling.group_size": "4",
    "evaluation.problems": "0",
    "coordination.lease_s": f"{LEASE_S}",
}
# What a peer needs to find another again: the attempt that is under way runs into its limit of one beat, the next comes
# a beat later, and the call behind it has one more.
DIAL_S = 3 * BEAT_S
# A cut of this length makes old what a candidate says on its near side, when it arrives on the far one.
OLD_S = DIRECTIVE_LIFE_S + SKEW_S + BEAT_S
START_S = 120.0  # five processes import torch on two cores


@dataclass
class Member:
    """A peer of the swarm and what it has written into its metrics file."""

    name: str
    home: Path
    terminal: Terminal
    _tail: Tail = field(init=False)
    _events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tail = Tail(self.home / METRICS_FILE)

    @property
    def peer_id(self) -> str:
        return load_identity(self.home / KEY_FILE)[0].peer_id

    def events(self, name: str, since_s: float = 0.0) -> list[Event]:
        """Those of this name, from this moment (unix seconds) on."""
        self._events += self._tail.read()
        return [each for each in self._events if each["event"] == name and each["t"] >= since_s]

    def last(self, name: str) -> Event:
        """The newest of this name; empty if there is none."""
        return next(reversed(self.events(name)), {})

    @property
    def obeys(self) -> tuple[str | None, int]:
        """Coordinator and term."""
        return self.last("leader").get("coordinator"), self.last("leader").get("term", 0)

    @property
    def leads(self) -> bool:
        return self.last("coordinator").get("state") == "leading"

    def rows(self, query: str) -> list[tuple]:  # type: ignore[type-arg]
        """From its database."""
        path = next(self.home.glob("*.sqlite"))
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
        try:
            return db.execute(query).fetchall()
        finally:
            db.close()

    @property
    def outbox(self) -> int:
        """Groups on its disk that no receipt has named."""
        count: int = self.rows("SELECT count(*) FROM outbox")[0][0]
        return count


class Halves:
    """The swarm, running."""

    def __init__(self, net: Network, terminals: Terminals) -> None:
        self.net = net
        self.terminals = terminals
        assert terminals.type("init", "sums").ended_clean() == 0
        self.run: RunFolder = open_run(terminals.folder / "sums")
        rewrite(self.run.config_path, SETTINGS)
        self.door_a = self._start("bootstrap-a", "a", "bootstrap", "sums/run.toml")
        at_a = self._address(self.door_a)
        self.door_b = self._start("bootstrap-b", "b", "bootstrap", "sums/run.toml", "--link", at_a)
        at_b = self._address(self.door_b)
        self.trainer = self._start(
            "trainer",
            "a",
            "train",
            "sums/run.toml",
            "--bootstrap",
            at_a,
            "--bootstrap",
            at_b,
            home=self.run.trainer_home,
        )
        self.worker_a = self._start("worker-a", "a", "join", f"{at_a}#{self.run.run}")
        self.worker_b = self._start("worker-b", "b", "join", f"{at_b}#{self.run.run}")
        self.half_a = [self.door_a, self.trainer, self.worker_a]
        self.half_b = [self.door_b, self.worker_b]

    @property
    def everybody(self) -> list[Member]:
        return self.half_a + self.half_b

    def _start(self, name: str, side: str, *words: str, home: Path | None = None) -> Member:
        machine: Machine = self.net.machine(side)
        where = home or self.terminals.folder / name
        terminal = self.terminals.type(*words, "--home", where, wrap=machine.inside)
        return Member(name, where, terminal)

    @staticmethod
    def _address(door: Member) -> str:
        line = printed(door.terminal, "swarm join '", under="join from another machine:")
        return line.removeprefix("swarm join '").partition("#")[0]

    def wait(self, condition: Callable[[], object], limit_s: float, what: str) -> float:
        """Until it is so; the seconds that it took. Nobody may end meanwhile."""
        began_s = time.monotonic()
        try:
            wait_until(lambda: self._alive() and condition(), limit_s)
        except AssertionError:
            said = "\n".join(f"{each.name}: {each.obeys} {each.terminal.lines()[-4:]}" for each in self.everybody)
            raise AssertionError(f"{what}: not within {limit_s:.0f} s\n{said}") from None
        return time.monotonic() - began_s

    def _alive(self) -> bool:
        for each in self.everybody:
            assert each.terminal.process.poll() is None, f"{each.name} ended:\n{each.terminal.output[-2000:]}"
        return True

    def agree(self, members: Sequence[Member]) -> bool:
        """All of them obey one coordinator, in one term, which is one of them, and of them it alone leads."""
        obeyed = {each.obeys for each in members}
        leading = [each.peer_id for each in members if each.leads]
        return len(obeyed) == 1 and [coordinator for coordinator, _ in obeyed] == leading

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        done: int = self.trainer.last("step").get("step", 0)
        return done

    def fresh(self, worker: Member, since_s: float, version: int) -> bool:
        """Has it loaded this version or a newer one since, and generated with it?"""
        newest = next((e for e in worker.events("adapter", since_s) if e["version"] >= version), None)
        return newest is not None and any(e["version"] >= version for e in worker.events("generated", newest["t"]))

    def end(self) -> None:
        """Everybody is told to stop, the inference peers first."""
        for members in ([self.worker_a, self.worker_b], [self.trainer], [self.door_b, self.door_a]):
            for each in members:
                each.terminal.kill(signal.SIGTERM)
            for each in members:
                each.terminal.process.wait(30)


@pytest.fixture
def halves(tmp_path: Path) -> Iterator[Halves]:
    with network() as net:
        terminals = Terminals(tmp_path)
        try:
            made = Halves(net, terminals)
            made.wait(lambda: made.step >= 3 and made.agree(made.everybody), START_S, "a swarm that trains")
            made.wait(lambda: made.fresh(made.worker_b, 0.0, 1), START_S, "work in half b")
            yield made
        finally:
            terminals.close()


# ---------------------------------------------------------------------- what must hold


def check_cut(halves: Halves, cut_s: float) -> None:
    """Each half has a coordinator within two leases; a trains on, b waits at the pipeline's depth."""
    step = halves.step
    for half, name in ((halves.half_a, "half a"), (halves.half_b, "half b")):
        left_s = max(0.1, cut_s + 2 * LEASE_S - time.time())
        halves.wait(lambda half=half: halves.agree(half), left_s, f"a coordinator of its own in {name}")
    halves.wait(lambda: halves.step >= step + 10, 30.0, "training in half a")

    depth = halves.run.config.coordination.depth
    worker = halves.worker_b
    halves.wait(
        lambda: time.time() > max(cut_s + OLD_S, worker.last("generated")["t"] + 2 * BEAT_S), 30.0, "half b waits"
    )
    assert worker.outbox <= (depth + 1) * BATCH, "half b ran ahead of the pipeline's depth"
    assert worker.last("adapter")["version"] <= step + 1, "half b has got a version through a cut cable"
    steps = [cut_s] + [event["t"] for event in halves.trainer.events("step", cut_s)]
    assert max(later - earlier for earlier, later in itertools.pairwise(steps)) <= 2 * LEASE_S, "training stopped"


def check_healed(halves: Halves, healed_s: float) -> None:
    """One coordinator, of the highest term; b is at the head and its old groups are judged."""
    terms = [event["term"] for each in halves.everybody for event in each.events("coordinator")]
    step, worker = halves.step, halves.worker_b
    (old,) = worker.rows("SELECT coalesce(max(counter), 0) FROM outbox")
    took_s = {}

    def within(limit_s: float, what: str, condition: Callable[[], object]) -> None:
        halves.wait(condition, healed_s + limit_s - time.time(), what)
        took_s[what] = round(time.time() - healed_s, 1)

    def linked() -> bool:
        return any(event["code"] == "trainer reachable" for event in worker.events("warning", healed_s))

    within(DIAL_S, "a way from half b to the trainer", linked)
    within(2 * LEASE_S, "one coordinator", lambda: halves.agree(halves.everybody))
    within(2 * LEASE_S + DIAL_S, "work at the head in half b", lambda: halves.fresh(worker, healed_s, step))
    query = f"SELECT count(*) FROM outbox WHERE counter <= {old[0]}"
    within(2 * LEASE_S + DIAL_S, "receipts for the old groups", lambda: worker.rows(query) == [(0,)])
    assert halves.door_a.obeys[1] >= max(terms)
    print(f"seconds from healing to: {took_s}")


def check_end(halves: Halves) -> None:
    """The sums add up, the record proves the bound, nobody was blamed, no term went down."""
    halves.end()
    ledger = halves.trainer.home / "ledger.echo"
    audit = halves.terminals.type("audit", ledger, "--run", halves.run.run, "--json")
    assert audit.wait() == 0, audit.output
    report = json.loads(audit.output)
    assert report["ok"] is True
    counts = halves.trainer.last("final")["counts"]
    left = ("trained", "no_signal", "stale_in_queue", "unused", "queued")
    assert counts["accepted"] == sum(counts[name] for name in left), counts
    assert counts["invalid"] == 0
    accepted = 0
    for worker in (halves.worker_a, halves.worker_b):
        final = worker.last("final")
        receipts = final["receipts"]
        assert final["generated"] == sum(receipts.values()) + final["outbox"], final
        accepted += receipts.get("accepted", 0)
        theirs, ours = [{*each.rows("SELECT version, envelope FROM chain")} for each in (worker, halves.trainer)]
        assert theirs <= ours, f"{worker.name} saw another chain"
    assert accepted <= counts["accepted"] + counts["duplicate"]
    for each in halves.everybody:
        obeyed = [event["term"] for event in each.events("leader")]
        assert obeyed == sorted(obeyed), f"{each.name}: a term went down"
        warned = {event["code"] for event in each.events("warning")}
        assert not warned & {"peer ignored", "refused", "equivocation", "bad adapter"}, (each.name, warned)


# ---------------------------------------------------------------------- tests


def test_a_cut_is_a_cut() -> None:
    with network() as net:
        a, b = net.machine("a"), net.machine("b")
        assert reaches(a, b)
        assert reaches(b, a)
        net.cut_one_way("a")
        assert not reaches(a, b)
        assert reaches(b, a)
        net.heal()
        assert reaches(a, b)
        net.cut()
        assert not reaches(a, b)
        assert not reaches(b, a)
        net.heal()
        assert reaches(b, a)


def test_halves_of_a_swarm_go_on_or_wait_and_agree_when_the_cable_is_mended(halves: Halves) -> None:
    # Goal: L1 to L3 and S1 to S6 over real partitions. One in one direction is no worse than one in both. A swarm does
    # not need its first door any more.
    # Method: the cable is cut until half b has stopped and what is held back is old, then mended. Then frames of the
    # half without the coordinator are dropped: it hears whom it cannot answer. After healing, the bootstrap peer of the
    # trainer's half is killed for good. At last all are told to stop.
    halves.net.cut()
    check_cut(halves, time.time())
    halves.net.heal()
    check_healed(halves, time.time())

    leads_in_a = any(each.leads for each in halves.half_a)
    halves.net.cut_one_way("b" if leads_in_a else "a")
    check_cut(halves, time.time())
    halves.net.heal()
    check_healed(halves, time.time())

    halves.half_a.remove(halves.door_a)
    halves.door_a.terminal.kill(signal.SIGKILL)
    step, killed_s = halves.step, time.time()
    halves.wait(lambda: halves.agree(halves.everybody), 2 * LEASE_S, "a coordinator without the first door")
    halves.wait(lambda: halves.step >= step + 10, 30.0, "training without the first door")
    for worker in (halves.worker_a, halves.worker_b):
        halves.wait(lambda worker=worker: halves.fresh(worker, killed_s, step + 1), 30.0, f"{worker.name} works on")
    check_end(halves)
