"""What must end ends, however often its caller is cancelled."""

import asyncio

import pytest

from agentd.tasks import to_the_end


async def test_a_step_ends_before_its_cancellation_takes_effect() -> None:
    goes_on, has_ended = asyncio.Event(), False

    async def step() -> None:
        nonlocal has_ended
        await goes_on.wait()
        has_ended = True

    task = asyncio.create_task(to_the_end(step()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert has_ended


async def test_what_a_step_returns_or_raises_is_the_callers() -> None:
    async def fails() -> None:
        raise ValueError("why")

    assert await to_the_end(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="why"):
        await to_the_end(fails())
