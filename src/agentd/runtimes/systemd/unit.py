"""A kernel as a transient service unit: name, slice and properties.

Properties are those of systemd.service(5), systemd.exec(5), systemd.resource-control(5) and
systemd.kill(5), with their types in org.freedesktop.systemd1(5).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from agentd.config.runtimes import SystemdSettings
from agentd.core.kernel.edits import ContainerEdits, Mount
from agentd.core.kernel.plan import KernelPlan, kernel_name, name_prefix
from agentd.core.kernel.states import KernelSpec
from agentd.core.names import is_name, validate_name
from agentd.errors import Problem, RuntimeFailure
from agentd.host.systemd.dbus import UnitProperty
from agentd.runtimes.host.environment import kernel_variables
from agentd.runtimes.host.request_limits import host_options, host_problems
from agentd.runtimes.host.user_accounts import UserAccounts
from agentd.runtimes.systemd.unit_bundle import RESERVED

INFINITY = 2**64 - 1
_RECURSIVE = 16384
"""MS_REC of mount(2)."""
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_PLAIN = re.compile(r"[A-Za-z0-9:_.]")


def unit_name(node_id: str, kernel_id: str) -> str:
    """Return the name of a kernel's unit."""
    return f"{kernel_name(node_id, kernel_id)}.service"


def kernel_id_of_unit(node_id: str, unit: str) -> str | None:
    """Return the kernel of a unit, None if it does not belong to this node."""
    prefix = name_prefix(node_id)
    if not (unit.startswith(prefix) and unit.endswith(".service")):
        return None
    kernel_id = unit.removeprefix(prefix).removesuffix(".service")
    return kernel_id if is_name(kernel_id) else None


def slice_name(agent_id: str) -> str:
    r"""Return the slice of an agent's kernels; a `-` in its id is written `\x2d`."""
    escaped = "".join(c if _PLAIN.match(c) else f"\\x{ord(c):02x}" for c in agent_id)
    return f"agentd-{escaped}.slice"


def namespace_name(agent_id: str) -> str:
    """Return the journal namespace of an agent's kernels."""
    return f"agentd-{validate_name(agent_id)}"


def core_mask(numbers: Iterable[int]) -> bytes:
    """Encode core numbers as a bit mask, least significant first."""
    bits = sum(1 << number for number in set(numbers))
    return bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def request_problems(
    spec: KernelSpec, settings: SystemdSettings, user: str | None
) -> Iterator[Problem]:
    """Yield the problems of a request that a unit cannot fulfil."""
    yield from host_problems(spec, "systemd", user, settings)
    yield from _command_problems(spec.command)
    for name, value in spec.env.items():
        if not _ENV_NAME.fullmatch(name):
            yield Problem(
                f"env.{name}",
                "expected a name of letters, digits and _ (systemd accepts no others)",
            )
        if name in RESERVED:
            yield Problem(f"env.{name}", "is set by systemd when a unit ends")
        if _CONTROL.search(value):
            yield Problem(f"env.{name}", "contains a control character, which systemd rejects")


def _command_problems(command: Sequence[str]) -> Iterator[Problem]:
    if command and "/" in command[0] and not command[0].startswith("/"):
        yield Problem("command.0", "expected a name, or a path that begins with /")
    for at, word in enumerate(command):
        if "\0" in word:
            yield Problem(f"command.{at}", "contains a NUL")


def properties(
    plan: KernelPlan,
    folder: str,
    settings: SystemdSettings,
    accounts: UserAccounts,
    memory_nodes: Sequence[int],
) -> list[UnitProperty]:
    """Return the properties of a kernel's unit; `folder` is its bundle.

    Raises:
        RuntimeFailure: its devices require features that units lack.
    """
    spec = plan.spec
    return [
        ("Description", "s", f"kernel {spec.kernel_id} of {spec.agent_id} (agentd)"),
        ("Slice", "s", slice_name(spec.agent_id)),
        *_lifecycle_properties(plan, folder, settings),
        *(
            []
            if accounts.is_unprivileged
            else [("LogNamespace", "s", namespace_name(spec.agent_id))]
        ),
        *_limit_properties(plan, settings, memory_nodes, is_user=accounts.is_unprivileged),
        *_sandbox_properties(plan, accounts),
    ]


