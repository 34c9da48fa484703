"""One p2pd child process, and the sockets between it and us.

    this process --control.sock--> p2pd          requests, one connection each
                 --control.sock--> p2pd          one persistent connection: unary calls, both ways
                 <--streams.sock-- p2pd          one connection for each stream that a peer opens

`Daemon` is a hivemind `P2P` (so that `DHTNode.create(p2p=...)` takes it), but starts and stops the child
itself: GossipSub on, a start-up limit of our own, the last words of p2pd kept for error messages, nothing
left behind. `Control` is hivemind's client without its ways to hang: a response to a call that was
cancelled in the same instant killed the reader, and when p2pd died every pending call waited for ever.

Both sockets live in a 0700 folder of their own. Whoever can open them can speak in our name.
"""

import asyncio
import logging
import os
import shutil
import socket
import tempfile
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any
from uuid import UUID

import hivemind.hivemind_cli
from google.protobuf.message import DecodeError, Message  # type: ignore[import-untyped]
from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import (
    DEFAULT_MAX_MSG_SIZE,
    ControlClient,
    DaemonConnector,
    P2PDaemonError,
    P2PHandlerError,
)
from hivemind.p2p.p2p_daemon_bindings.p2pclient import Client
from hivemind.p2p.p2p_daemon_bindings.utils import read_unsigned_varint
from hivemind.proto import p2pd_pb2
from hivemind.utils.multiaddr import Multiaddr

from protocols.faults import PeerFault, TransportFault

log = logging.getLogger(__name__)

STREAM_BUFFER_BYTES = (
    256 * 1024
)  # one blob chunk; on loopback 5 to 25 % faster than asyncio's 64 KiB, and 1 MiB no better
STOP_S = 3.0  # p2pd ends 20 ms after SIGTERM; a child that takes this long is stuck
LAST_LINES = 20  # of p2pd's output, for error messages; Go's fatal errors are one line
LEFTOVERS_MAX = 256  # socket folders looked at on start: a large simulation's
LEFTOVER_AGE_S = 600.0  # longer than any start takes: p2pd may not listen yet in a younger folder
HANDLINGS_PER_PEER_MAX = 32  # of one protocol; a DHT node has 4 lookups of 4 workers in flight, a peer two calls
ROUTING_PAUSES_S = (0.05, 0.2)  # identifying a new neighbour takes p2pd 5 to 50 ms
_NO_ROUTE_YET = ("routing: not found", "failed to find any peer in table")
_FOLDER_PREFIX = "echo-swarm-p2pd-"
_CONTROL, _STREAMS = "control.sock", "streams.sock"


async def write_message(writer: asyncio.StreamWriter, message: Message) -> None:
    """A protobuf message behind its length, as p2pd reads it, in one write."""
    raw = message.SerializeToString()
    size, head = len(raw), bytearray()
    while size > 0x7F:
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    writer.write(bytes(head) + raw)
    await writer.drain()


async def read_message(reader: asyncio.StreamReader, message: Message) -> None:
    """Raises IncompleteReadError at the end of the connection."""
    message.ParseFromString(await reader.readexactly(await read_unsigned_varint(reader)))


