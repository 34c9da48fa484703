"""A scan of MessagePack bytes that bounds them before any decoder runs. No recursion, no allocation.

hivemind decodes DHT values, dictionaries and subkeys with a hook that calls the decoder again for each
nested extension; 941 bytes from a stranger overflow its C stack and kill the process. hivemind's only
legitimate extension is its dictionary (0x50), whose body is one more MessagePack value:

    ext 0x50: [maxsize, latest expiration, [[subkey, value, expiration], ...]]

So an extension is allowed once, at the top, and every other nesting is bounded.
"""

from protocols.faults import PeerFault

DICTIONARY_EXT = 0x50
DEPTH_MAX = 4  # the dictionary's body is three arrays deep
ITEMS_MAX = 20_000  # four per subkey: a full shard of 4096 peers, and some; scanned in about 10 ms
BYTES_MAX = 2 * 1024 * 1024  # hivemind's own unary limit

# Fixed-size values: how many bytes follow the type byte.
_FIXED = {0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
_FIXED |= {0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
# Values with a length field of 1, 2 or 4 bytes.
_RAW = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAY = {0xDC: 2, 0xDD: 4}
_MAP = {0xDE: 2, 0xDF: 4}
_EXT = {0xC7: 1, 0xC8: 2, 0xC9: 4}
_FIXEXT = {0xD4: 1, 0xD5: 2, 0xD6: 4, 0xD7: 8, 0xD8: 16}


def check_msgpack(raw: bytes) -> None:
    """Raises PeerFault unless `raw` is exactly one value within the bounds above."""
    if len(raw) > BYTES_MAX:
        raise PeerFault("record too large", f"{len(raw)} bytes")
    start = _dictionary_body(raw)
    end = _scan(raw, start)
    if end != len(raw):
        raise PeerFault("malformed record", "length")


def unwrap_bin(raw: bytes) -> bytes:
    """The content of a value that is exactly one MessagePack `bin`. Raises PeerFault otherwise."""
    size = {0xC4: 1, 0xC5: 2, 0xC6: 4}.get(raw[0]) if raw else None
    if size is None or len(raw) < 1 + size or int.from_bytes(raw[1 : 1 + size], "big") != len(raw) - 1 - size:
        raise PeerFault("malformed record", "not one bin")
    return raw[1 + size :]


def _dictionary_body(raw: bytes) -> int:
    """Where the scan starts: behind the extension header if there is one, which must span everything."""
    kind = raw[0] if raw else 0xC1
    if kind in _EXT:
        size = _EXT[kind]
        header, length = 2 + size, int.from_bytes(raw[1 : 1 + size], "big")
    elif kind in _FIXEXT:
        header, length = 2, _FIXEXT[kind]
    else:
        return 0
    if len(raw) != header + length or raw[header - 1] != DICTIONARY_EXT:
        raise PeerFault("malformed record", "extension")
    return header


def _scan(raw: bytes, start: int) -> int:
    """The position behind the one value at `start`."""
    at, items = start, 0
    pending = [1]  # values still to read on each level
    while pending:
        if pending[-1] == 0:
            pending.pop()
            continue
        pending[-1] -= 1
        items += 1
        if items > ITEMS_MAX or at >= len(raw):
            raise PeerFault("malformed record", "items")
        at, children = _step(raw, at)
        if children:
            if len(pending) > DEPTH_MAX:
                raise PeerFault("malformed record", "nesting")
            pending.append(children)
    return at


def _step(raw: bytes, at: int) -> tuple[int, int]:
    """Read one type byte and its flat content: (position behind it, number of values inside it)."""
    kind = raw[at]
    at += 1
    if kind <= 0x7F or kind >= 0xE0:  # small integers
        return at, 0
    if kind <= 0x8F:
        return at, 2 * (kind & 0x0F)
    if kind <= 0x9F:
        return at, kind & 0x0F
    if kind <= 0xBF:
        return at + (kind & 0x1F), 0
    if kind in _FIXED:
        return at + _FIXED[kind], 0
    for table, per_item in ((_RAW, 0), (_ARRAY, 1), (_MAP, 2)):
        if kind in table:
            size = int.from_bytes(raw[at : at + table[kind]], "big")
            at += table[kind]
            return (at + size, 0) if per_item == 0 else (at, per_item * size)
    raise PeerFault("malformed record", f"type 0x{kind:02x}")  # extensions and 0xc1
