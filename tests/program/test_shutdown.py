"""A stop has one deadline: a step that is late is left behind, and so is a stuck event loop."""

import asyncio
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from agentd.concurrency import Deadline
from agentd.program import shutdown as module
from agentd.program.shutdown import EXIT_TIMEOUT_S, LIMIT_S, STOP_TIMEOUT_S, Shutdown


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that tests set."""
    time = [1000.0]

    def after(seconds: float) -> Deadline:
        return Deadline(time[0] + seconds, lambda: time[0])

    monkeypatch.setattr(module.Deadline, "after", after)
    return time


async def test_steps_share_one_deadline(now: list[float]) -> None:
    shutdown, left = Shutdown(), []

    async def takes_10_s(deadline: Deadline) -> None:
        left.append(deadline.remaining_s())
        now[0] += 10

    for name in "abcd":
        await shutdown.step(name, takes_10_s, reserve_s=1)
    assert left == [STOP_TIMEOUT_S - 1, STOP_TIMEOUT_S - 11, STOP_TIMEOUT_S - 21, 0]
    assert shutdown.late == []


async def test_a_step_that_resists_its_cancellation_is_left_and_named(now: list[float]) -> None:
    shutdown, goes_on = Shutdown(), asyncio.Event()

    async def hangs(_: Deadline) -> None:
        while not goes_on.is_set():
            try:
                await goes_on.wait()
            except asyncio.CancelledError:
                continue

    async def works(_: Deadline) -> None:
        works_on.append("worked")

    works_on: list[str] = []
    assert shutdown.deadline.remaining_s() == STOP_TIMEOUT_S
    now[0] += STOP_TIMEOUT_S
    await shutdown.step("hung library", hangs)
    await shutdown.step("sockets", works)
    assert (shutdown.late, works_on) == (["hung library"], ["worked"])
    goes_on.set()


async def test_a_step_that_fails_says_so() -> None:
    async def fails(_: Deadline) -> None:
        raise OSError("why")

    with pytest.raises(OSError, match="why"):
        await Shutdown().step("it", fails)


@pytest.mark.parametrize(("is_over", "status"), [(True, 0), (False, 1)])
def test_the_limit_ends_a_process_whose_loop_is_stuck(
    monkeypatch: pytest.MonkeyPatch, *, is_over: bool, status: int
) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.0)
    monkeypatch.setattr(module, "EXIT_TIMEOUT_S", 0.0)
    ended: list[int] = []
    shutdown = Shutdown(ended.append)
    if is_over:
        shutdown.finish()
    stopper = threading.Thread(target=shutdown.enforce_limit)
    stopper.start()
    stopper.join()
    assert ended == [status]
    assert shutdown.failure == ("" if is_over else "start did not end within 0 s")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_stop_is_not_lost_while_the_handlers_are_set(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setattr(module, "EXIT_TIMEOUT_S", 0.0)
    previous = {n: signal.getsignal(n) for n in module.SIGNALS}
    set_handler = signal.signal

    def set_and_send(handled: signal.Signals, handler: Any) -> None:
        set_handler(handled, handler)
        if handled == number:
            signal.raise_signal(number)

    shutdown = Shutdown(lambda _: None)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(signal, "signal", set_and_send)
            shutdown.handle_signals({})
        async with asyncio.timeout(20):
            await shutdown.requested.wait()
    finally:
        signal.set_wakeup_fd(-1)
        for each, handler in previous.items():
            set_handler(each, handler)
        shutdown.finish()


@pytest.mark.parametrize("unit", ["agentd.service", "agentd-fleet-gateway.service"])
def test_a_unit_leaves_a_stop_the_time_that_it_takes(unit: str) -> None:
    text = (Path(__file__).parents[2] / "systemd" / unit).read_text()
    (limit_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
    assert STOP_TIMEOUT_S < LIMIT_S < LIMIT_S + EXIT_TIMEOUT_S <= 30 < int(limit_s)
