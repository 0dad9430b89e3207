"""A GPU that is replaced by another card in its PCI slot, while agentd runs and across a restart.

NVML is the substitute of `native/nvml.c`; the plugin, its process and `pynvml` are real.
"""

import pytest
from msgspec.structs import replace

from agentd.core.partition.rules import AgentRule, AllocationMode, Count, Ids, Size, SplitRules
from plugins.test_cuda import library, node
from plugins.test_cuda_trouble import Machine, gpus, machine

__all__ = ("library", "machine", "node")

SILENT = gpus(is_mig=False).replace("recovery=0", "recovery=-1")
REPLACED = SILENT.replace("uuid=GPU-0 ", "uuid=GPU-new ")


def texts(machine: Machine) -> list[str]:
    return [text for text in machine.devices.warnings if "cuda" in text]


async def test_xid_of_a_replaced_gpu_ends_with_it(machine: Machine) -> None:
    """https://github.com/NVIDIA/NVSentinel/issues/1585"""
    machine.node.say(SILENT + "xid id=1 gpu=0 code=79\n")
    await machine.until(lambda: machine.health()["GPU-0"] == "unhealthy")
    machine.node.say(REPLACED)
    await machine.until(lambda: machine.health().get("GPU-new") == "healthy")
    for _ in range(2):
        (gone,) = [text for text in texts(machine) if text.startswith("cuda0")]
        assert gone.startswith("cuda0 is gone: not ")
        assert "cuda5 has its place (if it does not return: agentctl forget cuda0)" in gone
        assert not any("Xid" in text for text in texts(machine))
        await machine.restart()
    machine.devices.forget("cuda", "cuda0", holders=())
    assert not any("cuda0" in text for text in texts(machine))
    await machine.host.close()


@pytest.mark.parametrize(
    ("name", "given"),
    [("GPU-0", ["cuda0"]), ("cuda0", ["cuda0"]), ("0000:00:00.0", ["cuda4"])],
    ids=["UUID", "id", "PCI address"],
)
async def test_agent_that_names_a_replaced_gpu_starts(
    machine: Machine, name: str, given: list[str]
) -> None:
    """https://github.com/truenas/middleware/pull/19499"""
    machine.node.say(REPLACED)
    rule = AgentRule("a", Count(1), Size(2**30), {"cuda": Ids((name,))}, described=True)
    other = replace(rule, agent_id="b", devices={"cuda": Count(3)})
    machine.rules = SplitRules(AllocationMode.MANUAL, (rule, other))
    await machine.restart()
    assert [d.id for d in machine.devices.partition("a").devices if d.name == "cuda"] == given
    assert len([d for d in machine.devices.partition("b").devices if d.name == "cuda"]) == 3
    assert any(text.startswith("cuda0 is gone: ") for text in texts(machine))
    await machine.host.close()
