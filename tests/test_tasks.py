"""Loops that live and die together, and cancellations from outside."""

import asyncio

import pytest

from swarm.tasks import run_loops


async def forever() -> None:
    await asyncio.Event().wait()


async def returns() -> None:
    pass


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("it failed")


async def test_done_ends_all_and_a_loop_that_returns_ends_nothing() -> None:
    done, ended = asyncio.Event(), []

    async def until_cancelled() -> None:
        try:
            await forever()
        finally:
            ended.append("a")

    running = asyncio.create_task(run_loops({"a": until_cancelled, "b": returns}, done))
    await asyncio.sleep(0.01)
    assert not running.done()
    done.set()
    await asyncio.wait_for(running, 1.0)
    assert ended == ["a"]


async def test_a_failure_comes_out_as_it_was_raised() -> None:
    with pytest.raises(ValueError, match="it failed"):
        await run_loops({"a": forever, "b": fails}, asyncio.Event())


async def test_a_limit_around_it_is_a_timeout_also_the_second_time() -> None:
    done = asyncio.Event()
    done.set()
    await run_loops({"a": forever}, done)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await run_loops({"a": forever}, asyncio.Event())
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.parametrize("turns", range(12))
async def test_a_cancellation_is_never_swallowed_by_an_end_at_the_same_moment(turns: int) -> None:
    # Goal: whenever a download ends, the peer around it can end too.
    # Method: the inner loops are done, and some turns of the event loop later the task around them is cancelled.
    done = asyncio.Event()

    async def slow_to_end() -> None:
        try:
            await forever()
        finally:
            for _ in range(4):
                await asyncio.sleep(0)

    async def around() -> None:
        await run_loops({"a": slow_to_end}, done)
        await forever()

    task = asyncio.create_task(around())
    await asyncio.sleep(0.01)
    done.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 1.0)
    assert task.cancelled()
