"""Loops that live and die together."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, NoReturn

Loop = Callable[[], Coroutine[Any, Any, None]]


class _Finished(BaseException):
    """Ends the task group from inside; never leaves this module."""


async def run_loops(loops: Mapping[str, Loop], done: asyncio.Event) -> None:
    """Run all loops until `done` is set or one of them fails; then all of them end.

    A failure comes out as the exception that the loop raised, not as a group: the others were only cancelled.
    """

    async def finish() -> NoReturn:
        await done.wait()
        raise _Finished

    task = asyncio.current_task()
    assert task is not None
    cancels = task.cancelling()
    try:
        async with asyncio.TaskGroup() as tasks:
            for name, loop in loops.items():
                tasks.create_task(loop(), name=name)
            tasks.create_task(finish(), name="finish")
    except BaseExceptionGroup as group:
        while task.cancelling() > cancels:  # Python 3.11 leaves behind what ended the group
            task.uncancel()
        leaf = _first_leaf(group)
        if not isinstance(leaf, _Finished):
            raise leaf from None


def _first_leaf(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The failure that started it: a real error before the signal that all is done."""
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves.append(_first_leaf(error) if isinstance(error, BaseExceptionGroup) else error)
    return next((leaf for leaf in leaves if not isinstance(leaf, _Finished)), leaves[0])
