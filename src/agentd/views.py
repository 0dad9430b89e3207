"""The wire types: answers of the API, results of clients and the OpenAPI document.

Amounts are strings of plain decimals without trailing zeros, times are RFC 3339 in UTC.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias

from typing_extensions import TypedDict

Amount: TypeAlias = str
"""A plain decimal without trailing zeros."""


class PortView(TypedDict):
    """A port of a kernel, and the host port on which it is published."""

    container: int
    host: int | None
    protocol: str
    address: str


class PullView(TypedDict):
    """The progress of a pull in bytes; the total grows as layers become known."""

    current: int
    total: int


class MountView(TypedDict):
    """A bind mount of a kernel, as requested."""

    source: str
    target: str
    read_only: bool


class KernelView(TypedDict):
    """A kernel. `allocation` is device name -> slot -> device id -> amount.

    `image`, `command`, `mounts` and `labels` are as requested, and `env` has the names of the
    variables without their values; a member of more than 32 KiB is left empty. `pid` is the
    kernel's first process on the host (`process`: its own, `systemd`: the unit's main process while
    it runs), and `unit` is the unit of the `systemd` runtime.
    """

    kernel_id: str
    agent_id: str
    state: Literal[
        "preparing", "pulling", "creating", "running", "paused", "stopping",
        "terminated", "failed", "lost", "unreadable",
    ]  # fmt: skip
    slots: dict[str, Amount]
    allocation: dict[str, dict[str, dict[str, Amount]]]
    unknown_slots: dict[str, Amount]
    degraded: list[str]
    ports: list[PortView]
    container_id: str | None
    pid: int | None
    unit: str | None
    created_at: str
    started_at: str | None
    finished_at: str | None
    exit_code: int | None
    oom_killed: bool
    pull: PullView | None
    reason: str
    not_enforced: list[str]
    created_by: str
    image: str | None
    command: list[str]
    env: list[str]
    mounts: list[MountView]
    labels: dict[str, str]


class DeviceUseView(TypedDict):
    """The usage of a device in which a kernel has a `share` (0 to 1); null means unknown.

    Utilization (0 to 1), `memory_used_bytes` and power are those of the whole device.
    """

    device_name: str
    id: str
    share: Amount
    utilization: float | None
    memory_used_bytes: int | None
    used_by_kernel_bytes: int | None
    power_watts: float | None


class KernelUseView(TypedDict):
    """The usage of a kernel; null means unknown, never 0. Memory includes its cache.

    `state` is the kernel's; an ended one has its totals, and no current values.
    """

    kernel_id: str
    agent_id: str
    state: str
    at: str
    cpu_seconds: float | None
    cpu_throttled_seconds: float | None
    memory_bytes: int | None
    memory_peak_bytes: int | None
    memory_limit_bytes: int | None
    io_read_bytes: int | None
    io_write_bytes: int | None
    processes: int | None
    network_rx_bytes: int | None
    network_tx_bytes: int | None
    devices: list[DeviceUseView]


class DecisionView(TypedDict):
    """The decision that a create would get now; `explain` has each device by slot."""

    slots: dict[str, Amount]
    allocation: dict[str, dict[str, dict[str, Amount]]]
    explain: dict[str, list[dict[str, Any]]]


class HolderView(TypedDict):
    """A kernel that holds a share of a device."""

    kernel_id: str
    amount: Amount


class DeviceView(TypedDict):
    """A device; `allocated` and `holders` are in their holders' slots."""

    device_name: str
    id: str
    stable_id: str
    aliases: list[str]
    agents: list[str]
    state: Literal["ok", "held", "unhealthy", "drained", "gone", "withheld", "overcommitted"]
    reason: str
    numa_node: int | None
    model: str
    slot: str
    capacity: Amount
    allocated: Amount
    free: Amount
    holders: list[HolderView]


class SlotUseView(TypedDict):
    """One slot of an agent; `free` is the amount available now."""

    capacity: Amount
    allocated: Amount
    free: Amount


class LimitView(TypedDict):
    """The limit of an agent for one device name, and the amount it holds under it."""

    limit: Amount
    held: Amount
    guaranteed: bool


class AgentView(TypedDict):
    """An agent: its partition, its slots, and in shared mode its limits by device name."""

    agent_id: str
    devices: dict[str, list[str]]
    slots: dict[str, SlotUseView]
    scaling_factors: dict[str, Amount]
    limits: dict[str, LimitView]


class SlotTypeView(TypedDict):
    """A slot type of this node."""

    name: str
    device_name: str
    kind: Literal["count", "bytes", "unique"]
    quantum: Amount
    exclusive_group: str | None
    unit: str


class RuntimeView(TypedDict):
    """A runtime: `available`, `unavailable` or `starting`."""

    name: str
    state: str
    reason: str


class PluginView(TypedDict):
    """A plugin: its device name, its entry point and its status."""

    name: str
    plugin: str
    state: Literal["pending", "ready", "failed", "blocked", "absent"]
    reason: str
    slots: list[str]


class RefusalView(TypedDict):
    """A create refused in the last hour; `kernel_id` is empty if the request had none."""

    at: str
    caller: str
    agent_id: str
    kernel_id: str
    code: str
    detail: str


class CallerView(TypedDict):
    """The caller: its name, role and agents (null: all); `uid` on a unix socket."""

    name: str
    role: Literal["admin", "agent", "read"]
    agents: list[str] | None
    uid: int | None


class ReloadView(TypedDict):
    """A reload: the changed keys that require a restart."""

    needs_restart: list[str]


class CheckView(TypedDict):
    """A rule that holds on every node, and its findings."""

    check: str
    promise: str
    passed: bool
    findings: list[str]


class NodeView(TypedDict):
    """The node; `checks` are present if requested."""

    id: str
    version: str
    runtime: RuntimeView
    other_runtimes: list[RuntimeView]
    plugins: list[PluginView]
    warnings: list[str]
    generation: int
    checks: NotRequired[list[CheckView]]


class ProblemView(TypedDict):
    """An error (RFC 9457); further members depend on `code`."""

    type: str
    title: str
    status: int
    detail: str
    code: str
