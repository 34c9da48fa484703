"""The host over real p2pd processes, on the standard loop and on uvloop."""

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import uvloop
from hivemind.proto import p2pd_pb2

from protocols.faults import LocalFault, PeerFault, TransportFault
from protocols.messages import GOSSIP_BYTES_MAX, UNARY_BYTES_MAX
from swarm.host import RPC_PROTOCOL, STREAMS_PER_PEER_MAX, Host, HostConfig
from swarm.p2pd import HANDLINGS_PER_PEER_MAX, remove_leftovers
from tests.hosts import children, fault_of, free_port, hosts, identity, until

pytestmark = pytest.mark.network


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest):
    return request.param()


async def echo(request: bytes, peer_id: str) -> bytes:
    return request


async def never(request: bytes, peer_id: str) -> bytes:
    await asyncio.Event().wait()
    return b""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Short, as unix sockets want it, and not shared with swarms that run beside the tests. (tmp_path comes first.)"""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield


def socket_folders() -> set[Path]:
    return set(Path(tempfile.gettempdir()).iterdir())


# ---------------------------------------------------------------------- start and end


async def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (first, second):
        await first.serve(echo)
        await first.subscribe("t", lambda sender, data: None)
        await first.serve_stream("/x", lambda reader, writer, peer: asyncio.sleep(0))
        assert await second.call(first.peer_id, b"hello") == b"hello"
        assert len(children()) == 2
        assert [stat.S_IMODE(folder.stat().st_mode) for folder in socket_folders()] == [0o700, 0o700]
    assert children() == set()
    assert socket_folders() == set()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert (await fault_of(second.call(first.peer_id, b""))).code == "closed"
    await second.close()  # twice does no harm


async def test_close_ends_a_child_that_does_not_listen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.p2pd.STOP_S", 0.3)
    host = await Host.start(identity(tmp_path, "a"), HostConfig())
    (pid,) = children()
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    await host.close()
    assert time.monotonic() - began < 2.0
    assert children() == set()


async def test_port_in_use_is_said_and_the_port_is_free_again_after_close(tmp_path: Path) -> None:
    # p2pd itself would start: it listens with SO_REUSEPORT and shares the callers with the first one.
    first = await Host.start(identity(tmp_path, "a"), HostConfig())
    address = first.addresses[0].rpartition("/p2p/")[0]
    fault = await fault_of(Host.start(identity(tmp_path, "b"), HostConfig(listen=(address,))))
    assert (fault.code, fault.detail) == ("port in use", address)
    second = await Host.start(identity(tmp_path, "b"), HostConfig())
    await second.connect(first.addresses[0])
    await first.close()
    again = await Host.start(identity(tmp_path, "a"), HostConfig(listen=(address,)))
    assert again.addresses == first.addresses
    await asyncio.gather(again.close(), second.close())


async def test_failed_starts_leave_nothing(tmp_path: Path) -> None:
    fault = await fault_of(Host.start(identity(tmp_path, "a"), HostConfig(listen=("/ip4/9.9.9.9/tcp/4444",))))
    assert fault.code == "p2pd failed"
    assert "cannot assign requested address" in fault.detail
    fault = await fault_of(Host.start(identity(tmp_path, "a"), HostConfig(startup_timeout_s=0.01)))
    assert fault.code == "p2pd failed"
    assert "not ready after 0.01 s" in fault.detail
    starting = asyncio.create_task(Host.start(identity(tmp_path, "a"), HostConfig()))
    await until(children)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert children() == set()
    assert socket_folders() == set()


def test_bad_addresses_in_the_configuration_are_value_errors() -> None:
    for bad in ({"listen": ("hello",)}, {"announce": ("/ip4/1.2.3.4/tcp/0",)}, {"relays": ("/ip4/999.1.1.1/tcp/1",)}):
        with pytest.raises(ValueError, match=r"multiaddr|port 0"):
            HostConfig(**bad)


def test_p2pd_ends_when_its_parent_is_killed_and_the_next_start_cleans_up(tmp_path: Path) -> None:
    identity(tmp_path, "a")
    code = (
        "import asyncio, sys; from pathlib import Path; from tests.hosts import identity, children\n"
        "from swarm.host import Host, HostConfig\n"
        "async def main():\n"
        "    host = await Host.start(identity(Path(sys.argv[1]), 'a'), HostConfig())\n"
        "    print(*children(), host.p2p._folder, flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, folder = process.stdout.readline().split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10.0
    while psutil.pid_exists(int(pid)) and psutil.Process(int(pid)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "p2pd outlived its parent"
    assert Path(folder).exists()
    remove_leftovers()
    assert Path(folder).exists(), "it might be starting"
    os.utime(folder, (0, 0))
    assert remove_leftovers() >= 1
    assert not Path(folder).exists()


async def test_leftovers_of_the_living_are_kept(tmp_path: Path) -> None:
    host = await Host.start(identity(tmp_path, "a"), HostConfig())
    os.utime(host.p2p._folder, (0, 0))
    remove_leftovers()
    assert host.p2p._folder.exists()
    assert await host.peers() == []
    await host.close()


# ---------------------------------------------------------------------- connections


async def test_b01_every_way_to_fail_a_dial_has_its_own_code(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2, linked=False) as (first, second):
        strangers = [identity(tmp_path, f"stranger{number}").peer_id for number in range(5)]
        closed = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{strangers[0]}"
        assert (await fault_of(second.connect(closed, 5.0))).code == "refused"
        assert (await fault_of(second.connect(closed, 5.0))).code == "refused", "p2pd says 'dial backoff' now"
        wrong = first.addresses[0].replace(first.peer_id, strangers[1])
        assert (await fault_of(second.connect(wrong, 5.0))).code == "peer id mismatch"
        unknown = f"/dns4/no-such-host.invalid/tcp/1/p2p/{strangers[2]}"
        assert (await fault_of(second.connect(unknown, 5.0))).code == "unreachable"
        with socket.create_server(("127.0.0.1", 0)) as silent:
            black_hole = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{strangers[3]}"
            began = time.monotonic()
            assert (await fault_of(second.connect(black_hole, 0.5))).code == "timeout"
            assert time.monotonic() - began < 1.0
        assert await second.connect(first.addresses[0], 5.0) == first.peer_id
        assert await second.peers() == [first.peer_id]
        for _ in range(20):  # a p2pd that was asked whether we can be reached may just be dialling back
            await second.disconnect(first.peer_id)
            if not await second.peers():
                break
            await asyncio.sleep(0.1)
        assert await second.peers() == []


async def test_a_peer_that_comes_back_is_dialled_at_once(tmp_path: Path) -> None:
    # p2pd lets an address rest for longer and longer after each failed dial: 5 s, 6 s, 9 s, ... 5 minutes.
    async with hosts(tmp_path, 1) as (host,):
        person, port = identity(tmp_path, "late"), free_port()
        listen = f"/ip4/127.0.0.1/tcp/{port}"
        for _ in range(5):
            assert (await fault_of(host.connect(f"{listen}/p2p/{person.peer_id}", 2.0))).code == "refused"
        late = await Host.start(person, HostConfig(listen=(listen,)))
        assert await host.connect(f"{listen}/p2p/{person.peer_id}", 2.0) == late.peer_id
        await late.close()


@pytest.mark.parametrize(
    "address", ["", "hello", "/ip4/127.0.0.1/tcp/1", "/p2p/x", "/ip4/1.2.3.4/tcp/1/p2p/QmYyQSo1c1Ym7orW"]
)
async def test_bad_addresses_are_told_before_anything_is_dialled(tmp_path: Path, address: str) -> None:
    async with hosts(tmp_path, 1) as (host,):
        assert (await fault_of(host.connect(address))).code == "bad address"
        assert (await fault_of(host.connect(host.addresses[0]))).code == "bad address", "our own"


async def test_a_peer_is_found_by_its_id_through_a_common_neighbour(tmp_path: Path) -> None:
    async with hosts(tmp_path, 3) as (_, second, third):
        await second.serve(echo)
        answer = b""
        async with asyncio.timeout(10.0):  # p2pd's own routing table fills a moment after the links are made
            while not answer:
                try:
                    answer = await third.call(second.peer_id, b"never dialled", 5.0)
                except TransportFault:
                    await asyncio.sleep(0.05)
        assert answer == b"never dialled"


# ---------------------------------------------------------------------- unary calls


async def test_calls_carry_bytes_and_the_callers_id(tmp_path: Path) -> None:
    async def who(request: bytes, peer_id: str) -> bytes:
        return peer_id.encode() + b" " + request

    async with hosts(tmp_path, 2) as (first, second):
        assert (await fault_of(second.call(first.peer_id, b""))).code == "protocol mismatch"
        await first.serve(who)
        assert await second.call(first.peer_id, b"\x00\xff") == second.peer_id.encode() + b" \x00\xff"
        await first.p2p.control.remove_unary_handler(RPC_PROTOCOL)
        await first.serve(echo)
        largest = os.urandom(UNARY_BYTES_MAX)
        assert await second.call(first.peer_id, largest) == largest
        with pytest.raises(LocalFault):
            await second.call(first.peer_id, largest + b"x")


async def test_a_request_over_the_limit_is_refused_by_the_receiver_too(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (first, second):
        await first.serve(echo)
        peer = first.p2p.peer_id
        with pytest.raises(Exception, match="request too large"):
            await second.p2p.control.call_unary_handler(peer, RPC_PROTOCOL, bytes(UNARY_BYTES_MAX + 1))
        assert first.refusals == {"request too large": 1}


async def test_faults_and_bugs_of_a_handler_are_answers_and_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(request: bytes, peer_id: str) -> bytes:
        if request == b"fault":
            raise PeerFault("nonsense", "that was")
        raise KeyError("a secret of ours")

    async with hosts(tmp_path, 2) as (first, second):
        await first.serve(handler)
        with pytest.raises(PeerFault, match="remote error: nonsense: that was"):
            await second.call(first.peer_id, b"fault")
        with pytest.raises(PeerFault, match="remote error: handler failed") as caught:
            await second.call(first.peer_id, b"bug")
        assert "secret" not in str(caught.value)
        assert "KeyError: 'a secret of ours'" in caplog.text, "a bug is shown where it is"
        assert first.refusals == {"nonsense": 1, "handler failed": 1}


async def test_a_call_waits_no_longer_than_asked_and_the_host_goes_on(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (first, second):
        await first.serve(never)
        began = time.monotonic()
        assert (await fault_of(second.call(first.peer_id, b"", 0.2))).code == "timeout"
        assert time.monotonic() - began < 1.0
        await second.serve(echo)
        assert await first.call(second.peer_id, b"on") == b"on"
        await until(lambda: not first.p2p.control._handler_tasks)  # the cancellation arrived there


async def test_one_peer_cannot_hold_more_than_its_share_of_handlers(tmp_path: Path) -> None:
    async with hosts(tmp_path, 3) as (first, second, third):
        await first.serve(never)
        waiting = [asyncio.create_task(second.call(first.peer_id, b"", 5.0)) for _ in range(HANDLINGS_PER_PEER_MAX)]
        await until(lambda: len(first.p2p.control._handler_tasks) == HANDLINGS_PER_PEER_MAX)
        with pytest.raises(PeerFault, match="too many calls at once"):
            await second.call(first.peer_id, b"", 5.0)
        other = asyncio.create_task(third.call(first.peer_id, b"", 5.0))
        await until(lambda: len(first.p2p.control._handler_tasks) == HANDLINGS_PER_PEER_MAX + 1)
        for task in (*waiting, other):
            task.cancel()
        await asyncio.gather(*waiting, other, return_exceptions=True)
        await until(lambda: not first.p2p.control._handlings)
        assert first.refusals == {"too many calls at once": 1}


async def test_cancelling_a_call_while_its_answer_arrives_leaves_the_connection_alive(tmp_path: Path) -> None:
    # hivemind sets the result of a cancelled future there, which kills its reader for good.
    async with hosts(tmp_path, 2) as (first, second):
        await first.serve(echo)
        for delay_us in range(10, 3000, 20):
            with suppress(TransportFault):
                await second.call(first.peer_id, b"x", delay_us / 1e6)
        assert await second.call(first.peer_id, b"alive", 2.0) == b"alive"


# ---------------------------------------------------------------------- p2pd dies


async def test_when_p2pd_dies_every_wait_ends_within_a_second(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (first, second):
        await first.serve(never)
        await second.subscribe("t", lambda sender, data: None)
        pending = asyncio.create_task(second.call(first.peer_id, b"", 30.0))
        await until(lambda: first.p2p.control._handler_tasks)
        assert not second.died.is_set()
        second.p2p._child.kill()
        async with asyncio.timeout(1.0):
            assert (await fault_of(pending)).code == "p2pd died"
            await second.died.wait()
        for work in (
            second.call(first.peer_id, b""),
            second.connect(first.addresses[0]),
            second.publish("t", b""),
            second.open_stream(first.peer_id, "/x"),
            second.peers(),
        ):
            began = time.monotonic()
            assert (await fault_of(work)).code == "p2pd died"
            assert time.monotonic() - began < 0.1


async def test_when_the_other_p2pd_dies_the_caller_is_told(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (first, second):
        await first.serve(never)
        pending = asyncio.create_task(second.call(first.peer_id, b"", 30.0))
        await until(lambda: first.p2p.control._handler_tasks)
        first.p2p._child.kill()
        async with asyncio.timeout(2.0):
            assert (await fault_of(pending)).code == "unreachable"
        assert (await fault_of(second.call(first.peer_id, b"", 5.0))).code in ("refused", "unreachable")


# ---------------------------------------------------------------------- streams


async def test_streams_carry_bytes_both_ways_and_end(tmp_path: Path) -> None:
    async def reverse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        size = int.from_bytes(await reader.readexactly(4), "big")
        data = await reader.readexactly(size)
        writer.write(peer_id.encode() + data[::-1])

    async with hosts(tmp_path, 2) as (first, second):
        await first.serve_stream("/x/reverse", reverse)
        assert (await fault_of(second.open_stream(first.peer_id, "/x/nothing"))).code == "protocol mismatch"
        reader, writer = await second.open_stream(first.peer_id, "/x/reverse", 5.0)
        data = os.urandom(5_000_000)
        writer.write(len(data).to_bytes(4, "big") + data)
        async with asyncio.timeout(10.0):
            answer = await reader.read(-1)
        writer.close()
        assert answer == second.peer_id.encode() + data[::-1]


async def test_a_stream_that_breaks_rules_is_closed_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        kind = await reader.readexactly(1)
        raise PeerFault("malformed") if kind == b"p" else ZeroDivisionError("ours")

    async with hosts(tmp_path, 2) as (first, second):
        await first.serve_stream("/x", handler)
        for kind in (b"p", b"b", b""):
            reader, writer = await second.open_stream(first.peer_id, "/x")
            writer.write(kind)
            if not kind:
                writer.close()
            async with asyncio.timeout(5.0):
                assert await reader.read(-1) == b""
            writer.close()
        await until(lambda: not first.p2p.control._streams)
        assert first.refusals == {"malformed": 1, "handler failed": 1}, "a peer that leaves early is no fault"
        assert "ZeroDivisionError: ours" in caplog.text


async def test_one_peer_cannot_open_more_than_its_share_of_streams(tmp_path: Path) -> None:
    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer_id: str) -> None:
        await reader.read(1)

    async with hosts(tmp_path, 2) as (first, second):
        await first.serve_stream("/x", wait)
        streams = [await second.open_stream(first.peer_id, "/x") for _ in range(STREAMS_PER_PEER_MAX)]
        await until(lambda: first._streams[second.peer_id] == STREAMS_PER_PEER_MAX)
        reader, writer = await second.open_stream(first.peer_id, "/x")
        async with asyncio.timeout(5.0):
            assert await reader.read(-1) == b""
        assert first.refusals == {"too many streams": 1}
        for _, each in (*streams, (reader, writer)):
            each.close()
        await until(lambda: not first._streams)


# ---------------------------------------------------------------------- gossip


async def gossip_until_heard(sender: Host, topic: str, heard: "asyncio.Queue[tuple[str, bytes]]") -> None:
    """A subscription takes some heartbeats to be known; until then messages are lost, which is allowed."""
    async with asyncio.timeout(10.0):
        while heard.empty():
            await sender.publish(topic, b"are you there")
            await asyncio.sleep(0.05)


async def test_gossip_reaches_everybody_with_the_senders_id(tmp_path: Path) -> None:
    async with hosts(tmp_path, 3) as started:
        queues = []
        for host in started:
            queue: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
            await host.subscribe("t", lambda sender, data, queue=queue: queue.put_nowait((sender, data)))
            queues.append(queue)
        await gossip_until_heard(started[1], "t", queues[2])
        await gossip_until_heard(started[1], "t", queues[0])
        await started[1].publish("t", b"news")
        for queue in (queues[0], queues[2]):
            async with asyncio.timeout(5.0):
                while (message := await queue.get())[1] != b"news":
                    assert message == (started[1].peer_id, b"are you there")
            assert message == (started[1].peer_id, b"news"), "two hops away as well: the sender is signed"
        assert queues[1].empty(), "not our own"


async def test_b19_gossip_too_large_raises_before_it_is_sent_and_disturbs_nobody(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (first, second):
        heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        await first.subscribe("t", lambda sender, data: heard.put_nowait((sender, data)))
        await gossip_until_heard(second, "t", heard)
        for size in (GOSSIP_BYTES_MAX + 1, 64 * 1024, 2**20 - 1, 2**20 + 1, 5 * 2**20):
            with pytest.raises(LocalFault, match=str(size)):
                await second.publish("t", bytes(size))
        for size in (900, GOSSIP_BYTES_MAX):
            await second.publish("t", bytes(size))
            async with asyncio.timeout(5.0):
                while (await heard.get())[1] != bytes(size):
                    pass


async def test_b19_gossip_too_large_from_others_is_dropped_and_counted(tmp_path: Path) -> None:
    async with hosts(tmp_path, 2) as (first, second):
        heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        await first.subscribe("t", lambda sender, data: heard.put_nowait((sender, data)))
        await gossip_until_heard(second, "t", heard)
        message = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic="t", data=bytes(100_000))
        await second.p2p.control.request(p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=message))
        await second.publish("t", b"after")
        async with asyncio.timeout(5.0):
            while (message := await heard.get())[1] != b"after":
                assert len(message[1]) < 100
        await until(lambda: first.refusals == {"gossip too large": 1})


async def test_a_subscription_that_ends_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.host.RESUBSCRIBE_S", 0.01)
    async with hosts(tmp_path, 2) as (first, second):
        writers = []
        open_subscription = first._open_subscription

        async def remember(topic: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await open_subscription(topic)
            writers.append(writer)
            return reader, writer

        monkeypatch.setattr(first, "_open_subscription", remember)
        heard: asyncio.Queue[tuple[str, bytes]] = asyncio.Queue()
        await first.subscribe("t", lambda sender, data: heard.put_nowait((sender, data)))
        writers[0].transport.abort()
        await until(lambda: len(writers) == 2)
        await gossip_until_heard(second, "t", heard)
        assert heard.get_nowait() == (second.peer_id, b"are you there")