def _lifecycle_properties(
    plan: KernelPlan, folder: str, settings: SystemdSettings
) -> Iterator[UnitProperty]:
    spec = plan.spec
    yield "Type", "s", "exec"
    yield "ExitType", "s", "cgroup"
    yield "RemainAfterExit", "b", True
    yield "CollectMode", "s", "inactive"
    yield "ExecStart", "a(sasb)", [[spec.command[0], escape_words(spec.command), False]]
    yield "KillMode", "s", "control-group"
    # When systemd reads the unit again, 0 would mean no limit at all (systemd.service(5)).
    yield "TimeoutStopUSec", "t", max(1, round(settings.stop_timeout * 1_000_000))
    yield "EnvironmentFiles", "a(sb)", [[f"{folder}/environment", False]]
    yield "WorkingDirectory", "s", spec.working_dir or "/"
    yield "SyslogIdentifier", "s", spec.kernel_id
    yield "SyslogLevelPrefix", "b", False
    yield "LogRateLimitIntervalUSec", "t", 0
    own = kernel_variables(plan)
    yield "LogExtraFields", "aay", [f"{name}={value}".encode() for name, value in own.items()]


def escape_words(words: Iterable[str]) -> list[str]:
    """Escape the words of a command, so that systemd leaves them alone: `$` becomes `$$`.

    `ExecStartEx` with `no-env-expand` cannot be used: up to version 253 such a transient unit
    cannot be read again after a `daemon-reload`, and its `ExecStart=` is lost.
    """
    return [word.replace("$", "$$") for word in words]


def _limit_properties(
    plan: KernelPlan,
    settings: SystemdSettings,
    memory_nodes: Sequence[int],
    *,
    is_user: bool,
) -> Iterator[UnitProperty]:
    options = host_options(plan.spec)
    cores = core_mask(map(int, plan.cpus))
    if cores:
        yield ("CPUAffinity" if is_user else "AllowedCPUs"), "ay", cores
    if len(memory_nodes) == 1 and not is_user:
        yield "AllowedMemoryNodes", "ay", core_mask(memory_nodes)
    if plan.memory_bytes:
        yield "MemoryMax", "t", plan.memory_bytes
        yield "MemorySwapMax", "t", 0
    yield "OOMPolicy", "s", "kill"
    for counted in ("CPUAccounting", "IOAccounting", "MemoryAccounting", "TasksAccounting"):
        yield counted, "b", True
    yield "TasksMax", "t", options.pids_limit or settings.pids_limit
    for name, limit in settings.with_default_ulimits(options.ulimits).items():
        yield f"Limit{name.upper()}", "t", _limit_value(limit.hard)
        yield f"Limit{name.upper()}Soft", "t", _limit_value(limit.soft)


def _limit_value(value: int) -> int:
    return INFINITY if value < 0 else value


def _sandbox_properties(plan: KernelPlan, accounts: UserAccounts) -> Iterator[UnitProperty]:
    edits = plan.edits
    refuse_unsupported_edits(edits, is_user=accounts.is_unprivileged)
    yield "NoNewPrivileges", "b", True
    if accounts.is_unprivileged:
        return
    user = accounts.user_for(plan.spec.agent_id)
    if user is None:
        yield "DynamicUser", "b", True
    else:
        yield "User", "s", user
    if edits.groups:
        yield "SupplementaryGroups", "as", list(edits.groups)
    yield "PrivateTmp", "b", True
    yield "DevicePolicy", "s", "closed"
    yield (
        "DeviceAllow",
        "a(ss)",
        [[node.host_path, node.permissions] for node in edits.device_nodes],
    )
    binds = [
        Mount(node.host_path, node.container_path, read_only=False)
        for node in edits.device_nodes
        if node.host_path != node.container_path
    ]
    for name, is_read_only in (("BindPaths", False), ("BindReadOnlyPaths", True)):
        mounts = [m for m in (*edits.mounts, *binds) if m.read_only is is_read_only]
        if mounts:
            rows = [[m.source, m.target, False, _RECURSIVE] for m in mounts]
            yield name, "a(ssbt)", rows


def refuse_unsupported_edits(edits: ContainerEdits, *, is_user: bool) -> None:
    """Refuse edits that only a container supports.

    Raises:
        RuntimeFailure: there are some.
    """
    if edits.cdi or edits.device_requests:
        raise RuntimeFailure("its devices require CDI or an engine's driver, which units lack")
    moved = [mount for mount in edits.mounts if mount.source != mount.target]
    moved += [Mount(n.host_path, n.container_path) for n in edits.device_nodes
              if n.host_path != n.container_path]  # fmt: skip
    if is_user and moved:
        raise RuntimeFailure("its devices require relocated files, which a user's units lack")