class _Connector(DaemonConnector):  # type: ignore[misc]
    """Opens connections to p2pd with large buffers."""

    async def open_connection(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        path = self.control_maddr["unix"]
        return await asyncio.open_unix_connection(path, limit=STREAM_BUFFER_BYTES)


class Control(ControlClient):  # type: ignore[misc]
    """hivemind's control client; every pending call ends when the connection does."""

    refusals: Counter[str]
    """Requests of peers that were not handled, by reason."""

    def __init__(self, connector: _Connector, listen_maddr: Multiaddr) -> None:
        super().__init__(connector, listen_maddr, _initialized_with_create=True)
        self.refusals = Counter()
        self.over: str | None = None  # why nothing can be sent any more
        self._handlings: Counter[tuple[str, bytes]] = Counter()
        self._streams: set[asyncio.Task[None]] = set()

    def end(self, why: str) -> None:
        """Fail everything that waits for p2pd, now and from now on."""
        if self.over is None:
            self.over = why
        for future in self._pending_calls.values():
            if not future.done():
                future.set_exception(TransportFault(self.over))

    async def stop(self) -> None:
        """End all tasks, those of handlers included."""
        self.end("closed")
        tasks = [self._read_task, self._write_task, *self._handler_tasks.values(), *self._streams]
        tasks = [task for task in tasks if task is not None and task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _require(self) -> None:
        if self.over is not None:
            raise TransportFault(self.over)

    async def call_unary_handler(self, peer_id: PeerID, proto: str, data: bytes) -> bytes:
        """As hivemind's, but patient with a connection that is milliseconds old and not yet known to p2pd's DHT."""
        for pause_s in (*ROUTING_PAUSES_S, None):
            self._require()
            try:
                answer: bytes = await super().call_unary_handler(peer_id, proto, data)
            except P2PDaemonError as error:
                if pause_s is None or not any(text in str(error) for text in _NO_ROUTE_YET):
                    raise
                await asyncio.sleep(pause_s)
            else:
                return answer
        raise AssertionError  # the last round returns or raises

    async def add_unary_handler(self, proto: str, handler: Any, balanced: bool = False) -> None:
        self._require()
        await super().add_unary_handler(proto, handler, balanced)

    async def remove_unary_handler(self, proto: str) -> None:
        if self.over is None:  # otherwise there is no one to tell
            await super().remove_unary_handler(proto)

    async def _read_from_persistent_conn(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                response = p2pd_pb2.PersistentConnectionResponse()
                await read_message(reader, response)
                self._dispatch(UUID(bytes=response.callId), response)
        except (asyncio.IncompleteReadError, OSError, DecodeError, ValueError) as error:
            log.debug("connection to p2pd ended: %r", error)
        finally:
            self.end("p2pd died")

    def _dispatch(self, call_id: UUID, response: Any) -> None:
        if response.HasField("requestHandling"):
            task = asyncio.create_task(self._handle(response.requestHandling))
            self._handler_tasks[call_id] = task
            task.add_done_callback(partial(self._answer, call_id))
            return
        if response.HasField("cancel"):
            if call_id in self._handler_tasks:
                self._handler_tasks[call_id].cancel()
            return
        future = self._pending_calls.get(call_id)
        if future is None or future.done():
            return  # cancelled or timed out meanwhile
        if response.HasField("daemonError"):
            future.set_exception(P2PDaemonError(response.daemonError.message))
        elif not response.HasField("callUnaryResponse"):
            future.set_result(None)
        elif response.callUnaryResponse.HasField("response"):
            future.set_result(response.callUnaryResponse.response)
        else:
            future.set_exception(P2PHandlerError(response.callUnaryResponse.error.decode(errors="replace")))

    async def _write_to_persistent_conn(self, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await write_message(writer, await self._pending_messages.get())
        except OSError as error:
            log.debug("connection to p2pd broke: %r", error)
            self.end("p2pd died")
        finally:
            writer.close()

    async def _handle(self, request: Any) -> bytes:
        """One unary call of a peer: our own protocol's and hivemind's DHT alike."""
        slot = (request.proto, request.peer)
        if self._handlings[slot] >= HANDLINGS_PER_PEER_MAX:
            raise PeerFault("too many calls at once")
        if request.proto not in self.unary_handlers:
            raise PeerFault("unknown protocol", request.proto[:80])
        self._handlings[slot] += 1
        try:
            answer: bytes = await self.unary_handlers[request.proto](request.data, PeerID(request.peer))
        finally:
            self._handlings[slot] -= 1
            if not self._handlings[slot]:
                del self._handlings[slot]  # or the counter would remember every peer there ever was
        return answer

    def _answer(self, call_id: UUID, task: "asyncio.Task[bytes]") -> None:
        """Send what the handler returned, or why it returned nothing. A bug of ours is shown here, not there."""
        self._handler_tasks.pop(call_id, None)
        if task.cancelled():
            return
        answer = p2pd_pb2.CallUnaryResponse()
        match task.exception():
            case None:
                answer.response = task.result()
            case PeerFault() as fault:
                self.refusals[fault.reason] += 1
                answer.error = str(fault).encode()
            case DecodeError():  # hivemind's handlers parse the request themselves
                self.refusals["malformed request"] += 1
                answer.error = b"malformed request"
            case error:
                self._failed(error)
                answer.error = b"handler failed"
        if answer.ByteSize() > self.persistent_conn_max_msg_size - 64:  # p2pd would end the connection
            self.refusals["answer too large"] += 1
            answer = p2pd_pb2.CallUnaryResponse(error=b"answer too large")
        reply = p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, unaryResponse=answer)
        self._pending_messages.put_nowait(reply)

    def _failed(self, error: BaseException) -> None:
        self.refusals["handler failed"] += 1
        log.error("a handler failed", exc_info=error)

    async def request(self, message: Message) -> Any:
        """One request on a connection of its own: p2pd's answer. Raises TransportFault, P2PDaemonError."""
        _, writer, response = await self.open(message)
        writer.close()
        return response

    async def open(self, message: Message) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, Any]:
        """One request on a connection that stays open behind its answer (streams, subscriptions)."""
        self._require()
        response = p2pd_pb2.Response()
        writer: asyncio.StreamWriter | None = None
        answered = False
        try:
            reader, writer = await self.daemon_connector.open_connection()
            await write_message(writer, message)
            await read_message(reader, response)
            answered = True
        except (OSError, asyncio.IncompleteReadError) as error:
            raise TransportFault(self.over or "p2pd died") from error
        finally:
            if writer is not None and not answered:
                writer.close()
        if response.type == p2pd_pb2.Response.ERROR:
            writer.close()
            raise P2PDaemonError(response.error.msg)
        return reader, writer, response

    @asynccontextmanager
    async def listen(self) -> AsyncIterator["Control"]:
        """Accept the streams that peers open."""
        path = self.listen_maddr["unix"]
        server = await asyncio.start_unix_server(self._accept, path=path, limit=STREAM_BUFFER_BYTES)
        try:
            yield self
        finally:
            server.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve_stream(reader, writer))
        self._streams.add(task)
        task.add_done_callback(self._stream_ended)

    async def _serve_stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            info = p2pd_pb2.StreamInfo()
            await read_message(reader, info)
            await self.handlers[info.proto](info, reader, writer)
        finally:
            writer.close()

    def _stream_ended(self, task: "asyncio.Task[None]") -> None:
        self._streams.discard(task)
        if task.cancelled():
            return
        match task.exception():
            case None | OSError() | asyncio.IncompleteReadError():
                pass  # an early end: the peer went away, and there is nobody to tell
            case PeerFault() as fault:
                self.refusals[fault.reason] += 1
            case error:
                self._failed(error)


class Daemon(P2P):  # type: ignore[misc]
    """A running p2pd. `died` is set when it ends without having been told to."""

    def __init__(self) -> None:
        super().__init__()
        self.died = asyncio.Event()
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._folder: Path | None = None
        self._spawning: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._watch_task: asyncio.Task[None] | None = None

    @property
    def control(self) -> Control:
        """The client of this daemon."""
        control: Control = self._client.control
        return control

    @classmethod
    async def launch(cls, arguments: Sequence[str], timeout_s: float, debug: bool = False) -> "Daemon":
        """Start p2pd and connect to it. Raises TransportFault('p2pd failed'); leaves no process behind then."""
        self = cls()
        try:
            async with asyncio.timeout(timeout_s):
                await self._spawn(arguments, debug)
                await self._connect()
        except TimeoutError as error:
            await self.stop()
            raise TransportFault("p2pd failed", f"not ready after {timeout_s:g} s: {self._last_line()}") from error
        except (OSError, P2PDaemonError, TransportFault, asyncio.IncompleteReadError) as error:
            await self.stop()
            raise TransportFault("p2pd failed", self._last_line() or str(error)) from error
        except asyncio.CancelledError:
            await self.stop()
            raise
        self._watch_task = asyncio.create_task(self._watch())
        return self

    async def _spawn(self, arguments: Sequence[str], debug: bool) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix=_FOLDER_PREFIX, dir=_socket_parent()))
        self._daemon_listen_maddr = Multiaddr(f"/unix{self._folder / _CONTROL}")
        self._client_listen_maddr = Multiaddr(f"/unix{self._folder / _STREAMS}")
        environment = os.environ | {"GOLOG_LOG_FMT": "json", "GOLOG_LOG_LEVEL": "debug" if debug else "fatal"}
        with as_file(files(hivemind.hivemind_cli) / "p2pd") as binary:
            spawning = asyncio.create_subprocess_exec(
                binary,
                f"-listen={self._daemon_listen_maddr}",
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # Ctrl-C is for us: p2pd must live until we have said goodbye
            )
            self._spawning = asyncio.create_task(spawning)
            self._child = await asyncio.shield(self._spawning)  # uvloop forgets a child if it is cancelled here
        ready = asyncio.get_running_loop().create_future()
        self._reader_task = asyncio.create_task(self._read_lines(self._child.stdout, ready))
        await ready

    async def _connect(self) -> None:
        self._client = Client(_initialized_with_create=True)
        self._client.control = Control(_Connector(self._daemon_listen_maddr), self._client_listen_maddr)
        await self.control._ensure_persistent_conn()
        self._start_listening()
        await self.identify()
        self._alive = True

    async def identify(self) -> list[str]:
        """Our addresses as p2pd knows them now."""
        answer = await self.control.request(p2pd_pb2.Request(type=p2pd_pb2.Request.IDENTIFY))
        self.peer_id = PeerID(answer.identify.id)
        self._visible_maddrs = tuple(Multiaddr(address) for address in answer.identify.addrs)
        return [f"{address}/p2p/{self.peer_id}" for address in self._visible_maddrs]

    async def _read_lines(self, output: Any, ready: "asyncio.Future[None]") -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:  # longer than the buffer, which is dropped: not a line for people
                continue
            if not line:
                break
            text = line.decode(errors="replace").rstrip()
            self.last_lines.append(text)
            log.debug("p2pd: %s", text)
            if text.startswith("Peer ID:") and not ready.done():
                ready.set_result(None)
        if not ready.done():
            ready.set_exception(TransportFault("p2pd failed", self._last_line()))

    def _last_line(self) -> str:
        return self.last_lines[-1][-400:] if self.last_lines else ""

    async def _watch(self) -> None:
        code = await self._child.wait()
        self._alive = False
        self.control.end("p2pd died")
        log.error("p2pd ended by itself (exit code %s): %s", code, self._last_line())
        self.died.set()

    async def stop(self) -> None:
        """End the child and every task; remove the sockets. Takes STOP_S and a little at most."""
        tasks = [task for task in (self._watch_task, self._listen_task) if task is not None]
        for task in tasks:
            task.cancel()
        if self._client is not None:
            self.control.end("closed")
        child = await self._spawned()
        if child is not None:
            with suppress(ProcessLookupError):
                child.terminate()  # before its connection closes: asyncio loses a child that ends while it is told to
        if self._client is not None:
            await self.control.stop()
        if child is not None:
            await self._wait_or_kill(child)
        if self._reader_task is not None:
            self._reader_task.cancel()
            tasks.append(self._reader_task)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._alive = False
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    async def _spawned(self) -> asyncio.subprocess.Process | None:
        if self._spawning is None:
            return None
        await asyncio.wait([self._spawning])
        return self._spawning.result() if self._spawning.exception() is None else None

    @staticmethod
    async def _wait_or_kill(child: asyncio.subprocess.Process) -> None:
        try:
            async with asyncio.timeout(STOP_S):
                await child.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def shutdown(self) -> None:
        await self.stop()

    def _terminate(self) -> None:
        """For hivemind's finaliser. Nothing to do: p2pd ends by itself when its connection to us closes."""


