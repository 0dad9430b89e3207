"""The systemd runtime: transient service units; systemd keeps their limits and their logs.

A kernel is the unit of its name (see `unit`), with a folder beside it (see `bundle`). The manager
decides whether it lives: only root can create a unit of the system manager. No process of agentd
accompanies a kernel.
"""

from __future__ import annotations

import asyncio
import signal
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from agentd.config.runtimes import SystemdSettings
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.observation import Listing, ObservedKernel
from agentd.core.kernel.plan import KernelPlan, kernel_name
from agentd.core.kernel.states import Kernel, KernelRef, KernelSpec, KernelState
from agentd.core.kernel.usage import UsageReading
from agentd.core.names import quote_untrusted
from agentd.errors import (
    AgentdError,
    CommandNotFound,
    InvalidRequest,
    KernelConflict,
    NotReady,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
    UnknownKernel,
)
from agentd.failpoints import hit_async
from agentd.host.cgroups.usage import MOUNT
from agentd.host.groups import with_group_ids
from agentd.host.lookups import Lookups
from agentd.host.probe import numa_nodes
from agentd.host.processes import Proc, read_stat
from agentd.host.systemd.dbus import SystemdManager, UnitExists, UnitRefused
from agentd.os_errors import os_error_as_refusal
from agentd.plugin_api import Features
from agentd.runtimes.host.environment import kernel_environment
from agentd.runtimes.host.failed_create import undo_create
from agentd.runtimes.host.host_exec import ExecTarget, exec_unit_name, start_host_exec
from agentd.runtimes.host.private_folder import TRASH, list_names, os_errors_as_unavailable
from agentd.runtimes.host.request_limits import (
    HOST_MEMBERS,
    host_group_problems,
    host_options,
)
from agentd.runtimes.host.user_accounts import UserAccounts
from agentd.runtimes.log_positions import LogPositions
from agentd.runtimes.systemd.journal import JournalSource
from agentd.runtimes.systemd.slices import ExitDropIn, Slices
from agentd.runtimes.systemd.unit import (
    kernel_id_of_unit,
    properties,
    request_problems,
    unit_name,
)
from agentd.runtimes.systemd.unit_bundle import POSITIONS, UnitBundle
from agentd.runtimes.systemd.unit_observer import RUNTIME, UnitObserver, agent_of_record
from agentd.runtimes.systemd.unit_state import LIVE_STATES, state_of
from agentd.services.protocols import (
    CreateProgress,
    KernelLog,
    LogQuery,
    LogStream,
    Session,
    Support,
)

ENDING_SUBSTATES = frozenset({"stop-post", "final-sigterm", "final-sigkill"})
"""Sub-states of a unit whose command has ended and whose `ExecStopPost=` may be running."""
POLL_S = 1.0
"""Maximum seconds between observations of a unit that is about to end."""
_EXIT_CHDIR, _EXIT_EXEC, _EXIT_LIMITS, _EXIT_GROUP, _EXIT_USER = 200, 203, 205, 216, 217
"""Exit codes of systemd's own child if it cannot change folder, execute, limit, or become a user.

See systemd.exec(5), "Process Exit Codes".
"""


