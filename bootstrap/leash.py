"""Runs a command that ends when the process that started it ends, even by SIGKILL (Linux; elsewhere it just runs).

    python -m bootstrap.leash <pid of the parent> <command> <argument>...

The kernel keeps the order across `exec`, so this process becomes the command; it costs one bare start of Python.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Put on the leash, then become the command."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we were on the leash
            sys.exit(1)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
