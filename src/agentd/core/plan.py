"""The last step before the world is touched: everything a runtime needs, as one value.

Edits win. A request that sets a variable which a plugin sets is refused; what an
image sets is overridden, because the plan's environment is given explicitly.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

from agentd.core.allocation import Allocation
from agentd.core.edits import ContainerEdits
from agentd.core.kernel import KernelSpec
from agentd.core.slots import CPU, MEM
from agentd.errors import InvalidRequest, Problem

LABEL_PREFIX = "io.agentd."
ENV_PREFIX = "AGENTD_"


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a plan depends on besides the request; cores are ids of the `cpu` devices.

    `agent_cores` are those of the agent's partition, `real_cores` those that can be
    pinned, `unenforced` what the runtime cannot hold a kernel to on this node.
    """

    node_id: str
    agent_cores: tuple[str, ...]
    real_cores: frozenset[str]
    unenforced: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """A kernel ready to be created; `memory_bytes` 0 means no limit."""

    spec: KernelSpec
    name: str
    node_id: str
    env: Mapping[str, str]
    cpus: tuple[str, ...]
    memory_bytes: int
    edits: ContainerEdits
    not_enforced: tuple[str, ...]
    record: str = ""
    statement: str = ""


def kernel_name(node_id: str, kernel_id: str) -> str:
    """Return the name under which an engine knows a kernel of this node.

    The node stands in it as a digest: ids may contain any separator, and two nodes must never
    mean the same container.
    """
    return f"agentd-{sha256(node_id.encode()).hexdigest()[:10]}-{kernel_id}"


def refuse_reserved(spec: KernelSpec) -> None:
    """Refuse a request that sets what only agentd may set.

    Raises:
        InvalidRequest: with every variable and label that it may not set.
    """
    if problems := [
        *(
            Problem(f"env.{name}", f"names that start with {ENV_PREFIX} are agentd's own")
            for name in spec.env
            if name.startswith(ENV_PREFIX)
        ),
        *(
            Problem(f"labels.{name}", f"labels that start with {LABEL_PREFIX} are agentd's own")
            for name in spec.labels
            if name.startswith(LABEL_PREFIX)
        ),
    ]:
        raise InvalidRequest(problems)


def build_plan(
    spec: KernelSpec, allocation: Allocation, edits: ContainerEdits, node: NodeFacts
) -> KernelPlan:
    """Bring request, devices and edits together.

    A kernel without cores of its own runs on all cores of its agent.

    Raises:
        InvalidRequest: the request sets what only a plugin may set.
    """
    if problems := [
        Problem(f"env.{name}", "is set by a plugin for the devices it gives")
        for name in spec.env
        if name in edits.env
    ]:
        raise InvalidRequest(problems)
    cores = tuple(share.device_id.id for share in allocation.devices_of(CPU)) or node.agent_cores
    pinned = tuple(core for core in cores if core in node.real_cores)
    missing = set(node.unenforced)
    if len(pinned) < len(cores):
        missing.add(CPU)
    if spec.image is None:
        missing.discard("image")
    return KernelPlan(
        spec=spec,
        name=kernel_name(node.node_id, spec.kernel_id),
        node_id=node.node_id,
        env={**spec.env, **edits.env},
        cpus=pinned,
        memory_bytes=sum(share.amount for share in allocation.devices_of(MEM)),
        edits=edits,
        not_enforced=tuple(sorted(missing)),
    )