def _socket_parent() -> Path:
    """Where socket folders go. A unix socket's path has 104 bytes at most (macOS), ours needs 40 below this."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= 60 else Path("/tmp")


def remove_leftovers() -> int:
    """Remove the socket folders that killed processes left: ours, not young, and nobody answers in them."""
    removed = 0
    for folder in sorted(_socket_parent().glob(f"{_FOLDER_PREFIX}*"))[:LEFTOVERS_MAX]:
        with suppress(OSError):  # gone meanwhile, or not ours to look at
            about = folder.lstat()
            if about.st_uid != os.geteuid() or time.time() - about.st_mtime < LEFTOVER_AGE_S:
                continue
            sockets = [folder / name for name in (_CONTROL, _STREAMS) if (folder / name).is_socket()]
            if not any(_answers(each) for each in sockets):
                for each in sockets:
                    each.unlink()
                folder.rmdir()  # fails if there is anything else in it
                removed += 1
    return removed


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # a full queue: alive, and busy
            return True
    return True


def arguments_of(flags: dict[str, str | int | bool | None]) -> list[str]:
    """p2pd's flags in Go's form; None leaves one out."""
    given = {name: value for name, value in flags.items() if value is not None}
    return [f"-{name}={int(value) if isinstance(value, bool) else value}" for name, value in given.items()]


__all__ = [
    "DEFAULT_MAX_MSG_SIZE",
    "Control",
    "Daemon",
    "P2PDaemonError",
    "P2PHandlerError",
    "PeerID",
    "arguments_of",
    "read_message",
    "remove_leftovers",
    "write_message",
]
