"""A peer's place in the network: connections, unary calls, streams and gossip over one p2pd.

Whatever goes wrong out there arrives as one of two faults (protocols/faults.py): TransportFault, whose code
says what the network did, or PeerFault, when the other side answered with an error. Every wait has a limit;
when p2pd dies, all waits end at once and `died` is set. Messages of strangers are bounded before anybody
decodes them, and what is refused is counted by reason in `refusals`.

    codes   refused  timeout  peer id mismatch  bad address  unreachable  protocol mismatch
            port in use  p2pd failed  p2pd died  closed
"""

import asyncio
import errno
import logging
import math
import socket
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from hivemind.p2p.p2p_daemon_bindings.utils import read_unsigned_varint
from hivemind.proto import p2pd_pb2
from hivemind.utils.logging import use_hivemind_log_handler
from hivemind.utils.multiaddr import Multiaddr
from msgspec import Meta

from protocols import PROTOCOL
from protocols.faults import LocalFault, PeerFault, TransportFault
from protocols.identity import public_of, short
from protocols.messages import GOSSIP_BYTES_MAX, UNARY_BYTES_MAX
from swarm.identity import Identity
from swarm.p2pd import (
    DEFAULT_MAX_MSG_SIZE,
    Control,
    Daemon,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    arguments_of,
    remove_leftovers,
)

log = logging.getLogger(__name__)

RPC_PROTOCOL = f"/{PROTOCOL}/rpc"
STREAMS_PER_PEER_MAX = 16  # a peer fetches a blob over one stream each from a few sources; more is a flood
GOSSIP_FRAME_BYTES_MAX = GOSSIP_BYTES_MAX + 1024  # with sender, topic, sequence number, signature and key
DIALS_REMEMBERED_MAX = 256  # a guess; only the wording of an error depends on it
RESUBSCRIBE_S = 0.5  # p2pd ends a subscription only when it is overloaded or dies

UnaryHandler = Callable[[bytes, str], Awaitable[bytes]]
StreamHandler = Callable[[asyncio.StreamReader, asyncio.StreamWriter, str], Awaitable[None]]
GossipHandler = Callable[[str, bytes], None]

# What p2pd says when it cannot reach a peer, in the order in which we look for it (measured, p2pd of hivemind 1.1.12).
_DIAL_TEXTS = (
    ("peer id mismatch", "peer id mismatch"),
    ("connection refused", "refused"),
    ("context deadline exceeded", "timeout"),
    ("i/o timeout", "timeout"),
    ("protocols not supported", "protocol mismatch"),
)


class HostConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a peer is reached and how long it waits. Addresses are multiaddrs without the /p2p/ part."""

    listen: tuple[str, ...] = ("/ip4/127.0.0.1/tcp/0",)
    announce: tuple[str, ...] = ()
    """Addresses to tell others instead of those listened on: behind a port forwarding or a proxy."""
    relays: tuple[str, ...] = ()
    """Relays (with /p2p/) to be reached through, for a peer that nobody can dial."""
    serve_relay: bool = False
    """Relay for others: bootstrap peers do."""
    nat_port_map: bool = False
    """Ask the router for a port by UPnP; off, because loopback and LAN swarms need none and it delays the start."""
    gossip_heartbeat_ms: Annotated[int, Meta(ge=100, le=1000)] = 300
    """GossipSub mends its mesh once a heartbeat; libp2p's own 1 s makes a new peer miss messages for longer."""
    startup_timeout_s: Annotated[float, Meta(gt=0.0)] = 60.0
    """p2pd needs 0.3 s on an idle machine; on a loaded laptop or a Raspberry Pi over 15 s were seen."""
    call_timeout_s: Annotated[float, Meta(gt=0.0)] = 10.0
    """Of calls, dials and stream openings that name no limit of their own."""
    debug: bool = False

    def __post_init__(self) -> None:
        for address in (*self.listen, *self.announce, *self.relays):
            _parse(address, ValueError)
        if any("/tcp/0" in address or "/udp/0" in address for address in self.announce):
            raise ValueError("announce: port 0 cannot be dialled; give the real port")


