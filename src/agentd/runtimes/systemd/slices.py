"""The environment of kernels: slices of agents, limits of their journals, and a drop-in.

A slice is as large as its agent's partition plus what its live kernels hold, since some may belong
to an older partition. It is set at each create, so it shrinks only after the kernels that enlarged
it have ended: lowering `MemoryMax=` under live kernels kills them. Properties that an operator sets
in a drop-in (systemd.unit(5)) are left alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from agentd.core.conditions import Condition
from agentd.core.kernel.plan import KernelPlan, name_prefix
from agentd.host.systemd.dbus import SystemdManager, UnitProperty, UnitRefused
from agentd.host.systemd.unit_paths import user_runtime_folder
from agentd.os_errors import os_error_as_refusal
from agentd.runtimes.systemd.unit import core_mask, namespace_name, slice_name
from agentd.runtimes.systemd.unit_bundle import DROP_IN, static_busybox

_RUNTIME = Path("/run/systemd")
JOURNAL_LIMITS = """\
# Written by agentd: the log of one agent's kernels. A file of another name after this one, in
# /etc/systemd/journald@{namespace}.conf.d, is stronger (journald.conf(5)).
[Journal]
SystemMaxUse=1G
RuntimeMaxUse=128M
RateLimitIntervalSec=0
RateLimitBurst=0
"""


class Slices:
    """Keeps the slices of agents as large as their kernels need."""

    def __init__(self, manager: SystemdManager) -> None:
        self._manager = manager
        self._limits: dict[str, list[UnitProperty]] = {}

    async def apply_cap(self, plan: KernelPlan) -> None:
        """Create a kernel's slice and journal, or enlarge the slice."""
        agent_id = plan.spec.agent_id
        limits: list[UnitProperty] = []
        if plan.resource_cap.cores:
            limits.append(("AllowedCPUs", "ay", core_mask(map(int, plan.resource_cap.cores))))
        if plan.resource_cap.memory_bytes:
            limits.append(("MemoryMax", "t", plan.resource_cap.memory_bytes))
        if self._limits.get(agent_id) == limits:
            return
        _limit_journal(agent_id)
        name = slice_name(agent_id)
        operator_properties = await self._operator_properties(name)
        changes = [prop for prop in limits if prop[0] not in operator_properties]
        if changes:
            await self._manager.set_properties(name, changes)
        self._limits[agent_id] = limits

    async def _operator_properties(self, name: str) -> set[str]:
        """Return the properties that an operator's drop-ins of a slice set."""
        with suppress(UnitRefused):
            unit_state = (
                await self._manager.get_properties(name, ("Unit.DropInPaths",), loading=True) or {}
            )
            paths = (Path(path) for path in unit_state.get("Unit.DropInPaths", ()))
            texts = [_read_text(path) for path in paths if not path.is_relative_to(_RUNTIME)]
            return {line.partition("=")[0].strip() for text in texts for line in text.splitlines()}
        return set()


class ExitDropIn:
    """Makes systemd record how kernels of a node end, by a drop-in for all of their units.

    A property of the units cannot do it: `ExecStopPost=` with all rights (`+`) is only available to
    a transient unit as `ExecStopPostEx`, which up to version 253 is lost in a `daemon-reload`.
    """

    def __init__(self, manager: SystemdManager, node_id: str, folder: Path) -> None:
        self._manager = manager
        self._node_id = node_id
        self._folder = folder.absolute()
        self._is_installed = False
        self._installing = asyncio.Lock()

    async def install(self) -> None:
        """Write the drop-in, once for each boot, since it requires a reload of the manager.

        Without a static BusyBox there is no drop-in. Then the exit status of a kernel is lost if
        only systemd sees its end.

        Raises:
            AgentdError: the drop-in cannot be written.
        """
        async with self._installing:
            if self._is_installed:
                return
            try:
                if (busybox := static_busybox()) is not None:
                    await self._install(busybox)
            except OSError as error:
                raise os_error_as_refusal(error, "systemd's drop-ins") from error
            self._is_installed = True

    async def _install(self, busybox: str) -> None:
        """Write the drop-in and reload the manager; the file `loaded` beside it marks that."""
        prefix = name_prefix(self._node_id)
        is_user = self._manager.is_user
        units = user_runtime_folder() / "systemd/user" if is_user else _RUNTIME / "system"
        file = units / f"{prefix}.service.d" / "10-agentd.conf"
        loaded = file.with_name("loaded")
        folder = str(self._folder).replace("%", "%%").replace("$", "$$")
        text = DROP_IN.format(
            prefix=prefix,
            manager="--user" if is_user else "--system",
            folder=f'"{folder}"',
            busybox=busybox,
        )
        if _read_text(file) == text and loaded.exists():
            return
        file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        loaded.unlink(missing_ok=True)
        file.write_text(text, encoding="utf-8")
        await self._manager.reload()
        loaded.touch()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def journal_conditions(failed: Collection[str], root: Path = Path("/")) -> Iterator[Condition]:
    """Yield the conditions of the agents' journals; `failed` are units of systemd.

    A namespace is in use while journald has a folder for it.
    """
    for folder in sorted(root.glob("run/systemd/journal.agentd-*")):
        namespace = folder.name.removeprefix("journal.")
        unit = f"systemd-journald@{namespace}.service"
        agents = (namespace.removeprefix("agentd-"),)
        if unit in failed:
            reason = f"{unit} has failed: kernel output is lost until it runs again"
            yield Condition("host", reason, f"systemctl status {unit}", agents)
        limits = _limits_file(namespace, root)
        if not limits.exists():
            reason = f"the journal {namespace} has no limits: {limits} is missing"
            yield Condition("host", reason, agents=agents)


def _limits_file(namespace: str, root: Path = Path("/")) -> Path:
    return root / f"run/systemd/journald@{namespace}.conf.d/10-agentd.conf"


def _limit_journal(agent_id: str) -> None:
    """Limit the journal of an agent before its first kernel starts one."""
    namespace = namespace_name(agent_id)
    file = _limits_file(namespace)
    with suppress(OSError):
        text = JOURNAL_LIMITS.format(namespace=namespace)
        if _read_text(file) != text:
            file.parent.mkdir(mode=0o755, exist_ok=True)
            file.write_text(text, encoding="utf-8")
            file.chmod(0o644)
