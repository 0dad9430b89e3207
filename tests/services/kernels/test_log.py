"""The log lines of a kernel: one for its end, and the reason of a create that failed."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from agentd.concurrency import Deadline
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.states import Ending, ObservedState
from agentd.errors import CommandNotFound, Draining, KernelConflict, OutcomeUnknown
from services.node import Rig, settled


def about(logged: list[Any], kernel_id: str = "k1") -> list[tuple[str, object]]:
    """The log lines about a kernel: the event, and the exit code or reason."""
    return [
        (line["event"], line.get("exit_code", line.get("reason")))
        for line in logged
        if line.get("kernel_id") == kernel_id
    ]


async def test_kernel_of_an_unknown_outcome_that_ended_is_logged_once(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("lost")
    with pytest.raises(OutcomeUnknown):
        await rig.create()
    rig.runtime.fail_create = None
    spec = rig.spec()
    plan = await rig.planner.plan(rig.state.kernel("k1"), spec, rig.state, rig.runtime)
    with capture_logs() as logged:
        rig.runtime.put(
            ObservedKernel("k1", "a", "fake", "1", ObservedState.EXITED, plan.record,
                           plan.device_label, 1.0, Ending(5, finished_at=2.0))
        )  # fmt: skip
        await rig.relist()
        await rig.relist()
    assert about(logged) == [("kernel.ended", 5), ("kernel.adopted", 5)]


async def test_kernel_that_ended_while_agentd_was_down_is_logged_once(rig: Rig) -> None:
    await rig.create()
    rig.runtime.end("k1", 9)
    for expected in ([("kernel.ended", 9), ("kernel.adopted", 9)], [("kernel.adopted", 9)]):
        after = Rig(rig.memory)
        after.runtime.kernels = rig.runtime.kernels
        after.recall()
        with capture_logs() as logged:
            await after.relist()
        assert about(logged) == expected


@pytest.mark.parametrize("is_stop", [False, True])
async def test_create_that_is_cut_off_is_logged_with_its_reason(rig: Rig, is_stop: bool) -> None:
    rig.runtime.pull_gate = asyncio.Event()
    creating = asyncio.create_task(rig.create())
    await settled(rig, "k1", "pulling")
    with capture_logs() as logged:
        await (rig.creates.drain(Deadline.after(10)) if is_stop else rig.service.remove("k1"))
    reason = "agentd is stopping" if is_stop else "the kernel was deleted"
    assert about(logged) == [("kernel.create_failed", reason)]
    with pytest.raises((Draining, KernelConflict)):
        await creating


async def test_failed_create_is_logged_without_its_command(rig: Rig) -> None:
    with capture_logs() as logged, pytest.raises(CommandNotFound, match="hunter2"):
        await rig.create("k1", "a", "hunter2")
    reason = "the command does not exist or is not executable"
    assert about(logged) == [("kernel.create_failed", reason)]
