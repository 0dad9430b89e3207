import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from agentd.core.kernel.record import encode
from agentd.core.kernel.states import Ending, Kernel, KernelState
from agentd.errors import RuntimeUnavailable, StateUnavailable
from agentd.events import EventLog
from agentd.services.kernels import retention
from agentd.services.kernels.retention import Retention
from agentd.services.state import NodeState
from support.waiting import until

NOW = 100.0
YEARS = 1e9


def ended(name: str, at: float | None) -> Kernel:
    ending = Ending(0, finished_at=at)
    return Kernel(name, "agent-1", KernelState.TERMINATED, "hash", at or 0.0, "any", ending=ending)


async def test_the_oldest_ended_kernels_go_first_and_living_ones_never() -> None:
    state = NodeState(["any"], EventLog())
    removed: list[str] = []

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        assert state.kernels[kernel_id] is expected
        if kernel_id == "stuck":
            raise RuntimeUnavailable("the engine is down")
        removed.append(kernel_id)
        state.drop_kernel(kernel_id)

    service: Any = SimpleNamespace(remove=remove)
    state.put_kernel(Kernel("lives", "agent-1", KernelState.RUNNING, "hash", 0.0, "any"))
    for name, at in (("third", 3.0), ("first", 1.0), ("stuck", 0.5), ("second", 2.0)):
        state.put_kernel(ended(name, at))
    keeper = Retention(state, service, 2, now=NOW)
    running = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert removed == ["first"]
    state.put_kernel(ended("fourth", 4.0))
    for _ in range(5):
        await asyncio.sleep(0)
    assert removed == ["first", "second"]
    assert {kernel.kernel_id for kernel in state} == {"lives", "stuck", "third", "fourth"}
    running.cancel()


@pytest.mark.parametrize(
    ("before_start", "observed", "stay"),
    [
        ({}, {"a": YEARS, "b": YEARS + 1, "c": 3.0}, ["b", "c"]),
        ({}, {"a": 5.0, "b": YEARS, "c": 4.0, "d": 3.0}, ["c", "d"]),
        ({"a": YEARS, "b": 2.0}, {"c": 1.0}, ["b", "c"]),
        ({"b": YEARS + 1, "a": YEARS, "c": YEARS + 2}, {}, ["b", "c"]),
        ({"a": YEARS, "c": 2.0, "b": 1.0}, {}, ["b", "c"]),
    ],
    ids=["ahead-then-right", "ahead-once", "ahead-before-start", "all-ahead", "ahead-at-start"],
)
async def test_a_wrong_clock_prunes_nothing_that_just_ended(
    before_start: dict[str, float], observed: dict[str, float], stay: list[str]
) -> None:
    state = NodeState(["any"], EventLog())

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        state.drop_kernel(expected.kernel_id)

    for name, at in before_start.items():
        state.put_kernel(ended(name, at))
    keeper = Retention(state, SimpleNamespace(remove=remove), 2, now=NOW)  # type: ignore[arg-type]
    await keeper.prune()
    for name, at in observed.items():
        state.put_kernel(ended(name, at))
        await keeper.prune()
        assert name in state.kernels
    assert sorted(state.kernels) == stay


async def test_retention_bounds_the_bytes_of_ended_kernels(monkeypatch: Any) -> None:
    state = NodeState(["any"], EventLog())

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        state.drop_kernel(expected.kernel_id)

    keeper = Retention(state, SimpleNamespace(remove=remove), 9, now=NOW)  # type: ignore[arg-type]
    size = len(encode(ended("k1", 1.0), ""))
    monkeypatch.setattr(retention, "MAX_ENDED_BYTES", 2 * size)
    for number in (2, 1):
        state.put_kernel(ended(f"k{number}", float(number)))
    await keeper.prune()
    assert list(state.kernels) == ["k2", "k1"]
    large = replace(ended("k0", 0.5), labels={"a": "x" * size})
    state.put_kernel(large)
    await keeper.prune()
    assert list(state.kernels) == ["k0"]  # as the last that ended, though it is the oldest
    state.put_kernel(replace(large, state=KernelState.RUNNING))
    state.put_kernel(ended("k3", 3.0))
    await keeper.prune()
    assert list(state.kernels) == ["k0", "k3"]


async def test_failed_removal_is_repeated_without_an_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(retention, "RETRY_PAUSE_S", 0.01)
    state = NodeState(["any"], EventLog())
    failures = [StateUnavailable("the disk is full")] * 2

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        if failures:
            raise failures.pop()
        state.drop_kernel(expected.kernel_id)

    keeper = Retention(state, SimpleNamespace(remove=remove), 1, now=9.0)  # type: ignore[arg-type]
    for number in (1, 2):
        state.put_kernel(ended(f"k{number}", float(number)))
    running = asyncio.create_task(keeper.run())
    await until(lambda: list(state.kernels), ["k2"])
    running.cancel()
