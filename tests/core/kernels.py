"""One kernel, its record, and what a runtime finds of it."""

from msgspec.structs import replace

from agentd.core.allocation.ledger import Allocation, Share
from agentd.core.devices import DeviceId
from agentd.core.kernel.observation import ObservedKernel
from agentd.core.kernel.record import encode, encode_device_label
from agentd.core.kernel.states import Ending, Kernel, KernelState, ObservedState
from agentd.core.slots import ONE, SlotKind
from core.machines import cores, gpus, machine, memory

NODE = machine(*cores(4), memory(), *gpus(1, 1))
GPU = Share(DeviceId("cuda", "cuda0"), "GPU-cuda-0", "cuda.device", SlotKind.COUNT, ONE)
MEM = Share(DeviceId("mem", "root"), "mem-root", "mem", SlotKind.BYTES, 4096)
HELD = Allocation((GPU, MEM))
KERNEL = Kernel(
    "k1", "a", KernelState.CREATING, "hash", 5.0, "docker", {"cuda.device": "1"}, HELD,
    not_enforced=("mem",),
)  # fmt: skip


def encoded(**changes) -> str:
    """The record of the kernel, with something changed."""
    return encode(replace(KERNEL, **changes), "n")


def found(state: ObservedState = ObservedState.RUNNING, **changes) -> ObservedKernel:
    base = ObservedKernel(
        "k1",
        "a",
        "docker",
        "c1",
        state,
        encoded(),
        encode_device_label(HELD),
        6.0,
        Ending(3, finished_at=7.0),
    )
    return replace(base, **changes)
