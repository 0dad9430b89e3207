"""Steps that must finish do, however often their caller is cancelled."""

import asyncio

import pytest

from agentd.concurrency import complete_shielded, run_endless


async def test_shielded_step_ends_before_its_cancellation() -> None:
    goes_on, has_ended = asyncio.Event(), False

    async def step() -> None:
        nonlocal has_ended
        await goes_on.wait()
        await asyncio.sleep(0)
        await asyncio.create_task(asyncio.sleep(0))
        has_ended = True

    task = asyncio.create_task(complete_shielded(step()))
    for _ in range(3):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert has_ended


async def test_shielded_step_that_fails_when_cancelled_is_cancelled() -> None:
    goes_on = asyncio.Event()

    async def fails() -> None:
        await goes_on.wait()
        raise ValueError("why")

    task = asyncio.create_task(complete_shielded(fails()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_shielded_step_returns_and_raises_to_its_caller() -> None:
    async def fails() -> None:
        raise ValueError("why")

    async def fails_within() -> None:
        await asyncio.create_task(fails())

    async def mends() -> str:
        try:
            await asyncio.create_task(fails())
        except ValueError:
            return await asyncio.sleep(0, "mended")
        return ""

    assert await complete_shielded(asyncio.sleep(0, "done")) == "done"
    assert await complete_shielded(mends()) == "mended"
    for step in (fails, fails_within):
        with pytest.raises(ValueError, match="why"):
            await complete_shielded(step())


async def test_shielded_step_may_meet_another_cancellation() -> None:
    async def step() -> str:
        task = asyncio.create_task(asyncio.Event().wait())
        asyncio.get_running_loop().call_soon(task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            return "went on"
        return ""

    assert await complete_shielded(step()) == "went on"


async def _returns() -> None: ...


async def _fails() -> None:
    raise ValueError("why")


async def _is_cancelled() -> None:
    raise asyncio.CancelledError


@pytest.mark.parametrize("ends", [_returns, _fails, _is_cancelled])
async def test_endless_loops_end_with_any_of_them(ends) -> None:
    has_ended = asyncio.Event()

    async def goes_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            has_ended.set()

    with pytest.raises(ExceptionGroup) as raised:
        async with asyncio.timeout(10):
            await run_endless(goes_on(), ends())
    (error,) = raised.value.exceptions
    assert str(error) == ("why" if ends is _fails else f"{ends.__qualname__} ended")
    assert has_ended.is_set()


async def test_endless_loops_are_cancelled_together() -> None:
    task = asyncio.create_task(run_endless(asyncio.Event().wait(), asyncio.Event().wait()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
