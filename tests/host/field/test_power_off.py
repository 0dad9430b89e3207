"""Ends of process kernels by a power-off, found after the next boot, without a unit of systemd."""

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.core.kernel.states import ObservedState
from agentd.runtimes.process.runtime import ProcessRuntime
from contracts.test_runtime import process_runtime
from runtimes.process.rig import K1, command, create, found, shim


@pytest.fixture
async def runtime(folder: Path) -> AsyncIterator[ProcessRuntime]:
    made = process_runtime(folder / "kernels")
    yield made
    await made.remove(K1)
    await made.close()


@pytest.mark.parametrize(
    ("signalled", "boot", "reason"),
    [
        (("shim", "command"), "another-boot", "the node restarted"),
        (("command",), "another-boot", ""),
        (("shim", "command"), "boot", "its shim was told to stop"),
    ],
    ids=["power-off", "stopped-by-hand", "logout"],
)
async def test_a_session_that_is_stopped_is_told_by_its_shim(
    runtime: ProcessRuntime, folder: Path, signalled: tuple[str, ...], boot: str, reason: str
) -> None:
    await create(runtime, "sleep", "1000")
    processes = {"shim": shim(folder), "command": command(folder)}
    for name in signalled:
        os.kill(processes[name].pid, signal.SIGTERM)
    await processes["shim"].wait()
    after = process_runtime(folder / "kernels", **({} if boot == "boot" else {"boot": boot}))
    kernel = await found(after)
    assert kernel.state is ObservedState.EXITED
    assert (kernel.ending.exit_code, kernel.ending.reason) == (143, reason)
    await after.close()


async def test_a_shim_that_is_no_unit_outlives_its_session(
    runtime: ProcessRuntime, folder: Path
) -> None:
    await create(runtime, "sleep", "1000")
    os.kill(shim(folder).pid, signal.SIGTERM)
    await runtime.stop(K1, 0)
    kernel = await found(runtime)
    assert kernel.ending.exit_code == 137
