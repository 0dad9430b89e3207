import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from agentd.core.access import Caller, Role
from agentd.core.kernel.record import encode
from agentd.core.kernel.states import Ending, Kernel, KernelState
from agentd.errors import RuntimeUnavailable, StateUnavailable
from agentd.events import EventLog
from agentd.services.kernels import retention
from agentd.services.kernels.retention import REMOVE_DELAY_S, EndReads, Retention
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
    keeper = Retention(state, service, 2, EndReads(lambda: 0.0), now=NOW)
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
    service: Any = SimpleNamespace(remove=remove)
    keeper = Retention(state, service, 2, EndReads(lambda: 0.0), now=NOW)
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

    service: Any = SimpleNamespace(remove=remove)
    keeper = Retention(state, service, 9, EndReads(lambda: 0.0), now=NOW)
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


@pytest.mark.parametrize("bound", ["number", "bytes"])
async def test_agent_loses_no_ended_kernels_to_another(bound: str, monkeypatch: Any) -> None:
    state = NodeState(["any"], EventLog())

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        state.drop_kernel(expected.kernel_id)

    service: Any = SimpleNamespace(remove=remove)
    size = len(encode(ended("k0", 0.0), ""))
    maximum = 4 if bound == "number" else 99
    if bound == "bytes":
        monkeypatch.setattr(retention, "MAX_ENDED_BYTES", 4 * size + 9)
    state.put_kernel(ended("k0", 0.0))
    state.put_kernel(ended("k1", 1.0))
    keeper = Retention(state, service, maximum, EndReads(lambda: 0.0), now=NOW)
    for number in range(2, 9):
        state.put_kernel(replace(ended(f"k{number}", float(number)), agent_id="flood-1"))
        await keeper.prune()
    assert list(state.kernels) == ["k0", "k1", "k7", "k8"]


async def test_failed_removal_is_repeated_without_an_end(monkeypatch: Any) -> None:
    monkeypatch.setattr(retention, "RETRY_PAUSE_S", 0.01)
    state = NodeState(["any"], EventLog())
    failures = [StateUnavailable("the disk is full")] * 2

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        if failures:
            raise failures.pop()
        state.drop_kernel(expected.kernel_id)

    service: Any = SimpleNamespace(remove=remove)
    keeper = Retention(state, service, 1, EndReads(lambda: 0.0), now=9.0)
    for number in (1, 2):
        state.put_kernel(ended(f"k{number}", float(number)))
    running = asyncio.create_task(keeper.run())
    await until(lambda: list(state.kernels), ["k2"])
    running.cancel()


CREATOR = Caller("team-a", Role.AGENT, frozenset({"agent-1"}), uid=1000)
MARKED = replace(ended("k1", 1.0), removes=True, created_by="team-a", creator_uid=1000)
LISTED, REMOVED = ["k1"], []


@pytest.mark.parametrize(
    ("kernel", "reader", "left"),
    [
        (MARKED, CREATOR, REMOVED),
        (replace(MARKED, state=KernelState.FAILED), CREATOR, REMOVED),
        (replace(MARKED, creator_uid=None), replace(CREATOR, uid=None), REMOVED),
        (MARKED, None, LISTED),
        (replace(MARKED, removes=False), CREATOR, LISTED),
        (replace(MARKED, state=KernelState.STOPPING), CREATOR, LISTED),
        (MARKED, replace(CREATOR, name="team-b"), LISTED),
        (MARKED, replace(CREATOR, uid=1001), LISTED),
        (MARKED, replace(CREATOR, uid=None), LISTED),
    ],
    ids=[
        "creator", "failed", "over-tcp", "nobody", "not-wanted", "still-running", "another-caller",
        "another-user", "same-name-over-tcp",
    ],
)  # fmt: skip
async def test_kernel_with_remove_goes_after_its_end_was_read(
    kernel: Kernel, reader: Caller | None, left: list[str]
) -> None:
    state, clock = NodeState(["any"], EventLog()), [0.0]
    reads = EndReads(lambda: clock[0])

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        state.drop_kernel(expected.kernel_id)

    service: Any = SimpleNamespace(remove=remove)
    state.put_kernel(kernel)
    keeper = Retention(state, service, 9, reads, now=NOW)
    if reader is not None:
        reads.note(kernel, reader)
    clock[0] = REMOVE_DELAY_S - 0.1
    await keeper.prune()
    assert list(state.kernels) == LISTED
    if reader is not None:
        reads.note(kernel, reader)  # a second reading does not put it off
    clock[0] = REMOVE_DELAY_S
    await keeper.prune()
    assert list(state.kernels) == left


@pytest.mark.parametrize("change", ["runs-again", "replaced"])
async def test_a_read_end_does_not_count_for_a_later_one(change: str) -> None:
    state, clock = NodeState(["any"], EventLog()), [0.0]
    reads = EndReads(lambda: clock[0])

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        state.drop_kernel(expected.kernel_id)

    service: Any = SimpleNamespace(remove=remove)
    keeper = Retention(state, service, 9, reads, now=NOW)
    state.put_kernel(MARKED)
    reads.note(MARKED, CREATOR)
    if change == "replaced":
        state.drop_kernel("k1")
    state.put_kernel(replace(MARKED, state=KernelState.RUNNING))
    state.put_kernel(MARKED)
    clock[0] = 2 * REMOVE_DELAY_S
    await keeper.prune()
    assert list(state.kernels) == LISTED
    reads.note(MARKED, CREATOR)
    clock[0] = 3 * REMOVE_DELAY_S
    await keeper.prune()
    assert list(state.kernels) == REMOVED


async def test_a_due_removal_is_waited_for_and_repeated(monkeypatch: Any) -> None:
    monkeypatch.setattr(retention, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(retention, "REMOVE_DELAY_S", 0.01)
    state, failures = NodeState(["any"], EventLog()), [RuntimeUnavailable("down")] * 2
    reads = EndReads(asyncio.get_running_loop().time)

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        if failures:
            raise failures.pop()
        state.drop_kernel(expected.kernel_id)

    service: Any = SimpleNamespace(remove=remove)
    state.put_kernel(MARKED)
    running = asyncio.create_task(Retention(state, service, 9, reads, now=NOW).run())
    await asyncio.sleep(0)
    reads.note(MARKED, CREATOR)
    await until(lambda: list(state.kernels), REMOVED)
    running.cancel()


async def test_each_read_end_is_due_after_its_own_delay() -> None:
    clock = [0.0]
    reads = EndReads(lambda: clock[0])
    for at in (0.0, 4.0):
        clock[0] = at
        reads.note(replace(MARKED, kernel_id=f"k{at}"), CREATOR)
    clock[0] = REMOVE_DELAY_S + 1
    assert [reads.is_due(f"k{at}") for at in (0.0, 4.0)] == [True, False]