class Host:
    """One running peer of the network. Made by `await Host.start(...)`; `close` it."""

    peer_id: str
    addresses: list[str]
    """Where others can dial us, each with /p2p/<our id>."""

    def __init__(self, identity: Identity, config: HostConfig, daemon: Daemon) -> None:
        self.peer_id = identity.peer_id
        self.config = config
        self.addresses = []
        self._daemon = daemon
        self._subscriptions: list[asyncio.Task[None]] = []
        self._streams: Counter[str] = Counter()
        self._dials: OrderedDict[str, TransportFault] = OrderedDict()

    @classmethod
    async def start(cls, identity: Identity, config: HostConfig) -> "Host":
        """Start p2pd. Raises TransportFault 'port in use' or 'p2pd failed'; nothing is left behind then."""
        use_hivemind_log_handler("nowhere")
        logging.getLogger("hivemind").setLevel(logging.DEBUG if config.debug else logging.WARNING)
        remove_leftovers()
        for address in config.listen:
            _require_free_port(address)
        arguments = _arguments(identity, config)
        daemon = await Daemon.launch(arguments, config.startup_timeout_s, config.debug)
        self = cls(identity, config, daemon)
        await self.identify()
        return self

    @property
    def p2p(self) -> Daemon:
        """What hivemind's DHTNode.create takes as `p2p`."""
        return self._daemon

    @property
    def died(self) -> asyncio.Event:
        """Set when p2pd ended by itself. Nothing works any more then."""
        return self._daemon.died

    @property
    def refusals(self) -> Counter[str]:
        """What peers sent and we did not handle, by reason."""
        return self._control.refusals

    @property
    def _control(self) -> Control:
        return self._daemon.control

    async def identify(self) -> list[str]:
        """Ask p2pd for our addresses again (relayed and mapped ones appear late); also kept in `addresses`."""
        self.addresses = await self._daemon.identify()
        return self.addresses

    async def close(self) -> None:
        """End p2pd and all tasks; takes about 3 s at most."""
        for task in self._subscriptions:
            task.cancel()
        await asyncio.gather(*self._subscriptions, return_exceptions=True)
        await self._daemon.stop()

    # ------------------------------------------------------------------ connections

    async def connect(self, address: str, timeout_s: float | None = None) -> str:
        """Dial `<multiaddr>/p2p/<peer id>`; the peer id. TransportFault: refused, timeout, peer id mismatch, ..."""
        dial, peer_id = split_address(address)
        if peer_id == self.peer_id:
            raise TransportFault("bad address", f"{address} is our own")
        limit_s = timeout_s or self.config.call_timeout_s
        target = p2pd_pb2.ConnectRequest(
            peer=_peer(peer_id).to_bytes(), addrs=[dial.to_bytes()], timeout=math.ceil(limit_s)
        )
        if peer_id not in await self.peers():  # then p2pd does not dial
            await _knock(address, limit_s)
        try:
            await self._ask(p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=target), limit_s, address)
        except TransportFault as fault:
            raise self._remembered(address, fault) from fault
        self._dials.pop(address, None)
        return peer_id

    def _remembered(self, address: str, fault: TransportFault) -> TransportFault:
        """p2pd refuses to dial again for some seconds and says only 'dial backoff': tell the real reason."""
        if "dial backoff" in fault.detail:
            return self._dials.get(address, fault)
        self._dials[address] = fault
        while len(self._dials) > DIALS_REMEMBERED_MAX:
            self._dials.popitem(last=False)
        return fault

    async def peers(self) -> list[str]:
        """Everybody we have a connection with, whatever their run."""
        return sorted({str(PeerID(peer.id)) for peer in await self._connections()})

    async def addresses_of(self, peer_id: str) -> list[str]:
        """The far ends of our connections with a peer, as we see them: behind a NAT not what it listens on."""
        wanted = _peer(peer_id).to_bytes()
        seen = {str(Multiaddr(raw)) for peer in await self._connections() if peer.id == wanted for raw in peer.addrs}
        return sorted(seen)

    async def _connections(self) -> Any:
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
        return (await self._ask(request, self.config.call_timeout_s, "peers")).peers

    async def disconnect(self, peer_id: str) -> None:
        """Close all connections with a peer. It may come back."""
        target = p2pd_pb2.DisconnectRequest(peer=_peer(peer_id).to_bytes())
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.DISCONNECT, disconnect=target)
        await self._ask(request, self.config.call_timeout_s, short(peer_id))

    # ------------------------------------------------------------------ unary calls

    async def serve(self, handler: UnaryHandler) -> None:
        """Answer calls with `handler(request, peer id)`. A PeerFault becomes an error answer and is counted.

        libp2p lets in keys of other kinds than ours; their ids have no place in any message, so they are refused here.
        """

        async def handle(request: bytes, remote: PeerID) -> bytes:
            public_of(str(remote))
            if len(request) > UNARY_BYTES_MAX:
                raise PeerFault("request too large")
            answer = await handler(request, str(remote))
            if len(answer) > UNARY_BYTES_MAX:
                raise LocalFault(f"answer of {len(answer)} bytes is over {UNARY_BYTES_MAX}")
            return answer

        await self._control.add_unary_handler(RPC_PROTOCOL, handle)

    async def call(self, peer_id: str, request: bytes, timeout_s: float | None = None) -> bytes:
        """The peer's answer. Raises TransportFault, or PeerFault 'remote error' when the peer refused."""
        if len(request) > UNARY_BYTES_MAX:
            raise LocalFault(f"request of {len(request)} bytes is over {UNARY_BYTES_MAX}")
        limit_s = timeout_s or self.config.call_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                answer = await self._control.call_unary_handler(_peer(peer_id), RPC_PROTOCOL, request)
        except TimeoutError as error:
            raise TransportFault("timeout", f"no answer from {short(peer_id)} in {limit_s:g} s") from error
        except P2PDaemonError as error:
            raise _fault_of(str(error), short(peer_id)) from error
        except P2PHandlerError as error:
            raise PeerFault("remote error", str(error)[:200]) from error
        if len(answer) > UNARY_BYTES_MAX:
            raise PeerFault("answer too large", f"{len(answer)} bytes")
        return answer

    # ------------------------------------------------------------------ streams

    async def serve_stream(self, protocol: str, handler: StreamHandler) -> None:
        """Run `handler(reader, writer, peer id)` for each stream a peer opens; it is closed when that returns."""

        async def handle(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer_id = str(PeerID(info.peer))
            if self._streams[peer_id] >= STREAMS_PER_PEER_MAX:
                raise PeerFault("too many streams")
            self._streams[peer_id] += 1
            try:
                await handler(reader, writer, peer_id)
                await writer.drain()
            finally:
                self._streams[peer_id] -= 1
                if not self._streams[peer_id]:
                    del self._streams[peer_id]

        self._control.handlers[protocol] = handle
        target = p2pd_pb2.StreamHandlerRequest(
            addr=self._control.listen_maddr.to_bytes(), proto=[protocol], balanced=False
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_HANDLER, streamHandler=target)
        await self._ask(request, self.config.call_timeout_s, protocol)

    async def open_stream(
        self, peer_id: str, protocol: str, timeout_s: float | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A stream to a peer's handler of `protocol`; close the writer. Raises TransportFault."""
        limit_s = timeout_s or self.config.call_timeout_s
        target = p2pd_pb2.StreamOpenRequest(
            peer=_peer(peer_id).to_bytes(), proto=[protocol], timeout=math.ceil(limit_s)
        )
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=target)
        with _Faults(short(peer_id), limit_s):
            async with asyncio.timeout(limit_s):
                reader, writer, _ = await self._control.open(request)
        return reader, writer

    # ------------------------------------------------------------------ gossip

    async def publish(self, topic: str, data: bytes) -> None:
        """Tell everybody who subscribed. Delivery is not promised. LocalFault when it is too large to arrive."""
        if len(data) > GOSSIP_BYTES_MAX:
            raise LocalFault(f"gossip of {len(data)} bytes is over {GOSSIP_BYTES_MAX}")
        message = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.PUBLISH, topic=topic, data=data)
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=message)
        await self._ask(request, self.config.call_timeout_s, topic)

    async def subscribe(self, topic: str, on_message: GossipHandler) -> None:
        """Hear a topic from now on: `on_message(sender's peer id, data)` must only enqueue. Not our own messages."""
        reader, writer = await self._open_subscription(topic)
        task = asyncio.create_task(self._hear(topic, on_message, reader, writer))
        self._subscriptions.append(task)
        task.add_done_callback(_show_failure)

    async def _open_subscription(self, topic: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        message = p2pd_pb2.PSRequest(type=p2pd_pb2.PSRequest.SUBSCRIBE, topic=topic)
        request = p2pd_pb2.Request(type=p2pd_pb2.Request.PUBSUB, pubsub=message)
        limit_s = self.config.call_timeout_s
        with _Faults(topic, limit_s):
            async with asyncio.timeout(limit_s):
                reader, writer, _ = await self._control.open(request)
        return reader, writer

    async def _hear(
        self, topic: str, on_message: GossipHandler, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while True:
            try:
                with suppress(asyncio.IncompleteReadError, OSError):
                    await self._read_gossip(reader, on_message)
            finally:
                writer.close()
            while True:
                if self._control.over is not None:
                    return
                log.warning("subscription to %s ended; subscribing again", topic)
                await asyncio.sleep(RESUBSCRIBE_S)
                with suppress(TransportFault):
                    reader, writer = await self._open_subscription(topic)
                    break

    async def _read_gossip(self, reader: asyncio.StreamReader, on_message: GossipHandler) -> None:
        while True:
            size = await read_unsigned_varint(reader)
            frame = await reader.readexactly(size)  # p2pd drops what is over 1 MiB
            if size > GOSSIP_FRAME_BYTES_MAX:
                self.refusals["gossip too large"] += 1
                continue
            message = p2pd_pb2.PSMessage.FromString(frame)
            sender = str(PeerID(getattr(message, "from")))
            if sender != self.peer_id:
                on_message(sender, message.data)

    async def _ask(self, request: Any, limit_s: float, about: str) -> Any:
        with _Faults(about, limit_s):
            async with asyncio.timeout(limit_s):
                return await self._control.request(request)


class _Faults:
    """Turns p2pd's errors and a passed limit into TransportFault."""

    def __init__(self, about: str, limit_s: float) -> None:
        self.about = about
        self.limit_s = limit_s

    def __enter__(self) -> None:
        return None

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, TimeoutError):
            raise TransportFault("timeout", f"{self.about}: no answer in {self.limit_s:g} s") from error
        if isinstance(error, P2PDaemonError):
            raise _fault_of(str(error), self.about) from error


def split_address(address: str) -> tuple[Any, str]:
    """(what to dial, peer id) of `<multiaddr>/p2p/<peer id>`. Raises TransportFault 'bad address'."""
    head, mark, peer_id = address.strip().rpartition("/p2p/")
    if not mark or not head:
        raise TransportFault("bad address", f"{address!r} does not end in /p2p/<peer id>")
    try:
        public_of(peer_id)
    except PeerFault as fault:
        raise TransportFault("bad address", f"{peer_id!r} is not a peer id") from fault
    return _parse(head, lambda text: TransportFault("bad address", text)), peer_id


def _parse(address: str, fault: Callable[[str], Exception]) -> Any:
    try:
        return Multiaddr(address)
    except (ValueError, LookupError) as error:  # the parser's own errors are of these types
        raise fault(f"{address!r} is not a multiaddr like /ip4/192.0.2.1/tcp/4001: {error}") from error


def _peer(peer_id: str) -> PeerID:
    public_of(peer_id)
    return PeerID.from_base58(peer_id)


def _fault_of(text: str, about: str) -> TransportFault:
    """p2pd's error as a fault. It lists every address it tried: the one that was asked for counts most."""
    lines = [line for line in text.splitlines() if f"[{about.rpartition('/p2p/')[0]}]" in line]
    reason = lines[0] if lines else text.rpartition("failed to dial ")[2]
    if "no good addresses" in reason:
        reason = "no usable address: the name does not resolve, or p2pd does not speak this transport"
    code = next((code for words, code in _DIAL_TEXTS if words in reason), "unreachable")
    return TransportFault(code, f"{about}: {reason.strip()[:300]}")


async def _knock(address: str, limit_s: float) -> None:
    """See whether anybody listens at a TCP address. Raises TransportFault; says nothing of other transports.

    p2pd dials an address where it failed n times only after 5 + n^2 s, at last 5 minutes, whatever happens meanwhile:
    after an hour without its network a laptop would be back minutes late. So p2pd dials only where somebody listens.
    """
    match address.strip().strip("/").split("/"):
        case [("ip4" | "ip6" | "dns" | "dns4" | "dns6") as kind, name, "tcp", port, "p2p", _]:
            family = {"4": socket.AF_INET, "6": socket.AF_INET6}.get(kind[-1], socket.AF_UNSPEC)
        case _:
            return
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(name, int(port), family=family)
    except TimeoutError as error:
        raise TransportFault("timeout", f"{address}: no answer in {limit_s:g} s") from error
    except ConnectionRefusedError as error:
        raise TransportFault("refused", f"{address}: connection refused") from error
    except (OSError, UnicodeError) as error:  # a name with an empty or a long label has no encoding
        raise TransportFault("unreachable", f"{address}: {error}") from error
    writer.close()


def _require_free_port(address: str) -> None:
    """p2pd listens with SO_REUSEPORT: two on one port both start, and share the callers. So we look first."""
    parts = _parts(address)
    host = parts.get("ip4") or parts.get("ip6")
    kind, port = ("tcp", parts["tcp"]) if "tcp" in parts else ("udp", parts.get("udp", "0"))
    if host is None or port == "0":
        return
    family = socket.AF_INET if "ip4" in parts else socket.AF_INET6
    with socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM) as probe:
        if kind == "tcp":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closing connections of before do not count
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise TransportFault("port in use", address) from error


