"""Process kernels of one test, and what is written down about them."""

import json
from pathlib import Path
from typing import Any

from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.states import KernelRef, ObservedState
from agentd.host.processes import Proc
from agentd.runtimes.process.runtime import ProcessRuntime
from contracts.test_runtime import plan

K1 = KernelRef("k1")


async def create(runtime: ProcessRuntime, *command: str, **spec: Any) -> ObservedKernel:
    return await runtime.create(plan(*command, **spec), lambda *_: None)


async def found(runtime: ProcessRuntime, ref: KernelRef = K1) -> ObservedKernel:
    kernel = await runtime.find(ref)
    assert kernel is not None
    return kernel


async def is_running(runtime: ProcessRuntime) -> bool:
    return (await found(runtime)).state is ObservedState.RUNNING


def bundle(folder: Path, kernel_id: str = "k1") -> Path:
    return folder / "kernels" / kernel_id


def identity(folder: Path) -> dict[str, Any]:
    return json.loads((bundle(folder) / "identity.json").read_text())


def command(folder: Path) -> Proc:
    who = identity(folder)
    return Proc(who["pid"], who["start_time"])


def shim(folder: Path) -> Proc:
    who = identity(folder)
    return Proc(who["shim_pid"], who["shim_start_time"])


def groups_of_kernel(folder: Path) -> set[int]:
    """Return the supplementary groups of the kernel's first process."""
    status = Path(f"/proc/{identity(folder)['pid']}/status").read_text()
    (groups,) = (line for line in status.splitlines() if line.startswith("Groups:"))
    return {*map(int, groups.split()[1:])}