class SystemdRuntime:
    """The systemd runtime; see `agentd.services.protocols.Runtime`."""

    name = RUNTIME
    minimum_memory_bytes = 1 << 20
    unready_reason = ""
    unlimited = ""
    members = HOST_MEMBERS

    def __init__(
        self,
        folder: Path,
        node_id: str,
        boot_id: str,
        settings: SystemdSettings,
        accounts: UserAccounts,
    ) -> None:
        self._folder = folder
        self._node_id = node_id
        self._settings = settings
        self._accounts = accounts
        self._manager = SystemdManager(is_user=accounts.is_unprivileged)
        self._observer = UnitObserver(folder, node_id, boot_id, self._manager)
        self._slices = Slices(self._manager)
        self._lookups: defaultdict[str, Lookups] = defaultdict(Lookups)
        """By agent: no agent waits for the groups of another."""
        self._ends = ExitDropIn(self._manager, node_id, folder)
        self._positions = LogPositions()

    def update_settings(self, settings: SystemdSettings) -> None:
        """Replace the settings; existing kernels keep theirs."""
        self._settings = settings

    def update_accounts(self, accounts: UserAccounts) -> None:
        """Replace the user accounts; existing kernels keep theirs."""
        self._accounts = accounts

    async def close(self) -> None:
        await self._manager.close()

    async def validate_spec(self, spec: KernelSpec) -> Sequence[Problem]:
        user, allowed = self._accounts.user_for(spec.agent_id), self._settings.allowed_groups
        problems = request_problems(spec, self._settings, user)
        lookups = self._lookups[spec.agent_id]
        return [*problems, *await host_group_problems(spec, allowed, self._accounts, lookups)]

    async def support(self, spec: KernelSpec) -> Support:
        is_user = self._accounts.is_unprivileged
        unsupported = {
            "image": spec.image is not None,
            "separation": is_user or self._accounts.has_account(spec.agent_id),
            "cpu": is_user,
            "devices": is_user,
            "logs": is_user,
        }
        return Support(
            Features(self.name),
            frozenset(name for name, is_unsupported in unsupported.items() if is_unsupported),
        )

    async def create(self, plan: KernelPlan, progress: CreateProgress) -> ObservedKernel:
        kernel_id = plan.spec.kernel_id
        bundle, unit = self._observer.bundle(kernel_id), unit_name(self._node_id, kernel_id)
        nodes = numa_nodes(plan.cpus)
        requested, allowed = host_options(plan.spec).groups, self._settings.allowed_groups
        plan = await with_group_ids(plan, requested, allowed, self._lookups)
        unit_properties = properties(plan, str(bundle.path), self._settings, self._accounts, nodes)
        progress(KernelState.CREATING)
        if bundle.path_exists():
            raise KernelConflict(f"{bundle.path} exists but is not a kernel of this node")
        try:
            bundle.create(plan.record, kernel_environment(plan))
            await hit_async("create.after_record")
            await self._ends.install()
            if not self._accounts.is_unprivileged:
                await self._slices.apply_cap(plan)
            await hit_async("create.after_group")
            result = await self._manager.start(unit, unit_properties)
            await hit_async("create.after_spawn")
            if result != "done":
                raise await self._start_error(plan, unit, result)
            kernel = await self.find(KernelRef(kernel_id))
        except UnitExists as error:
            bundle.remove()
            raise KernelConflict(str(error)) from error
        except BaseException as error:
            await undo_create(self.remove(KernelRef(kernel_id)), error, bundle.path)
            if isinstance(error, UnitRefused):
                raise os_error_as_refusal(OSError(error.number, str(error)), "systemd") from error
            raise
        if kernel is None:
            raise RuntimeFailure(f"{unit} was removed during the start of its kernel")
        return kernel

    async def _start_error(self, plan: KernelPlan, unit: str, result: str) -> AgentdError:
        """Return the error for a unit that did not start."""
        unit_state = await self._manager.get_properties(unit, ("Result", "ExecMainStatus")) or {}
        status = unit_state.get("ExecMainStatus", 0)
        if status == _EXIT_EXEC:
            return CommandNotFound(
                f"command {quote_untrusted(plan.spec.command[0])}: not executable"
            )
        if status == _EXIT_LIMITS:
            requested = host_options(plan.spec).ulimits
            defaults = self._settings.with_default_ulimits({}).keys() - requested
            if requested and not defaults:
                return InvalidRequest([Problem("ulimits", "cannot be set on this node")])
            names = [f"ulimits.{name}" for name in sorted(requested)]
            names += [f"runtime.systemd.default-ulimits.{name}" for name in sorted(defaults)]
            return RuntimeFailure(f"systemd cannot set one of {', '.join(names) or 'its limits'}")
        if status == _EXIT_GROUP and host_options(plan.spec).groups:
            reason = "systemd requires an entry of this host's group database for each number"
            return InvalidRequest([Problem("groups", reason)])
        if status == _EXIT_CHDIR:
            folder = repr(plan.spec.working_dir)
            return InvalidRequest([Problem("working_dir", f"{folder}: inaccessible")])
        reason = f"start {result}: {unit_state.get('Result', 'unknown reason')}, status {status}"
        reason = f"systemd did not start the kernel; {reason}"
        # A working directory on a dead mount; no process, no memory, or a full /tmp.
        is_short = unit_state.get("Result") in ("timeout", "resources")
        error = RuntimeUnavailable(reason) if is_short else RuntimeFailure(reason)
        is_passing = status == _EXIT_USER and self._accounts.has_account(plan.spec.agent_id)
        return NotReady(reason, is_local=True) if is_passing else error

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        unit = unit_name(self._node_id, ref.kernel_id)
        if await self._live_substate(unit) is None:
            return
        grace_s = self._settings.stop_timeout if timeout_s is None else timeout_s
        if grace_s > 0:
            await self._manager.kill(unit, signal.SIGTERM)
            await hit_async("stop.after_term")
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self._wait_ended(unit)
        while (sub := await self._live_substate(unit)) is not None:
            if sub not in ENDING_SUBSTATES:  # otherwise ExecStopPost= would be killed, too
                await self._manager.kill(unit, signal.SIGKILL)
            await hit_async("stop.after_kill")
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._wait_ended(unit)

    async def _live_substate(self, unit: str) -> str | None:
        """Return the sub-state of a live unit, None otherwise."""
        names = ("Unit.ActiveState", "Unit.SubState", "ControlGroup")
        unit_state = await self._manager.get_properties(unit, names)
        with os_errors_as_unavailable():
            if unit_state is None or state_of(*unit_state.values()) not in LIVE_STATES:
                return None
        return str(unit_state["Unit.SubState"])

    async def _wait_ended(self, unit: str) -> None:
        changes = self._manager.watch_units()
        try:
            async for changed_unit in changes:
                if changed_unit in ("", unit) and await self._live_substate(unit) is None:
                    return
        finally:
            await changes.aclose()

    async def signal(self, ref: KernelRef, number: int) -> bool:
        unit = unit_name(self._node_id, ref.kernel_id)
        return await self._manager.kill(unit, number, "main")

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        unit = unit_name(self._node_id, ref.kernel_id)
        if unless_alive and await self._live_substate(unit) is not None:
            return False
        await self.stop(ref, 0)
        await self._manager.unload(unit)
        await hit_async("delete.after_group")
        bundle = self._observer.bundle(ref.kernel_id)
        trash = UnitBundle(self._folder / f"{TRASH}{ref.kernel_id}")
        try:
            trash.remove()
            if bundle.path_exists():
                bundle.path.rename(trash.path)
            await hit_async("delete.after_rename")
            trash.remove()
        except OSError as error:
            raise os_error_as_refusal(error, str(bundle.path)) from error
        return True

    async def list_kernels(self) -> Listing:
        return await self._observer.list_kernels()

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        return await self._observer.find(ref.kernel_id)

    async def watch_events(self) -> AsyncIterator[str]:
        with os_errors_as_unavailable():
            for name in list_names(self._folder):
                if name.startswith(TRASH):
                    UnitBundle(self._folder / name).remove()
        changes = self._manager.watch_units()
        try:
            async for unit in changes:
                if not unit:
                    yield ""
                elif (kernel_id := kernel_id_of_unit(self._node_id, unit)) is not None:
                    yield kernel_id
        finally:
            await changes.aclose()

    async def start_exec(self, kernel: Kernel, spec: ExecSpec) -> Session:
        unit = unit_name(self._node_id, kernel.kernel_id)
        unit_state = await self._manager.get_properties(unit, ("ControlGroup",))
        if unit_state is None or not unit_state["ControlGroup"]:
            raise KernelConflict(f"kernel {kernel.kernel_id} is not running")
        procs = MOUNT / str(unit_state["ControlGroup"])[1:] / "cgroup.procs"
        with os_errors_as_unavailable():
            members = await asyncio.to_thread(_read_members, procs)
        name = exec_unit_name(kernel_name(self._node_id, kernel.kernel_id))
        return await start_host_exec(ExecTarget(members, [procs]), spec, self._manager, name)

    async def usages(self, kernels: Sequence[Kernel]) -> Mapping[str, UsageReading]:
        return await self._observer.usages(kernels)

    @asynccontextmanager
    async def logs(self, ref: KernelRef, query: LogQuery) -> AsyncIterator[KernelLog]:
        if len(query.streams) < len(LogStream):
            reason = "the systemd runtime merges both streams"
            raise InvalidRequest([Problem("stream", reason)])
        kernel = await self.find(ref)
        if kernel is None or not kernel.handle:
            raise UnknownKernel(f"no logs of {ref.kernel_id}: the kernel is lost")
        unit = unit_name(self._node_id, ref.kernel_id)
        agent_id = (
            None
            if self._accounts.is_unprivileged
            else agent_of_record(kernel.record) or kernel.agent_id
        )
        source = JournalSource(unit, kernel.handle, agent_id, partial(self._wait_ended, unit))
        file = self._observer.bundle(ref.kernel_id).path / POSITIONS
        async with self._positions.open(source, query, file, kernel.handle) as opened:
            yield opened


def _read_members(procs: Path) -> list[Proc]:
    """Return the processes of a cgroup."""
    stats = [read_stat(int(pid)) for pid in procs.read_bytes().split()]
    return [Proc(stat.pid, stat.start_time) for stat in stats if stat is not None]