def tcp_port(address: str) -> int | None:
    """The TCP port of `/ip4/.../tcp/4001...` or `/ip6/...`; None for names and other transports."""
    match address.strip("/").split("/"):
        case ["ip4" | "ip6", _, "tcp", port, *_]:
            return int(port)
        case _:
            return None


def _parts(address: str) -> dict[str, str]:
    words = address.strip("/").split("/")
    return dict(zip(words[::2], words[1::2], strict=False))


def _arguments(identity: Identity, config: HostConfig) -> list[str]:
    return arguments_of(
        {
            "id": str(identity.path),
            "hostAddrs": ",".join(config.listen) or None,
            "noListenAddrs": None if config.listen else True,
            "announceAddrs": ",".join(config.announce) or None,
            "pubsub": True,
            "gossipsubHeartbeatInterval": f"{config.gossip_heartbeat_ms}ms",
            "gossipsubHeartbeatInitialDelay": "100ms",
            "dhtServer": True,  # libp2p's own DHT: how p2pd finds the address of a peer known by id only
            "relay": True,
            "relayService": config.serve_relay,
            "autoRelay": bool(config.relays),
            "trustedRelays": ",".join(config.relays) or None,
            "forceReachabilityPrivate": True if config.relays else None,
            "autonat": False,  # reachability is configured, not guessed
            "natPortMap": config.nat_port_map,
            "connManager": True,
            "idleTimeout": "30s",  # p2pd ends by itself if we die before we connect to it
            "persistentConnMaxMsgSize": DEFAULT_MAX_MSG_SIZE,  # what both ends of that connection assume
        }
    )


def _show_failure(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a subscription failed", exc_info=error)
