"""What a person is told when something fails, and what to do next (case B104).

    ValueError          bad usage or configuration    one line                          exit 2
    OSError of a file   the same                      one line with the file's name     exit 2
    TransportFault      the network failed            one line, and the next step       exit 1
    PeerFault           a peer broke the protocol     the same                          exit 1
    Failed              a job did not get done        its lines                         exit 1

Tracebacks are for `--debug`. What is not in this list is a bug, and is shown as one. `docs/errors.md` is
`python -m bootstrap.errors`; a test holds the two together.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import typer

from protocols.faults import PeerFault, TransportFault

FAILED, BAD_USAGE, INTERRUPTED = 1, 2, 130


class Advice(NamedTuple):
    """What a code means, and what to do about it."""

    text: str
    next_step: str


# Codes of TransportFault, and those reasons of a PeerFault that end a process.
ADVICE = {
    "refused": Advice(
        "nothing listens at this address",
        "ask whoever invited you whether the bootstrap peer is running, and for its current address",
    ),
    "timeout": Advice(
        "no answer in time",
        "check your network and firewall; a packet filter that drops silently looks like this",
    ),
    "unreachable": Advice(
        "there is no route to this address",
        "check that you are online; a private address (10.x, 192.168.x) works inside its own network only",
    ),
    "peer id mismatch": Advice(
        "somebody else answers at this address: its key is not the one in the address",
        "the bootstrap peer got a new key, or the address was given to another machine: ask for a new invitation",
    ),
    "clock": Advice(
        "this machine's clock and the swarm's are more than 3 s apart",
        "switch on time synchronisation (`timedatectl set-ntp true` on Linux), then start again",
    ),
    "identity taken": Advice(
        "another running process uses this peer's key",
        "stop the other process, or start this one with another --home; never copy a key file",
    ),
    "contested": Advice(
        "another process used this peer's key moments ago",
        "wait ten seconds and start again; if it comes back, the key was copied: use another --home",
    ),
    "protocol mismatch": Advice(
        "the swarm speaks another version of the protocol",
        "update echo-swarm to the version that the swarm runs (`swarm --version` shows yours)",
    ),
    "unknown run": Advice(
        "the peer at this address does not serve this run",
        "compare the run id behind '#' with the owner's; the bootstrap peer must be started with it",
    ),
    "banned": Advice(
        "the swarm refuses this identity, because it sent data that broke the rules",
        "ask the run's owner; a modified or outdated program is the usual cause",
    ),
    "no manifest": Advice(
        "the run exists, but its trainer has not published it yet",
        "start the trainer (`swarm train run.toml`), or wait for its owner to do so",
    ),
    "port in use": Advice(
        "another process listens on this port",
        "stop it, or choose another with --port (0 takes any free one)",
    ),
    "bad address": Advice(
        "this address cannot be listened on or connected to",
        "use one that this machine has (`ip addr`), or 0.0.0.0 for all of them",
    ),
    "p2pd failed": Advice(
        "the network daemon p2pd did not start",
        "run again with --debug to see what it says; reinstalling hivemind repairs a missing or broken p2pd",
    ),
    "p2pd died": Advice(
        "the network daemon p2pd ended by itself",
        "start again; if it comes back look for an out-of-memory kill (`dmesg`), then report it with --debug",
    ),
    "closed": Advice(
        "the network was shut down while something still needed it",
        "start again; if it comes back, report it with the output of --debug",
    ),
    "trainer gone": Advice(
        "no trainer of the run has been heard for long",
        "ask the run's owner whether it goes on, then join again; rollouts that wait for a receipt are kept",
    ),
    "no source": Advice(
        "no peer that can be reached has the adapter of the newest version",
        "check that the trainer runs, then start again; what was fetched so far is kept",
    ),
    "gone": Advice(
        "the peer no longer has what it was asked for",
        "start again: the newest version is fetched instead",
    ),
    "stalled": Advice(
        "a transfer stopped half-way",
        "check your connection, then start again; what was fetched so far is kept",
    ),
    "slow": Advice(
        "a transfer came in too slowly to be waited for",
        "start again, on a faster connection if there is one; what was fetched so far is kept",
    ),
    "equivocation": Advice(
        "the trainer signed two different versions under one number",
        "do not train on: tell the run's owner, who must publish a manifest with another trainer key",
    ),
}


class Failed(Exception):
    """A job did not get done; the text says why, its first line alone must make sense."""


def explain(error: BaseException) -> tuple[str, int] | None:
    """The text for people, and the exit code; None for what is a bug."""
    match error:
        case TransportFault():
            reasons = getattr(error, "reasons", ())  # a JoinFault (swarm/node.py) has a line for each address
            return _advise(error.code, error.detail, reasons if len(reasons) > 1 else ()), FAILED
        case PeerFault():
            return _advise(error.reason, error.detail), FAILED
        case Failed():
            return str(error), FAILED
        case BrokenPipeError():
            return None  # whoever read our output is gone
        case OSError() if error.filename is not None:
            return f"{error.filename}: {error.strerror}", BAD_USAGE
        case OSError():
            return f"{error.strerror or error}", FAILED
        case ValueError():
            return one_line(str(error)), BAD_USAGE
        case BaseExceptionGroup():
            return next(filter(None, map(explain, error.exceptions)), None)
        case _:
            return None


def _advise(code: str, detail: str, reasons: Sequence[str] = ()) -> str:
    """What happened and the next step; where several addresses failed, each with its own reason (case B01)."""
    advice = ADVICE.get(code)
    if reasons:
        lines = ["none of the addresses works:", *(f"  {reason}" for reason in reasons)]
    else:
        lines = [(f"{code}: {advice.text}" if advice else code) + (f" ({one_line(detail)})" if detail else "")]
    return "\n".join([*lines, f"  next: {advice.next_step}"] if advice else lines)


def one_line(text: str) -> str:
    """One line that may go to a terminal, whoever wrote it: characters that control terminals are replaced."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Turn what is foreseen into a text on stderr and an exit code; with `debug`, into a traceback too."""
    try:
        yield
    except (ValueError, OSError, TransportFault, PeerFault, Failed, BaseExceptionGroup) as error:
        explained = explain(error)
        if explained is None:
            raise
        text, code = explained
        if debug:
            import traceback

            traceback.print_exception(error)
        sys.stderr.write(f"swarm: {text}\n")
        raise typer.Exit(code) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


_PAGE_HEAD = """\
# Errors

A command that fails says what went wrong in one line and what to do next. Exit codes: 0 done, 1 failed, 2 bad
usage or configuration, 130 stopped with Ctrl-C. `--debug` adds the traceback.

| error | meaning | next step |
| --- | --- | --- |
"""


def render_page() -> str:
    """`docs/errors.md`."""
    return _PAGE_HEAD + "".join(f"| `{code}` | {text} | {step} |\n" for code, (text, step) in ADVICE.items())


if __name__ == "__main__":
    sys.stdout.write(render_page())
