"""The wire types: answers of the API, results of clients and the OpenAPI document.

Amounts are strings of plain decimals without trailing zeros, times are RFC 3339 in UTC.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypeAlias, final

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
    variables without their values; a member too long to be saved is left empty. `pid` is the
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
    claim_id: str | None


class DeviceNodeView(TypedDict):
    """A device file of the host, and where a container sees it."""

    host_path: str
    container_path: str
    permissions: str


class DeviceRequestView(TypedDict):
    """A request to a device driver of a container engine."""

    driver: str
    device_ids: list[str]
    capabilities: list[str]


class EditsView(TypedDict):
    """Changes to a process or a container that let it use devices."""

    env: dict[str, str]
    device_nodes: list[DeviceNodeView]
    mounts: list[MountView]
    cdi: list[str]
    device_requests: list[DeviceRequestView]
    groups: list[str]


class ClaimView(TypedDict):
    """A claim: devices that an engine took for work of its own.

    It is `used` while a kernel holds devices of it. `holder` has one of `pid` (with `start_time`,
    in ticks since the boot), `cgroup`, `ttl` (seconds) and `name` (with `survives_reboot`).
    `expires_at` is null for other holders than `ttl`.
    """

    claim_id: str
    agent_id: str
    state: Literal["held", "used"]
    slots: dict[str, Amount]
    allocation: dict[str, dict[str, dict[str, Amount]]]
    edits: EditsView
    holder: dict[str, Any]
    labels: dict[str, str]
    created_at: str
    expires_at: str | None
    created_by: str


class EngineView(TypedDict):
    """An engine, and the devices that are withheld until it is `ready`: ids by device name."""

    engine: str
    ready: bool
    devices: dict[str, list[str]]


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


@final
class HolderView(TypedDict):
    """A kernel that holds a share of a device: its `amount` of the primary slot, and all."""

    kernel_id: str
    amount: Amount
    amounts: dict[str, Amount]


@final
class ClaimHolderView(TypedDict):
    """A claim that holds something of a device, as a kernel does."""

    claim_id: str
    amount: Amount
    amounts: dict[str, Amount]


DeviceState: TypeAlias = Literal[
    "ok", "held", "unhealthy", "drained", "gone", "withheld", "overcommitted", "busy"
]


class DeviceView(TypedDict):
    """A device; `allocated` and the `amount` of holders are in their holders' primary slots.

    `slot`, `capacity`, `allocated` and `free` are its primary slot, `slots` has every one. `files`
    are the device nodes that belong to it alone; only administrators see them.
    """

    device_name: str
    id: str
    stable_id: str
    aliases: list[str]
    agents: list[str]
    state: DeviceState
    reason: str
    numa_node: int | None
    model: str
    slot: str
    capacity: Amount
    allocated: Amount
    free: Amount
    slots: dict[str, SlotUseView]
    holders: list[HolderView | ClaimHolderView]
    files: list[str]


class SlotUseView(TypedDict):
    """One slot of an agent or device.

    `free` is of the slot alone: a device may have room for less, if another slot is used up.
    """

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
    """A slot type of this node; a secondary one names the `primary` slot of its devices."""

    name: str
    device_name: str
    kind: Literal["count", "bytes", "unique"]
    quantum: Amount
    exclusive_group: str | None
    unit: str
    primary: str | None


class RuntimeView(TypedDict):
    """A runtime: `available`, `unavailable` or `starting`."""

    name: str
    state: str
    reason: str


class PluginView(TypedDict):
    """A plugin: its device name, its entry point and its status."""

    name: str
    plugin: str
    state: Literal["pending", "ready", "failed", "blocked", "absent", "stopped"]
    reason: str
    slots: list[str]


class RefusalView(TypedDict):
    """A create refused in the last hour.

    `kernel_id` is empty if the request had none, `claim_id` if it was not for a claim.
    """

    at: str
    caller: str
    agent_id: str
    kernel_id: str
    claim_id: str
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


class ConditionView(TypedDict):
    """Something that operators should know, and what they can do (may be empty).

    `about` is `device/NAME/ID`, `plugin/NAME`, `runtime/NAME`, `engine/NAME`, `agent/ID`,
    `kernel/ID`, `claim/ID`, `state-dir`, `log` or `host`.
    """

    about: str
    reason: str
    remedy: str
    since: str


class NodeView(TypedDict):
    """The node; `warnings` are the texts of its conditions; `checks` are present if requested."""

    id: str
    version: str
    runtime: RuntimeView
    other_runtimes: list[RuntimeView]
    plugins: list[PluginView]
    warnings: list[str]
    conditions: list[ConditionView]
    generation: int
    checks: NotRequired[list[CheckView]]


class ProblemView(TypedDict):
    """An error (RFC 9457); further members depend on `code`."""

    type: str
    title: str
    status: int
    detail: str
    code: str
