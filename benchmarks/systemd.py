"""What the systemd runtime adds to a create, against `systemd-run` itself: a pair in turn.

    python benchmarks/systemd.py [--rounds 50] [--kernels 1000]

On a machine whose PID 1 is systemd, as root. `own` is the runtime's create less what systemd-run
takes to start the same command with the same properties; `listed_ms` is one list of so many kernels
that live.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

from agentd.config.runtimes import SystemdSettings
from agentd.core.allocation.ledger import Allocation
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.plan import KernelPlan, PlanContext, build_plan
from agentd.core.kernel.states import Kernel, KernelRef, KernelSpec, KernelState
from agentd.program.boot_id import boot_id
from agentd.runtimes.host.user_accounts import UserAccounts
from agentd.runtimes.systemd.runtime import SystemdRuntime

PROPERTIES = (
    "Type=exec", "ExitType=cgroup", "RemainAfterExit=yes", "DynamicUser=yes", "PrivateTmp=yes",
    "DevicePolicy=closed", "MemorySwapMax=0", "TasksMax=4096", "NoNewPrivileges=yes",
    "LogNamespace=agentd-bench", "Slice=agentd-bench.slice",
)  # fmt: skip


def plan(name: str) -> KernelPlan:
    spec = KernelSpec(name, "bench", ("sleep", "1000"), "hash")
    kernel = Kernel(name, "bench", KernelState.PREPARING, "hash", 1.0, "systemd",
                    allocation=Allocation(()))  # fmt: skip
    return build_plan(spec, kernel, ContainerEdits(), PlanContext("bench", (), frozenset()))


def time_systemd_run(name: str) -> float:
    properties = [f"--property={item}" for item in PROPERTIES]
    start = time.perf_counter()
    subprocess.run(["systemd-run", "--quiet", f"--unit={name}", *properties, "sleep", "1000"],
                   check=True)  # fmt: skip
    return time.perf_counter() - start


async def measure(rounds: int, kernels: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        runtime = SystemdRuntime(
            Path(folder), "bench", boot_id(), SystemdSettings(), UserAccounts()
        )
        await runtime.create(plan("warm"), lambda *_: None)
        pairs = []
        for number in range(rounds):
            plain_s = await asyncio.to_thread(time_systemd_run, f"bench-{number}")
            start = time.perf_counter()
            await runtime.create(plan(f"k{number}"), lambda *_: None)
            pairs.append((plain_s, time.perf_counter() - start))
            subprocess.run(["systemctl", "stop", f"bench-{number}"], check=True)
        for number in range(rounds, kernels):
            await runtime.create(plan(f"k{number}"), lambda *_: None)
        start = time.perf_counter()
        kernel_count = len((await runtime.list_kernels()).kernels)
        list_s = time.perf_counter() - start
        for kernel in (await runtime.list_kernels()).kernels:
            await runtime.remove(KernelRef(kernel.kernel_id))
        await runtime.close()
    return {
        "systemd_run_ms": statistics.median(plain_s for plain_s, _ in pairs) * 1000,
        "create_ms": statistics.median(runtime_s for _, runtime_s in pairs) * 1000,
        "own_ms": statistics.median(runtime_s - plain_s for plain_s, runtime_s in pairs) * 1000,
        "listed": kernel_count,
        "listed_ms": list_s * 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--kernels", type=int, default=1000)
    options = parser.parse_args()
    print(json.dumps(asyncio.run(measure(options.rounds, options.kernels)), indent=1))


if __name__ == "__main__":
    main()
