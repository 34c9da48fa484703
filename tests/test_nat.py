"""Peers that nobody can dial: behind routers that translate addresses, and behind firewalls (docs/nat.md)."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bootstrap.events import Event, read_events
from bootstrap.folder import RunFolder, open_run
from protocols.envelopes import seal
from protocols.faults import PeerFault, TransportFault
from protocols.messages import CapacityAd, DialBack, DialedBack, Refused, decode_reply, decode_request, encode
from swarm.host import Host
from swarm.neighbourhood import Neighbourhood
from swarm.reachability import DialBacks, reachability
from tests.hosts import free_port, hosts
from tests.namespaces import Machine, Network, network
from tests.nodes import Nodes
from tests.processes import START_S, wait_until
from tests.samples import RUN, STRANGER, STRANGER_ID
from tests.terminals import Terminal, Terminals, printed, rewrite

# ---------------------------------------------------------------------- dialing back


async def serve_dial_backs(host: Host) -> DialBacks:
    dial_backs = DialBacks(host)

    async def answer(raw: bytes, peer_id: str) -> bytes:
        request = decode_request(raw)
        assert isinstance(request, DialBack)
        return encode(await dial_backs.answer(request.port, peer_id))

    await host.serve(answer)
    return dial_backs


@dataclass
class Listener:
    """A server on loopback that says a few words, and nothing more until it hangs up."""

    first_words: bytes
    port: int = 0
    met: asyncio.Event = field(default_factory=asyncio.Event)
    hang_up: asyncio.Event = field(default_factory=asyncio.Event)

    async def greet(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.met.set()
        writer.write(self.first_words)
        await self.hang_up.wait()
        writer.close()


@asynccontextmanager
async def listener(first_words: bytes) -> AsyncIterator[Listener]:
    made = Listener(first_words)
    async with await asyncio.start_server(made.greet, "127.0.0.1", 0) as server:
        made.port = server.sockets[0].getsockname()[1]
        yield made
        made.hang_up.set()


@pytest.mark.network
async def test_a_peer_that_is_reached_is_direct_and_knows_where(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (door, peer):
        await serve_dial_backs(door)
        found = await reachability(peer, [door.peer_id])
        assert (found.kind, list(found.addresses)) == ("direct", peer.addresses)
        assert await door.addresses_of(peer.peer_id) != []
        assert await door.addresses_of(STRANGER_ID) == []


@pytest.mark.network
async def test_a_port_where_nobody_or_somebody_else_answers_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.reachability.DIAL_BACK_S", 0.5)
    async with hosts(tmp_path, 2) as (door, peer), listener(b"SSH-2.0-OpenSSH\r\n") as ssh, listener(b"") as silent:
        await serve_dial_backs(door)
        for port in (free_port(), ssh.port, silent.port):
            peer.addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer.peer_id}"]
            found = await reachability(peer, [door.peer_id])
            assert (found.kind, found.addresses) == ("outbound only", ())
            assert f"/ip4/127.0.0.1/tcp/{port}" in found.reason


@pytest.mark.network
async def test_unknown_is_not_unreachable(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (door, peer):
        found = await reachability(peer, [door.peer_id])  # it serves nothing, as a peer of before would
        assert (found.kind, found.reason) == ("unknown", "no bootstrap peer could try")
        assert (await reachability(peer, [])).kind == "unknown"
        peer.addresses = [f"/ip4/127.0.0.1/udp/4001/quic-v1/p2p/{peer.peer_id}"]
        assert (await reachability(peer, [door.peer_id])).reason == "it listens on no TCP port"


@pytest.mark.network
async def test_one_that_does_not_get_through_decides(tmp_path: Path) -> None:
    async with hosts(tmp_path, 3) as (outside, peer, inside):
        await peer.connect(inside.addresses[0])
        await serve_dial_backs(inside)

        async def in_vain(raw: bytes, peer_id: str) -> bytes:
            return encode(DialedBack("/ip4/198.51.100.1/tcp/4001", False))

        await outside.serve(in_vain)
        assert (await reachability(peer, [inside.peer_id])).kind == "direct"
        assert (await reachability(peer, [inside.peer_id, outside.peer_id])).kind == "outbound only"


@pytest.mark.network
async def test_a_caller_is_dialled_once_at_a_time_and_callers_in_a_bounded_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.reachability.DIALS_AT_ONCE_MAX", 1)
    monkeypatch.setattr("swarm.reachability.DIAL_BACK_S", 60.0)
    async with hosts(tmp_path, 3) as (door, one, two), listener(b"") as silent:
        await serve_dial_backs(door)
        ask, in_vain = encode(DialBack(silent.port)), DialedBack(f"/ip4/127.0.0.1/tcp/{silent.port}", False)
        first = asyncio.create_task(one.call(door.peer_id, ask))
        await silent.met.wait()
        busy = [decode_reply(await host.call(door.peer_id, ask)) for host in (one, two)]
        assert busy == [Refused("busy"), Refused("busy")]
        silent.hang_up.set()
        assert decode_reply(await first) == in_vain
        assert decode_reply(await two.call(door.peer_id, ask)) == in_vain


@pytest.mark.parametrize("port", [0, -1, 65536, 2**40])
def test_ports_that_are_none_are_refused(port: int) -> None:
    with pytest.raises(PeerFault):
        decode_request(encode(DialBack(port)))


@pytest.mark.network
async def test_a_node_that_nobody_can_dial_keeps_no_records_and_advertises_no_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = Nodes(tmp_path)
    try:
        door = await nodes.bootstrap()
        address = door.node.host.addresses[0]
        direct = await nodes.start("direct", "inference", (address,))
        assert direct.node.reachability.kind == "direct"
        assert direct.node.addresses == tuple(direct.node.host.addresses)

        async def shut(ip: str, port: int) -> bool:
            return False

        monkeypatch.setattr("swarm.reachability._answers", shut)
        behind = await nodes.start("behind", "inference", (address,))
        trainer = await nodes.start("trainer", "trainer", (address,))
        assert (behind.node.reachability.kind, behind.node.addresses) == ("outbound only", ())
        modes = [each.node.directory._node.protocol.client_mode for each in (door, direct, behind, trainer)]
        assert modes == [False, False, True, True]
        told = [
            event["code"] for event in read_events(trainer.node.home / "metrics.jsonl") if event["event"] == "warning"
        ]
        assert told == ["cannot be dialled"]
        assert not [e for e in read_events(behind.node.home / "metrics.jsonl") if e["event"] == "warning"]
    finally:
        for each in nodes.all:
            await each.stop()


async def test_addresses_that_swallow_every_packet_hold_up_nobody() -> None:
    # Sixteen addresses, as many as an advertisement holds, of which only the last leads anywhere; the others never end.
    name = "peer"
    addresses = tuple(f"/ip4/198.51.100.{number}/tcp/4001/p2p/{name}" for number in range(16))
    waiting: set[str] = set()

    async def connect(address: str, timeout_s: float) -> str:
        if address == addresses[-1]:
            return name
        waiting.add(address)
        try:
            await asyncio.Event().wait()
        finally:
            waiting.discard(address)
        raise TransportFault("timeout")

    follower: Any = SimpleNamespace(
        node=SimpleNamespace(session=bytes(16), host=SimpleNamespace(connect=connect), peer_id="me")
    )
    near = Neighbourhood(follower)
    ad = CapacityAd(run=RUN, session=bytes(16), role="inference", issued_ms=0, addresses=addresses)
    near.ads[name] = seal(STRANGER, ad)
    async with asyncio.timeout(5.0):
        await near.reach(name)
    assert waiting == set()


# ---------------------------------------------------------------------- a swarm of machines

# Told when a peer ends: how many records it keeps for others.
COUNT_RECORDS = """
from swarm.directory import Directory
close = Directory.close
async def told(self):
    print("records kept:", len(self._node.protocol.storage), flush=True)
    await close(self)
