"""Multiaddresses as people type them and as they are printed for others.

    /ip4/203.0.113.7/tcp/31415/p2p/12D3KooW...        a peer: where it is, and the key it must have
    /ip4/0.0.0.0/tcp/31415                            where to listen: no peer id

Whoever copies a printed address must get somewhere with it from another machine: an unspecified address is
replaced by those of this machine's interfaces, and loopback is labelled as what it is (case B05).
"""

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protocols.faults import PeerFault
from protocols.identity import public_of

_HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")
_TRANSPORTS = ("tcp", "udp")
_ADDRESS_CHARS_MAX = 256  # as long as a CapacityAd allows

_EXAMPLE = "/ip4/203.0.113.7/tcp/31415"


@dataclass(frozen=True, slots=True)
class Address:
    """The parts of a multiaddress that matter to people."""

    protocol: str
    host: str
    tail: str
    """What follows the host: `/tcp/31415`, `/udp/31415/quic-v1`."""
    peer_id: str | None

    def __str__(self) -> str:
        return f"/{self.protocol}/{self.host}{self.tail}" + (f"/p2p/{self.peer_id}" if self.peer_id else "")

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The IP address; None for a name."""
        return ipaddress.ip_address(self.host) if self.protocol in ("ip4", "ip6") else None


def parse_address(text: str) -> Address:
    """Take a multiaddress apart. Raises ValueError, one line that says what is wrong with it."""
    if len(text) > _ADDRESS_CHARS_MAX:
        raise ValueError(f"address {text[:32]!r}... is over {_ADDRESS_CHARS_MAX} characters")
    parts = text.split("/")
    if parts[0] or len(parts) < 5:
        raise ValueError(f"address {text!r}: it must look like {_EXAMPLE}/p2p/<peer id>")
    protocol, host, transport, port = parts[1:5]
    if protocol not in _HOST_PROTOCOLS:
        raise ValueError(f"address {text!r}: it begins with /{protocol}, not with one of {', '.join(_HOST_PROTOCOLS)}")
    if protocol in ("ip4", "ip6"):
        _check_ip(text, protocol, host)
    elif not host:
        raise ValueError(f"address {text!r}: the host name is empty")
    if transport not in _TRANSPORTS:
        raise ValueError(f"address {text!r}: /tcp/<port> or /udp/<port> must follow the host")
    if not (port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ValueError(f"address {text!r}: {port!r} is not a port")
    rest, peer_id = parts[5:], None
    if "p2p" in rest:
        at = rest.index("p2p")
        peer_id = _check_peer_id(text, rest[at + 1 :])
        rest = rest[:at]
    return Address(protocol, host, "/" + "/".join([transport, port, *rest]), peer_id)


def _check_ip(text: str, protocol: str, host: str) -> None:
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise ValueError(f"address {text!r}: {host!r} is not an IP address") from None
    if protocol != f"ip{version}":
        raise ValueError(f"address {text!r}: {host} belongs behind /ip{version}")


def _check_peer_id(text: str, parts: list[str]) -> str:
    if len(parts) != 1 or not parts[0]:
        raise ValueError(f"address {text!r}: one peer id must follow /p2p/, and nothing behind it")
    try:
        public_of(parts[0])
    except PeerFault:
        raise ValueError(f"address {text!r}: {parts[0]!r} is not a peer id; was it cut off?") from None
    return parts[0]


def peer_address(text: str) -> str:
    """A peer's address, with the key it must have. Raises ValueError."""
    if parse_address(text).peer_id is None:
        raise ValueError(f"address {text!r}: /p2p/<peer id> is missing at its end")
    return text


def own_address(text: str) -> str:
    """An address to listen on or to announce: without a peer id. Raises ValueError."""
    if parse_address(text).peer_id is not None:
        raise ValueError(f"address {text!r}: leave out /p2p/..., this peer's own id is added")
    return text


def listen_address(host: str, port: int) -> str:
    """`/ip4/<host>/tcp/<port>`. Raises ValueError for what is not an IP address or a port."""
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        raise ValueError(f"host {host!r}: give an IP address, 0.0.0.0 for all of this machine's") from None
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port}: give a number from 0 (any free port) to 65535")
    return f"/ip{version}/{host}/tcp/{port}"


@dataclass(frozen=True, slots=True)
class Reachable:
    """What others can be told. `remote`: from other machines, best first; `local`: from this one only."""

    remote: tuple[str, ...]
    local: tuple[str, ...]


def reachable(addresses: Iterable[str], interface_ips: Iterable[str]) -> Reachable:
    """Sort a peer's addresses, with 0.0.0.0 and :: replaced by this machine's addresses.

    A public address is better than a private one, IPv4 better than IPv6; link-local ones help nobody.
    """
    remote: dict[str, tuple[bool, bool]] = {}
    local: dict[str, None] = {}
    for address in _expanded(map(parse_address, addresses), list(interface_ips)):
        ip = address.ip
        if ip is None:
            remote[str(address)] = (False, False)
        elif ip.is_loopback:
            local[str(address)] = None
        elif not ip.is_link_local:
            remote[str(address)] = (not ip.is_global, ip.version == 6)
    return Reachable(tuple(sorted(remote, key=remote.__getitem__)), tuple(local))


def _expanded(addresses: Iterable[Address], interface_ips: Sequence[str]) -> Iterable[Address]:
    for address in addresses:
        if address.ip is None or not address.ip.is_unspecified:
            yield address
            continue
        for text in interface_ips:
            ip = ipaddress.ip_address(text)
            if f"ip{ip.version}" == address.protocol:
                yield Address(address.protocol, text, address.tail, address.peer_id)


def interface_ips() -> list[str]:
    """Every IP address that this machine's interfaces have, without zone suffixes."""
    import socket

    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    return [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in families
    ]
