import asyncio
from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from agentd.core.kernel.record import encode
from agentd.core.kernel.states import Ending, Kernel, KernelState
from agentd.errors import RuntimeUnavailable
from agentd.events import EventLog
from agentd.services.kernels import retention
from agentd.services.kernels.retention import Retention
from agentd.services.state import NodeState


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
    keeper = Retention(state, service, 2)
    state.put_kernel(Kernel("lives", "agent-1", KernelState.RUNNING, "hash", 0.0, "any"))
    for name, at in (("third", 3.0), ("first", 1.0), ("stuck", 0.5), ("second", 2.0)):
        state.put_kernel(ended(name, at))
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


async def test_retention_bounds_the_bytes_of_ended_kernels(monkeypatch: Any) -> None:
    state = NodeState(["any"], EventLog())

    async def remove(kernel_id: str, *, expected: Kernel) -> None:
        state.drop_kernel(expected.kernel_id)

    keeper = Retention(state, SimpleNamespace(remove=remove), 9)  # type: ignore[arg-type]
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
