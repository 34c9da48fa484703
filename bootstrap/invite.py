"""Invitations: `<multiaddr>#<run id>`, several addresses separated by commas.

The run id ends in the hash of the owner's key, and each address in the key of the peer that must answer
there. So an invitation can be passed on by anyone over anything: nobody can make it lead elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from bootstrap.addresses import peer_address, reachable
from protocols.messages import RunId

ADDRESSES_MAX = 16  # a guess; an invitation must still fit into a chat message


@dataclass(frozen=True, slots=True)
class Invite:
    """Where a swarm can be entered, and which run is meant."""

    addresses: tuple[str, ...]
    run: str


def parse_invite(text: str) -> Invite:
    """Read an invitation. Raises ValueError, one line that says what is wrong with it."""
    text = text.strip().strip("'\"`")
    where, sign, run = text.partition("#")
    if not sign:
        hint = "is the text behind '#' missing? put the invitation in quotes"
        raise ValueError(f"invitation {text!r}: it must look like <address>#<run id>; {hint}")
    if not where:
        raise ValueError(f"invitation {text!r}: no address before '#'")
    addresses = where.split(",")
    if len(addresses) > ADDRESSES_MAX:
        raise ValueError(f"invitation: {len(addresses)} addresses, at most {ADDRESSES_MAX} are allowed")
    return Invite(tuple(peer_address(address.strip()) for address in addresses), check_run_id(run))


def format_invite(addresses: Sequence[str], run: str) -> str:
    """The text that `parse_invite` reads."""
    return f"{','.join(addresses)}#{run}"


def join_line(addresses: Sequence[str], run: str) -> str:
    """What another person types. Quoted: `#` begins a comment in a shell."""
    return f"swarm join '{format_invite(addresses, run)}'"


def join_lines(addresses: Sequence[str], run: str, run_file: Path | None, interface_ips: Sequence[str]) -> list[str]:
    """What a bootstrap peer says when it is up: how others join, and how the trainer of `run_file` does."""
    where = reachable(addresses, interface_ips)
    if where.remote:
        lines = ["join from another machine:"]
    else:
        lines = ["local only: other machines cannot join; pass --host 0.0.0.0 or --announce"]
    lines += [f"  {join_line([address], run)}" for address in where.remote]
    if where.local:
        lines += ["on this machine:", *(f"  {join_line([address], run)}" for address in where.local)]
    nearest = [*where.local, *where.remote][:1]
    if run_file is not None and nearest:
        lines += ["the trainer, on this machine:", f"  swarm train {run_file} --bootstrap {nearest[0]}"]
    return lines


def trainer_line(addresses: Sequence[str], run: str) -> str:
    """What a trainer says when it is up, which knows the bootstrap peers only as it was told of them."""
    where = reachable(addresses, ())
    if where.remote:
        return f"others help with:  {join_line(where.remote, run)}"
    line = join_line(where.local or addresses, run)
    return f"on this machine (for others `swarm bootstrap` prints another line):  {line}"


def check_run_id(text: str) -> str:
    """Raises ValueError when this is no run id."""
    try:
        return msgspec.convert(text, RunId)
    except msgspec.ValidationError:
        raise ValueError(f"run id {text!r}: it must be <name>-<16 letters and digits>; was it cut off?") from None
