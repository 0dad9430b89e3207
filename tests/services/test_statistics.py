"""Usage of kernels, from cgroups and plugins."""

from decimal import Decimal

import pytest

from agentd.core.kernel.states import KernelState
from agentd.core.kernel.usage import UNKNOWN_USAGE, Usage, UsageReading
from agentd.plugin_api import Measurement, ProcessUse
from agentd.services.statistics import MAX_AGE_S, Statistics
from services.node import Rig

MINE, OTHERS = ":/agentd.slice/k1.service", ":/agentd.slice/k1.service-of-another"


def statistics(rig: Rig, groups: dict[int, str] | None = None) -> Statistics:
    members = groups or {}
    return Statistics(
        rig.node, rig.runtimes, rig.plugins, rig.clock,
        lambda pid: [members[pid]] if pid in members else [],
    )  # fmt: skip


async def test_a_kernel_s_figures_are_its_cgroup_s_and_its_devices(rig: Rig) -> None:
    kernel = await rig.create(cuda_device=1)
    (stable_id,) = [s.stable_id for s in kernel.allocation.shares if s.device_id.name == "cuda"]
    rig.runtime.used["k1"] = UsageReading(Usage(cpu_seconds=2.5), frozenset({MINE}))
    rig.plugins.measured["cuda"] = [
        Measurement(
            stable_id, 83.0, 900, 1000, 60.0, 312.0,
            [ProcessUse(1, 400), ProcessUse(2, 30), ProcessUse(3, 5), ProcessUse(4, 7)],
        )
    ]  # fmt: skip
    groups = {1: MINE, 2: f"{MINE}/below", 3: OTHERS}
    (use,) = await statistics(rig, groups).read([kernel])
    assert (use.kernel_id, use.agent_id, use.at, use.usage.cpu_seconds) == ("k1", "a", 1000, 2.5)
    (device,) = use.devices
    assert (device.share, device.utilization, device.power_watts) == (Decimal(1), 0.83, 312.0)
    assert (device.memory_used_bytes, device.used_by_kernel_bytes) == (900, 430)


@pytest.mark.parametrize(
    ("processes", "known"),
    [(None, None), ([], 0), ([ProcessUse(1)], None), ([ProcessUse(3, 5)], 0)],
    ids=["no driver tells", "nobody", "memory unknown", "somebody else"],
)
async def test_memory_on_a_device_is_known_or_null(rig: Rig, processes, known) -> None:
    kernel = await rig.create(cuda_device=1)
    stable_id = next(s.stable_id for s in kernel.allocation.shares if s.device_id.name == "cuda")
    rig.runtime.used["k1"] = UsageReading(UNKNOWN_USAGE, frozenset({MINE}))
    rig.plugins.measured["cuda"] = [Measurement(stable_id, processes=processes)]
    (use,) = await statistics(rig, {1: MINE, 3: OTHERS}).read([kernel])
    assert use.devices[0].used_by_kernel_bytes == known


async def test_a_runtime_that_does_not_answer_leaves_nulls(rig: Rig) -> None:
    kernel = await rig.create()
    rig.runtime.is_down = True
    (use,) = await statistics(rig).read([kernel])
    assert use.usage == UNKNOWN_USAGE
    assert use.devices == ()


async def test_several_who_ask_at_once_read_one_look(rig: Rig) -> None:
    kernel = await rig.create()
    rig.runtime.used["k1"] = UsageReading(Usage(processes=1))
    asked = statistics(rig)
    await asked.read([kernel])
    rig.runtime.used["k1"] = UsageReading(Usage(processes=2))
    assert (await asked.read([kernel]))[0].usage.processes == 1
    rig.now += MAX_AGE_S
    assert (await asked.read([kernel]))[0].usage.processes == 2
    second = await rig.create("k2")
    assert (await asked.read([second]))[0].usage == UNKNOWN_USAGE, "it came after the look"
    rig.state.drop_kernel("k2")
    assert kernel.state is KernelState.RUNNING


async def test_reused_kernel_id_has_no_usage_of_its_predecessor(rig: Rig) -> None:
    first = await rig.create()
    rig.runtime.used["k1"] = UsageReading(Usage(processes=7))
    asked = statistics(rig)
    assert (await asked.read([first]))[0].usage.processes == 7
    await rig.service.remove("k1", 0)
    second = await rig.create("k1", "b")
    (use,) = await asked.read([second])
    assert (use.agent_id, use.usage) == ("b", UNKNOWN_USAGE)
