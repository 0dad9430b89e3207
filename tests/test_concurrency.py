"""Steps that must finish do; calls that may never end have threads of their own, and names."""

import asyncio
import threading

import pytest

from agentd import concurrency
from agentd.concurrency import (
    Walk,
    call_in_time,
    complete_shielded,
    run_endless,
    silent_subjects,
    start_pool,
)
from support.waiting import until_blocking


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


def fail_to_start(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_silent_call_is_named_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(concurrency, "ANSWER_TIMEOUT_S", 0.05)
    answered, calls = threading.Event(), []

    def hang() -> None:
        calls.append(1)
        answered.wait(20)

    for _ in range(3):
        with pytest.raises(TimeoutError, match=r"no answer within 0\.05 s: '/mnt/dead'"):
            call_in_time("/mnt/dead", hang)
    assert (silent_subjects(), len(calls)) == (["/mnt/dead"], 1)
    assert call_in_time("/mnt/alive", lambda: 1) == 1
    answered.set()
    until_blocking(silent_subjects, [])
    assert call_in_time("/mnt/dead", lambda: 2) == 2


def test_silent_calls_of_a_walk_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    answered, walk = threading.Event(), Walk()
    monkeypatch.setattr(concurrency, "MAX_SILENT", 2)
    with monkeypatch.context() as patch:
        patch.setattr(concurrency, "ANSWER_TIMEOUT_S", 0.01)
        for name in "abbc":
            with pytest.raises(TimeoutError):
                call_in_time(name, lambda: answered.wait(20), walk)
    with pytest.raises(TimeoutError, match="2 others do not answer: 'alive'"):
        call_in_time("alive", lambda: 1, walk)
    assert silent_subjects() == ["a", "b"]
    assert call_in_time("alive", lambda: 1, Walk()) == call_in_time("alive", lambda: 1) == 1
    answered.set()
    until_blocking(silent_subjects, [])


def test_silent_subject_is_asked_by_a_few_further_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old ones wait for a mount that was replaced under them, for ever."""
    now, never, calls = [0.0], threading.Event(), []
    monkeypatch.setattr(concurrency, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr("agentd.concurrency.time.monotonic", lambda: now[0])

    def hang() -> None:
        calls.append(1)
        never.wait(20)

    for pause_s, count in ((0, 1), (29, 1), (1, 2), (30, 2), (210, 3), (1920, 4), (10**6, 4)):
        now[0] += pause_s
        with pytest.raises(TimeoutError):
            call_in_time("token", hang)
        assert len(calls) == count
    never.set()
    until_blocking(silent_subjects, [])


def test_silence_ends_with_the_newest_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, never = [0.0], threading.Event()
    monkeypatch.setattr(concurrency, "ANSWER_TIMEOUT_S", 0.05)
    monkeypatch.setattr("agentd.concurrency.time.monotonic", lambda: now[0])
    with pytest.raises(TimeoutError):
        call_in_time("token", lambda: never.wait(20))
    now[0] += concurrency.SILENT_PAUSE_S
    assert call_in_time("token", lambda: "new") == call_in_time("token", lambda: "new") == "new"
    assert silent_subjects() == []
    never.set()


@pytest.mark.parametrize("error", [KeyError("x"), FileNotFoundError(2, "none")])
def test_error_of_a_call_is_raised_to_its_caller(error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)):
        call_in_time("x", fail)


def test_call_without_a_thread_is_a_passing_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail_to_start)
        with pytest.raises(BlockingIOError, match="can't start new thread"):
            call_in_time("x", lambda: 1)
    assert call_in_time("x", lambda: 1) == 1


def test_pool_needs_no_thread_after_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, release = start_pool(2), threading.Event()
    monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    waiting = [pool.submit(release.wait, 20) for _ in range(2)]
    queued = pool.submit(lambda: 1)
    release.set()
    assert queued.result(20) == 1
    assert all(work.result(20) for work in waiting)
    pool.shutdown()


def test_pool_that_cannot_start_leaves_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def start_one(thread: threading.Thread) -> None:
        if started:
            fail_to_start(thread)
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_one)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_pool(3)
