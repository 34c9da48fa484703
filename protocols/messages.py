"""Everything that travels, as a closed, append-only set of MessagePack messages (docs/wire.md).

Unknown fields are ignored, so that a newer peer may add one; unknown tags are refused. A tag is never
reused. Three families:

    signed    Manifest, Announcement, RunEnd, CapacityAd, RolloutBatch, Receipt,
              Lease, Directive                                                      (in an envelope)
    request   Hello, Heartbeat, ManifestRequest, ChainRequest, PushRollouts,
              RoundCall, StatusRequest, DialBack                                    (unary call)
    reply     HelloReply, HeartbeatReply, Envelopes, Refused, RoundReply, Status,
              DialedBack                                                            (unary answer)
    stream    BlobOpen, ChunkAsk, BlobHave; BlobOffer, ChunkHead                     (blob stream)

Streams and calls are authenticated by libp2p, so only what outlives them is signed.
"""

from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from protocols.faults import PeerFault

CHUNKS_MAX = 6144  # of a blob: 1.5 GiB, the largest adapter, in chunks of 256 KiB

Count = Annotated[int, Meta(ge=0, lt=2**32)]
Version = Annotated[int, Meta(ge=0, lt=2**32)]
NumBytes = Annotated[int, Meta(ge=0, lt=2**48)]
Millis = Annotated[int, Meta(ge=0, lt=2**48)]  # milliseconds since 1970; 2^48 is the year 10889
Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
Session = Annotated[bytes, Meta(min_length=16, max_length=16)]
PeerId = Annotated[str, Meta(min_length=52, max_length=52, pattern=r"^[1-9A-HJ-NP-Za-km-z]*\Z")]
RunId = Annotated[str, Meta(min_length=18, max_length=81, pattern=r"^[a-z0-9][a-z0-9-]{0,63}-[a-z2-7]{16}\Z")]
Finite = Annotated[float, Meta(ge=-1e300, le=1e300)]  # no NaN, no infinity
Port = Annotated[int, Meta(ge=1, le=65535)]
Label = Annotated[str, Meta(max_length=128)]
Term = Annotated[int, Meta(ge=0, lt=2**32)]  # an election number; how fast it may rise is checked in protocols/election
Bitmap = Annotated[bytes, Meta(max_length=CHUNKS_MAX // 8)]  # a bit a chunk, the first in the lowest bit of byte 0
Mode = Literal["sequential", "async"]
Role = Literal["bootstrap", "trainer", "inference"]

# Sizes. A unary message over hivemind's 2 MiB limit never arrives; GossipSub loses messages over about 1 MiB
# without a word; DESIGN section 5 keeps gossip under 16 KiB so that it stays fast for everybody else.
GOSSIP_BYTES_MAX = 16 * 1024
UNARY_BYTES_MAX = 1024 * 1024
RECORD_BYTES_MAX = 16 * 1024  # the manifest is the largest DHT value; it is a few KB
CHAIN_PAGE_MAX = 256  # announcements an answer; about 1 KB each
METRICS_MAX = 32
PAGE_ENVELOPES_MAX = 1024
HASHES_BYTES_MAX = 32 * CHUNKS_MAX
SOURCES_MAX = 4  # peers that an answer names as sources of the head: a download asks them first, and others beside them
STATUS_PEERS_MAX = 2048  # rows of a status, about 300 B each: well under a unary message


class Sampling(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How completions are drawn. Part of the manifest: the same for every producer."""

    group_size: Annotated[int, Meta(ge=2, le=256)] = 8
    """Completions of one prompt; GRPO's baseline is their mean."""
    max_new_tokens: Annotated[int, Meta(ge=1, le=32768)] = 12
    temperature: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    """Enters the behaviour log-probabilities and the trainer's, so that their ratio is 1 at equal weights."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        if (self.top_p, self.top_k, self.min_p) != (1.0, 0, 0.0):
            raise ValueError(
                "top_p, top_k and min_p must stay off (1.0, 0, 0.0): they renormalise log-probabilities, "
                "so importance ratios would be off by the probability mass that was cut"
            )


class BlobRef(Struct, frozen=True):
    """A content-addressed blob: `root` is the hash of its chunk hashes (protocols/transfer.py)."""

    root: Digest
    size: NumBytes


class DeltaRef(Struct, frozen=True):
    """A version as its difference to the version that its announcement names as parent."""

    codec: Label
    """How (protocols/codecs.py). Who does not know the name does without the delta."""
    blob: BlobRef


class AdapterRef(Struct, frozen=True):
    """Which tensors a version is, and in which blobs they can be had: whole, as a delta, or both."""

    digest: Digest
    keyframe: BlobRef | None = None
    """All tensors, safetensors; the same bytes from whoever has the version."""
    delta: DeltaRef | None = None

    def __post_init__(self) -> None:
        if self.keyframe is None and self.delta is None:
            raise ValueError("an adapter without a blob")


class TrainedOn(Struct, frozen=True):
    """What was consumed since the parent: how many groups, their largest lag, the root over all of them."""

    count: Count
    max_lag: Count
    root: Digest


class Announcement(Struct, frozen=True, tag="announcement"):
    """Version `version` of the policy exists (DESIGN section 6)."""

    run: RunId
    version: Version
    parent: Digest
    adapter: AdapterRef
    trained_on: TrainedOn
    bound: Count
    """The manifest's max_lag, so that an audit needs nothing else."""
    created_ms: Millis
    metrics: dict[Label, Finite] = {}

    def __post_init__(self) -> None:
        if len(self.metrics) > METRICS_MAX:
            raise ValueError("too many metrics")


class RunEnd(Struct, frozen=True, tag="end"):
    """The run is over at `version`; `head` is the hash of the last announcement."""

    run: RunId
    version: Version
    head: Digest
    created_ms: Millis


class CapacityAd(Struct, frozen=True, tag="capacity", kw_only=True):
    """What a peer says it can do; a claim. Unknown is None, never 0."""

    run: RunId
    session: Session
    role: Role
    issued_ms: Millis
    engine: Label | None = None
    device: Label | None = None
    memory_bytes: NumBytes | None = None
    tokens_per_s: Finite | None = None
    """Measured on this machine with this model, not estimated."""
    up_bytes_per_s: Finite | None = None
    down_bytes_per_s: Finite | None = None
    formats: tuple[Label, ...] = ("raw", "xor", "ulps", "int8", "int4")
    version: Version | None = None
    load: Finite | None = None
    storage: bool = True
    """False: its disk is full. It serves what it holds and gets nothing more."""
    online: bool = True
    """False in a peer's last word: it has left."""
    addresses: tuple[Annotated[str, Meta(max_length=256)], ...] = ()

    def __post_init__(self) -> None:
        if len(self.formats) > 16 or len(self.addresses) > 16:
            raise ValueError("too many formats or addresses")


class RolloutGroup(Struct, frozen=True, kw_only=True):
    """G completions of one prompt. Ids are packed uint32, log-probabilities float32, both little-endian."""

    counter: Count
    """Which of this producer's problems: the prompt follows from (run seed, peer id, counter)."""
    oldest_version: Version
    newest_version: Version
    adapter: Digest
    """Digest of the weights that were really loaded."""
    prompt_ids: bytes
    lengths: tuple[Count, ...]
    """Tokens of each completion."""
    token_ids: bytes
    logprobs: bytes
    truncated: tuple[bool, ...]
    """True where a completion ran into max_new_tokens before an end-of-sequence id."""
    rewards: tuple[float | None, ...]
    """The producer's own scores; None is unscored. The trainer recomputes what it can."""
    temperature: float
    engine: Label


class RolloutBatch(Struct, frozen=True, tag="rollouts"):
    """What a producer pushes: groups it keeps in its outbox until a receipt names each."""

    run: RunId
    groups: tuple[RolloutGroup, ...]


Outcome = Literal["accepted", "stale", "duplicate", "invalid"]


class GroupReceipt(Struct, frozen=True):
    """What became of one group."""

    counter: Count
    digest: Digest
    outcome: Outcome
    reason: Label = ""


class Receipt(Struct, frozen=True, tag="receipt"):
    """The trainer's signed answer to a batch, with what a producer needs to pace itself."""

    run: RunId
    producer: PeerId
    groups: tuple[GroupReceipt, ...]
    step: Count
    """Optimizer steps done."""
    queued: Count
    """Accepted groups that wait to be consumed."""


class Lease(Struct, frozen=True, tag="lease"):
    """A candidate is alive (`standby`), or claims to lead in `term` (`claimed`), until then (DESIGN section 9)."""

    run: RunId
    term: Term
    state: Literal["claimed", "standby"]
    until_ms: Millis


class Directive(Struct, frozen=True, tag="directive", kw_only=True):
    """A coordinator's order to all: its beacon, each beat. Counts for whoever has seen no higher (term, number)."""

    run: RunId
    term: Term
    number: Count
    """Rises with every directive of a term."""
    mode: Mode
    min_version: Version
    """Peers below it fetch before they generate."""
    issued_ms: Millis


class Hello(Struct, frozen=True, tag="hello"):
    """The first words of a peer: who it is for, which protocol it speaks, what time it has."""

    protocol: Label
    run: RunId | None
    session: Session
    now_ms: Millis


Verdict = Literal["ok", "contested", "identity taken", "banned", "unknown run", "protocol mismatch", "clock"]


class HelloReply(Struct, frozen=True, tag="hello-reply"):
    """`contested`: another session of the same identity was heard moments ago; ask again after a beat."""

    verdict: Verdict
    protocol: Label
    now_ms: Millis
    detail: Label = ""


class Heartbeat(Struct, frozen=True, tag="heartbeat", kw_only=True):
    """A peer's state, to the coordinator, the trainers and its bootstrap peers.

    Every two seconds, and at once when there is news that changes what the peer may do. Unknown is None, never 0.
    """

    run: RunId
    session: Session
    role: Role
    version: Version | None = None
    """What an inference peer generates with; the head of anybody else."""
    tokens_per_s: Finite | None = None
    groups_per_s: Finite | None = None
    """Measured while generating."""
    refresh_s: Finite | None = None
    """How long the last version took from its announcement until the engine had it."""
    oldest: Version | None = None
    """The oldest version that a group in flight was begun with."""
    started: Count = 0
    """Groups begun in this session; what credits are counted in."""
    in_flight: Count = 0
    """Groups that are being generated."""
    outbox: Count = 0
    """Groups without a receipt."""
    accepted: Count | None = None
    """Groups of this session that receipts called accepted; the trainer's: that it accepted."""
    stale: Count | None = None
    """Likewise, at the door or in the queue."""
    step: Count | None = None
    """The trainer's: optimizer steps done."""
    queued: Count | None = None
    """The trainer's: accepted groups that wait to be consumed."""
    step_s: Finite | None = None
    """The trainer's: seconds of a step, without waiting for rollouts."""
    wanted: Count | None = None
    """The trainer's: groups that it waits for right now, because peers generate on their own."""
    directive: Annotated[bytes, Meta(max_length=1024)] | None = None
    """The last one obeyed, in its envelope, once no coordinator has been heard for three beats: whoever leads must do
    so in a higher term, or this peer will not obey."""
    leaving: bool = False
    """The peer's last beat: it goes now."""


class HeartbeatReply(Struct, frozen=True, tag="heartbeat-reply", kw_only=True):
    """None where the answering peer does not know.

    `limit` and `sources` count only from the coordinator of the highest term, `step`, `queued`, `wanted` and
    `next_counter` only from a trainer.
    """

    verdict: Verdict
    now_ms: Millis
    head: Version | None = None
    step: Count | None = None
    queued: Count | None = None
    ended: bool = False
    next_counter: Count | None = None
    """The trainer's: the lowest counter that the asker has not used."""
    wanted: Count | None = None
    """The trainer's: groups that it waits for right now, because peers generate on their own."""
    term: Term | None = None
    coordinator: PeerId | None = None
    """Who leads in `term`, as the answering peer knows."""
    directive: Annotated[bytes, Meta(max_length=1024)] | None = None
    """The coordinator's newest, in its envelope, when the answering peer has one."""
    limit: Count | None = None
    """The coordinator's credit: groups of this session that the asker may have begun."""
    sources: Annotated[tuple[PeerId, ...], Meta(max_length=SOURCES_MAX)] = ()
    """Peers that hold the head."""


class ManifestRequest(Struct, frozen=True, tag="manifest-request"):
    run: RunId


class ChainRequest(Struct, frozen=True, tag="chain-request"):
    """Announcements from `first` on, at most CHAIN_PAGE_MAX of them; then the RunEnd, if the run has ended."""

    run: RunId
    first: Version


class PushRollouts(Struct, frozen=True, tag="push"):
    """An envelope of a RolloutBatch."""

    envelope: bytes


class RoundCall(Struct, frozen=True, tag="round", kw_only=True):
    """The trainer calls for rollouts (sequential mode): make `count` groups for round `number`, all calls together.

    Saying it again changes nothing; a lower count than before means that the rest was given to others.
    """

    run: RunId
    number: Count
    version: Version
    """The head that the round is for."""
    refresh_gap: Count
    """A peer whose version is further behind `version` fetches first."""
    count: Count


class StatusRequest(Struct, frozen=True, tag="status-request"):
    """Anybody's question: how is the run?"""

    run: RunId


class DialBack(Struct, frozen=True, tag="dial-back"):
    """Can you dial me, at the address that this call comes from and this TCP port?"""

    port: Port


class Envelopes(Struct, frozen=True, tag="envelopes"):
    """Signed things somebody asked for, oldest first."""

    envelopes: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.envelopes) > PAGE_ENVELOPES_MAX:
            raise ValueError("too many envelopes")


class Refused(Struct, frozen=True, tag="refused"):
    """The request was understood and will not be served."""

    reason: Label


class RoundReply(Struct, frozen=True, tag="round-reply"):
    """How many groups of the round the peer has taken on, all calls together; fewer than asked: it can do no more."""

    taken: Count


class PeerStatus(Struct, frozen=True, kw_only=True):
    """One peer as the answering peer sees it: its own words in its last beat, and how long ago that was."""

    peer_id: PeerId
    role: Role
    silent_s: Finite
    version: Version | None = None
    engine: Label | None = None
    device: Label | None = None
    tokens_per_s: Finite | None = None
    groups_per_s: Finite | None = None
    in_flight: Count = 0
    outbox: Count = 0
    credit: Count | None = None
    """Groups it may still begin; None where the answering peer does not lead."""
    accepted: Count | None = None
    stale: Count | None = None


class Status(Struct, frozen=True, tag="status", kw_only=True):
    """A run as the answering peer sees it."""

    run: RunId
    now_ms: Millis
    max_lag: Count
    max_steps: Count
    mode: Mode | None = None
    """In `auto` what was ordered last, `async` before that."""
    head: Version | None = None
    step: Count | None = None
    queued: Count | None = None
    ended: bool = False
    term: Term | None = None
    coordinator: PeerId | None = None
    """Who leads; None when nobody is known to."""
    leading: bool = False
    """The answering peer is the coordinator."""
    vacant_s: Finite | None = None
    """For how long nobody has led, as far as the answering peer knows."""
    accepted: Count | None = None
    stale: Count | None = None
    peers: Annotated[tuple[PeerStatus, ...], Meta(max_length=STATUS_PEERS_MAX)] = ()
    left_out: Count = 0
    """Peers that did not fit."""


class BlobOpen(Struct, frozen=True, tag="blob-open"):
    """The first words on a blob stream: which blob it is about. One blob a stream."""

    root: Digest
    hashes: bool = False
    """Send the list of chunk hashes too."""
    have: Bitmap = b""
    """Chunks that the asker has."""


class BlobOffer(Struct, frozen=True, tag="blob-offer"):
    """The holder's: what the asker may ask it for. Again whenever there is more, and as a sign of life.

    The list of hashes is in the first offer that the holder can put it in.
    """

    found: bool
    """False: neither here nor on its way here. Ends the stream."""
    hashes: Annotated[bytes, Meta(max_length=HASHES_BYTES_MAX)] = b""
    chunks: Bitmap = b""
    sparing: bool = False
    """The holder wants to be asked only for what nobody else offers, and offers its chunks little by little."""


class BlobHave(Struct, frozen=True, tag="blob-have"):
    """The asker's, to a holder that sent it a chunk or is sparing: what it has by now, from whomever."""

    chunks: Bitmap


class ChunkAsk(Struct, frozen=True, tag="chunk-ask"):
    """The asker's: send this chunk."""

    index: Count


class ChunkHead(Struct, frozen=True, tag="chunk-head"):
    """The holder's: the bytes of this chunk follow, without a frame."""

    index: Count


class DialedBack(Struct, frozen=True, tag="dialed-back"):
    """What became of a `DialBack`."""

    address: Label
    """What was dialled: `/ip4/<address>/tcp/<port>`."""
    reached: bool
    """A libp2p peer answered there."""


Signed = Announcement | RunEnd | CapacityAd | RolloutBatch | Receipt | Lease | Directive
Request = Hello | Heartbeat | ManifestRequest | ChainRequest | PushRollouts | RoundCall | StatusRequest | DialBack
BlobAsker = BlobOpen | ChunkAsk | BlobHave
BlobHolder = BlobOffer | ChunkHead
Reply = HelloReply | HeartbeatReply | Envelopes | Refused | RoundReply | Status | DialedBack

_encoder = msgspec.msgpack.Encoder()
_request_decoder: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_reply_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_blob_asker_decoder: msgspec.msgpack.Decoder[BlobAsker] = msgspec.msgpack.Decoder(BlobAsker)
_blob_holder_decoder: msgspec.msgpack.Decoder[BlobHolder] = msgspec.msgpack.Decoder(BlobHolder)


def encode(message: Struct) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


T = TypeVar("T")


def _decode(decoder: "msgspec.msgpack.Decoder[T]", raw: bytes, what: str, bytes_max: int) -> T:
    if len(raw) > bytes_max:
        raise PeerFault(f"{what} too large", f"{len(raw)} bytes")
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise PeerFault(f"malformed {what}", str(error)[:200]) from error


def decode_request(raw: bytes) -> Request:
    """Raises PeerFault and nothing else."""
    return _decode(_request_decoder, raw, "request", UNARY_BYTES_MAX)


def decode_reply(raw: bytes) -> Reply:
    """Raises PeerFault and nothing else."""
    return _decode(_reply_decoder, raw, "reply", UNARY_BYTES_MAX)


def decode_blob_asker(raw: bytes) -> BlobAsker:
    """Raises PeerFault and nothing else."""
    return _decode(_blob_asker_decoder, raw, "blob request", 1024)


def decode_blob_holder(raw: bytes) -> BlobHolder:
    """Raises PeerFault and nothing else."""
    return _decode(_blob_holder_decoder, raw, "blob reply", UNARY_BYTES_MAX)
