"""Loops that live and die together."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

Loop = Callable[[], Coroutine[Any, Any, None]]


async def run_loops(loops: Mapping[str, Loop], done: asyncio.Event) -> None:
    """Run all loops until `done` is set or one of them fails; then all of them end.

    A failure comes out as the exception that the loop raised. A loop that returns is only over. No TaskGroup: one that
    is ending swallows a cancellation from outside (Python 3.11), and then whoever waits for this task waits for ever.
    """
    finish = asyncio.create_task(done.wait(), name="finish")
    tasks = [asyncio.create_task(loop(), name=name) for name, loop in loops.items()]
    running: set[asyncio.Task[Any]] = {finish, *tasks}
    try:
        while not finish.done() and not _failure(tasks):
            _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        failure = _failure(tasks)
    finally:
        await _end(running)
    if failure := failure or _failure(tasks):
        raise failure


async def _end(tasks: set["asyncio.Task[Any]"]) -> None:
    """Cancel them and wait until they have ended, even if we are cancelled meanwhile: that is then raised last."""
    for task in tasks:
        task.cancel()
    cancelled: asyncio.CancelledError | None = None
    while running := {task for task in tasks if not task.done()}:
        try:
            await asyncio.wait(running)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


def _failure(tasks: list["asyncio.Task[None]"]) -> BaseException | None:
    """What the first of those that failed raised; of a group of errors its first."""
    ended = [task for task in tasks if task.done() and not task.cancelled()]
    failure = next((error for task in ended if (error := task.exception()) is not None), None)
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
