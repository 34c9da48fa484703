"""Errors that say whose fault it is, and so what to do.

LocalFault       we broke our own rules        nobody catches it: crash, fix
PeerFault        a peer sent nonsense          the receive loop: drop, count by `reason`, go on
TransportFault   the network failed            the driver: retry with a bound
ValueError       bad configuration             `main()`: one line, exit 2
"""


class LocalFault(Exception):
    """Our own code broke its own rules. Never raised because of what a peer sent."""


class PeerFault(Exception):
    """A peer sent something that the protocol does not allow.

    `reason` is a short fixed phrase, used as a counter's label; `detail` may hold the particulars.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class TransportFault(Exception):
    """The network failed: refused, timed out, reset. `code` is one of a small fixed set (see docs/errors.md)."""

    def __init__(self, code: str, detail: str = "") -> None:
        super().__init__(f"{code}: {detail}" if detail else code)
        self.code = code
        self.detail = detail