Directory.close = told
"""


@dataclass
class Place:
    """A bootstrap peer and a trainer on public machines, and volunteers that nobody can dial."""

    net: Network
    terminals: Terminals
    run: RunFolder
    doors: list[Terminal] = field(default_factory=list)
    join_words: list[str] = field(default_factory=list)
    addresses: list[str] = field(default_factory=list)

    def open_door(self) -> Terminal:
        """One more bootstrap peer, on a machine of its own, linked with those before."""
        links = [word for address in self.addresses for word in ("--link", address)]
        machine, who = self.net.machine("a"), f"door{len(self.doors)}"
        door = self.terminals.type("bootstrap", self.run.config_path, *links, who=who, wrap=machine.inside)
        invite = printed(door, "swarm join '", under="join from another machine:").split("'")[1]
        self.addresses.append(invite.partition("#")[0])
        self.doors.append(door)
        return door

    def train(self, machine: Machine, *words: str) -> Terminal:
        doors = [word for address in self.addresses for word in ("--bootstrap", address)]
        train = ("train", self.run.config_path, *doors, *words)
        return self.terminals.type(*train, before=COUNT_RECORDS, wrap=machine.inside)

    def volunteer(self, who: str, machine: Machine) -> Terminal:
        invite = f"{','.join(self.addresses)}#{self.run.run}"
        return self.terminals.type("join", invite, who=who, before=COUNT_RECORDS, wrap=machine.inside)

    def events(self, who: str, name: str) -> list[Event]:
        home = self.terminals.folder / who / ".local" / "share" / "echo-swarm" / "inference"
        return [event for event in read_events(home / "metrics.jsonl") if event["event"] == name]

    def steps(self) -> int:
        steps = (
            event["step"] for event in read_events(self.run.trainer_home / "metrics.jsonl") if event["event"] == "step"
        )
        return max(steps, default=0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Callable[[str, int], Place]]:
    terminals = Terminals(tmp_path)
    with network() as net:

        def make(mode: str, steps: int) -> Place:
            assert terminals.type("init", "sums").ended_clean() == 0
            run = open_run(tmp_path / "sums")
            values = {"max_steps": f"{steps}", "learning.batch_groups": "4", "evaluation.problems": "0"}
            rewrite(run.config_path, values | {"coordination.mode": f'"{mode}"'})
            return Place(net, terminals, run)

        try:
            yield make
        finally:
            terminals.close()


def accepted(volunteer: Terminal) -> int:
    """Groups of a volunteer that were trained or wait to be, by its own last words."""
    said = re.search(r"done at v\d+: (\d+) accepted", volunteer.output)
    assert said is not None, volunteer.output
    return int(said[1])


def kept(peer: Terminal) -> int:
    """Records that a peer kept for others when it left."""
    said = re.search(r"records kept: (\d+)", peer.output)
    assert said is not None, peer.output
    return int(said[1])


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sequential", "async"])
def test_volunteers_behind_a_nat_and_behind_a_firewall_do_their_part(
    place: Callable[[str, int], Place], mode: str
) -> None:
    here = place(mode, 8)
    here.open_door()
    trainer = here.train(here.net.machine("a"))
    volunteers = {
        "berta": here.volunteer("berta", here.net.home("a")),
        "carl": here.volunteer("carl", here.net.firewalled("a")),
    }
    assert trainer.ended_clean(2 * START_S) == 0, trainer.output
    assert "audit      ok" in trainer.lines()
    assert kept(trainer) > 0, "who can be dialled keeps records"
    for who, volunteer in volunteers.items():
        assert volunteer.ended_clean(30) == 0, volunteer.output
        assert accepted(volunteer) > 0
        assert kept(volunteer) == 0
        assert [event["kind"] for event in here.events(who, "reachability")] == ["outbound only"]
        assert "works over the connections that it opens itself" in volunteer.output
        assert max(event["fetch_s"] for event in here.events(who, "adapter")) < 4.0, "waited for a peer nobody can dial"


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sequential", "async"])
def test_they_go_on_after_the_trainers_restart_and_a_bootstrap_peers_death(
    place: Callable[[str, int], Place], mode: str
) -> None:
    here = place(mode, 100_000)
    first = here.open_door()
    here.open_door()
    machine = here.net.machine("a")
    trainer = here.train(machine, "--port", "4002")
    homes = [here.net.home("a"), here.net.home("a"), here.net.firewalled("a")]
    volunteers = [here.volunteer(f"volunteer{number}", home) for number, home in enumerate(homes)]
    wait_until(lambda: here.steps() >= 5, START_S, trainer)
    trainer.kill()
    trainer.process.wait()
    before = here.steps()
    trainer = here.train(machine, "--port", "4002")
    wait_until(lambda: here.steps() >= before + 5, START_S, trainer)
    first.kill()
    first.process.wait()
    before = here.steps()
    wait_until(lambda: here.steps() >= before + 20, START_S, trainer)
    for number in range(len(volunteers)):
        made = [event["t"] for event in here.events(f"volunteer{number}", "generated")]
        assert made[-1] > trainer.started_s, f"volunteer{number} did nothing after the restart"
