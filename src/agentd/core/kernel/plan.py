"""The plan of a kernel: everything a runtime needs, as one value.

Edits take precedence. A request that sets a plugin's variable is refused; a variable of the image
is overridden, because the plan's environment is explicit.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256

import msgspec
from msgspec.structs import replace

from agentd.core.allocation.ledger import Ledger
from agentd.core.allocation.ports import Port
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.record import encode, encode_device_label
from agentd.core.kernel.states import Kernel, KernelSpec
from agentd.core.names import validate_name
from agentd.core.slots import CPU, MEM
from agentd.errors import InvalidRequest, Problem

LABEL_PREFIX = "io.agentd."
ENV_PREFIX = "AGENTD_"

DEVICE_HOOKS: Mapping[str, str] = {
    "NVIDIA_VISIBLE_DEVICES": "void",
    "NVIDIA_MIG_CONFIG_DEVICES": "",
    "NVIDIA_MIG_MONITOR_DEVICES": "",
    "NVIDIA_IMEX_CHANNELS": "",
    "AMD_VISIBLE_DEVICES": "void",
    "ASCEND_VISIBLE_DEVICES": "void",
    "HABANA_VISIBLE_DEVICES": "void",
}
"""Variables with which hooks of container runtimes give devices, and values that give none.

An image may request all devices with them; only a plugin's edits decide, also without the plugin.
(NVIDIA Container Toolkit, "Specialized Configurations"; the others follow it.)
"""


class AgentResourceCap(msgspec.Struct, frozen=True):
    """The maximum for all kernels of an agent together; 0 and none mean no limit.

    It covers the agent's partition and the shares of its live kernels, some from an older
    partition.
    """

    cores: tuple[str, ...] = ()
    memory_bytes: int = 0


def agent_resource_cap(
    agent_id: str, cores: Collection[str], memory_bytes: int, real: frozenset[str], ledger: Ledger
) -> AgentResourceCap:
    """Return the cap of an agent: its pinnable cores, its memory, and its kernels' shares."""
    held = (share.device_id.id for share in ledger.shares_of(agent_id, CPU))
    all_cores = {*cores, *held}
    if not real or not all_cores <= real:
        all_cores = set()
    return AgentResourceCap(
        tuple(sorted(all_cores)), memory_bytes + ledger.agent_limit_usage(agent_id, MEM)
    )


class PlanContext(msgspec.Struct, frozen=True):
    """The facts of a node for a plan; cores are ids of the `cpu` devices.

    `agent_cores` are those of the agent's partition, `real_cores` those that can be pinned,
    `not_enforced` the limits that the runtime cannot enforce on this node.
    """

    node_id: str
    agent_cores: tuple[str, ...]
    real_cores: frozenset[str]
    not_enforced: frozenset[str] = frozenset()
    resource_cap: AgentResourceCap = msgspec.field(default_factory=AgentResourceCap)


class KernelPlan(msgspec.Struct, frozen=True):
    """A kernel ready to be created; `memory_bytes` 0 means no limit.

    `record` and `device_label` are written to it (see `agentd.core.kernel.record`).
    """

    spec: KernelSpec
    name: str
    node_id: str
    env: Mapping[str, str]
    cpus: tuple[str, ...]
    memory_bytes: int
    edits: ContainerEdits
    record: str
    device_label: str
    ports: tuple[Port, ...] = ()
    resource_cap: AgentResourceCap = msgspec.field(default_factory=AgentResourceCap)


def name_prefix(node_id: str) -> str:
    """Return the prefix of the names of a node's kernels.

    It contains a digest of the node id: ids may contain any separator, and two nodes must never use
    the same container name.
    """
    return f"agentd-{sha256(node_id.encode()).hexdigest()[:10]}-"


def kernel_name(node_id: str, kernel_id: str) -> str:
    """Return the name of a kernel's container, cgroup or unit.

    Raises:
        ValueError: the kernel id is not a name.
    """
    return f"{name_prefix(node_id)}{validate_name(kernel_id)}"


def reserved_problems(spec: KernelSpec) -> list[Problem]:
    """Return the variables and labels of a request that only agentd may set."""
    return [
        *reserved_variables(spec.env),
        *(
            Problem(f"labels.{name}", f"the prefix {LABEL_PREFIX} is reserved for agentd")
            for name in spec.labels
            if name.startswith(LABEL_PREFIX)
        ),
    ]


def reserved_variables(names: Iterable[str]) -> list[Problem]:
    """Return the variables that only agentd may set."""
    ours = f"the prefix {ENV_PREFIX} is reserved for agentd"
    hook = "bypasses the allocation of devices; request slots instead"
    return [
        Problem(f"env.{name}", hook if name in DEVICE_HOOKS else ours)
        for name in names
        if name in DEVICE_HOOKS or name.startswith(ENV_PREFIX)
    ]


def overridden_variables(names: Iterable[str], edits: ContainerEdits) -> list[Problem]:
    """Return the variables that a plugin sets, too."""
    why = "set by a plugin for its devices"
    return [Problem(f"env.{name}", why) for name in names if name in edits.env]


def build_plan(
    spec: KernelSpec, kernel: Kernel, edits: ContainerEdits, node: PlanContext
) -> KernelPlan:
    """Combine request, devices and edits.

    A kernel without cores of its own runs on all cores of its agent.

    Raises:
        InvalidRequest: the request sets a plugin's variable.
    """
    if problems := overridden_variables(spec.env, edits):
        raise InvalidRequest(problems, is_local=True)
    allocation = kernel.allocation
    cores = (
        tuple(share.device_id.id for share in allocation.shares_by_device_name(CPU))
        or node.agent_cores
    )
    pinned = tuple(core for core in cores if core in node.real_cores)
    missing = set(node.not_enforced)
    if len(pinned) < len(cores):
        missing.add(CPU)
    return KernelPlan(
        spec=spec,
        name=kernel_name(node.node_id, spec.kernel_id),
        node_id=node.node_id,
        env={**_hooks(spec, edits), **spec.env, **edits.env},
        cpus=pinned,
        memory_bytes=sum(share.amount for share in allocation.shares_by_device_name(MEM)),
        edits=edits,
        record=encode(replace(kernel, not_enforced=tuple(sorted(missing))), node.node_id),
        device_label=encode_device_label(allocation),
        ports=kernel.ports,
        resource_cap=node.resource_cap,
    )


def _hooks(spec: KernelSpec, edits: ContainerEdits) -> Mapping[str, str]:
    """Return the variables that disable unused hooks; the engine adds its own."""
    if spec.image is None:
        return {}
    if not edits.device_requests:
        return DEVICE_HOOKS
    used = {request.driver.upper() for request in edits.device_requests}
    return {
        name: value for name, value in DEVICE_HOOKS.items() if name.partition("_")[0] not in used
    }
