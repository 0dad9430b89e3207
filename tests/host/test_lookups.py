"""Lookups that may never answer: threads of their own, bounded, named and given back."""

import asyncio
import errno
import threading

import pytest

from agentd.concurrency import MAX_FURTHER, silent_subjects
from agentd.errors import RuntimeUnavailable
from agentd.host.lookups import Lookups


class Hanging:
    """A lookup that waits until it is answered."""

    def __init__(self) -> None:
        self.answered = threading.Event()
        self.ended = threading.Event()

    def __call__(self) -> None:
        self.answered.wait(30)
        self.ended.set()


async def free_again(lookups: Lookups) -> None:
    """Wait until a lookup is not refused."""
    async with asyncio.timeout(10):
        while True:
            try:
                assert await lookups.call("x", lambda: 1, 10) == 1
            except RuntimeUnavailable:
                await asyncio.sleep(0.01)
            else:
                return


async def test_error_names_what_does_not_answer() -> None:
    hanging, lookups = Hanging(), Lookups(max_threads=1)
    with pytest.raises(RuntimeUnavailable, match=r"^user 'slow' does not answer within 0.1 s$"):
        await lookups.call("user 'slow'", hanging, 0.1)
    with pytest.raises(RuntimeUnavailable, match=r"lookups do not answer: user 'slow'$"):
        await lookups.call("the configuration", lambda: 1, 10)
    hanging.answered.set()
    await free_again(lookups)


async def test_lookups_go_on_beside_threads_that_never_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hanging, lookups = Hanging(), Lookups(max_threads=2)
    for _ in range(2):
        with pytest.raises(RuntimeUnavailable, match="does not answer within"):
            await lookups.call("mounts", hanging, 0.05)
    with pytest.raises(RuntimeUnavailable, match="earlier lookups do not answer: mounts"):
        await lookups.call("mounts", lambda: 1)
    assert silent_subjects() == ["mounts"]
    monkeypatch.setattr("agentd.concurrency.SILENT_PAUSE_S", 0)
    for _ in range(3):
        assert await lookups.call("mounts", lambda: 1, 10) == 1
    assert silent_subjects() == []
    for _ in range(MAX_FURTHER):
        with pytest.raises(RuntimeUnavailable, match="does not answer within"):
            await lookups.call("mounts", hanging, 0.05)
    with pytest.raises(RuntimeUnavailable, match="earlier lookups do not answer: mounts"):
        await lookups.call("mounts", lambda: 1)
    hanging.answered.set()
    await free_again(lookups)


async def test_lookup_that_its_caller_leaves_counts_until_it_ends() -> None:
    hanging, lookups = Hanging(), Lookups(max_threads=2)
    asked = asyncio.create_task(lookups.call("user 'slow'", hanging, 10))
    await asyncio.sleep(0)
    asked.cancel()
    await asyncio.wait([asked])
    assert await lookups.call("y", lambda: 2, 10) == 2
    second = Hanging()
    with pytest.raises(RuntimeUnavailable, match="group 'render' does not answer"):
        await lookups.call("group 'render'", second, 0.1)
    with pytest.raises(RuntimeUnavailable, match=r"do not answer: group 'render', user 'slow'$"):
        await lookups.call("y", lambda: 2, 10)
    hanging.answered.set()
    await free_again(lookups)
    second.answered.set()


async def test_answer_as_its_caller_leaves_takes_no_place() -> None:
    hanging, lookups = Hanging(), Lookups(max_threads=1)
    asked = asyncio.create_task(lookups.call("x", hanging, 10))
    await asyncio.sleep(0)
    (thread,) = (t for t in threading.enumerate() if t.name == "x")
    hanging.answered.set()
    thread.join(10)  # its answer waits for the event loop, before the cancellation
    asked.cancel()
    await asyncio.wait([asked])
    assert await lookups.call("y", lambda: 1, 10) == 1


async def test_lookup_without_a_thread_takes_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    lookups = Lookups()

    def fails(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fails)
        for _ in range(8):
            with pytest.raises(
                RuntimeUnavailable, match="a mount cannot be looked up: can't start"
            ):
                await lookups.call("a mount", lambda: 1)
    assert await lookups.call("a mount", lambda: 1) == 1


async def test_error_of_a_lookup_is_raised_to_its_caller() -> None:
    lookups = Lookups(max_threads=1)

    def fails() -> None:
        raise KeyError("x")

    for _ in range(3):
        with pytest.raises(KeyError):
            await lookups.call("x", fails)


async def test_time_out_of_a_call_itself_is_for_a_moment() -> None:
    def fail() -> None:
        raise TimeoutError(errno.ETIMEDOUT, "no answer within 5 s", "/mnt/dead")

    with pytest.raises(RuntimeUnavailable, match=r"^/mnt/dead: no answer within 5 s$"):
        await Lookups().call("x", fail)
