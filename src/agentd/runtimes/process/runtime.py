"""The process runtime: plain processes, for nodes without an engine and for development.

Each kernel has a bundle in the state folder (see `bundle`) and, if possible, a cgroup. A shim (see
`shim`) outlives the daemon and records the exit status. Only `kernel_processes` decides whether
a process belongs to a kernel.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from agentd.config.runtimes import ProcessSettings
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.observation import Listing, ObservedKernel
from agentd.core.kernel.plan import KernelPlan, kernel_name
from agentd.core.kernel.record import DEVICE_LABEL
from agentd.core.kernel.states import Kernel, KernelRef, KernelSpec, KernelState
from agentd.core.kernel.usage import UsageReading
from agentd.errors import (
    CoresUnavailable,
    InvalidRequest,
    KernelConflict,
    Problem,
    RuntimeFailure,
    RuntimeUnavailable,
)
from agentd.failpoints import hit_async
from agentd.host.cgroups.hierarchies import MEMORY, PIDS, Cgroup, Cgroups
from agentd.host.cgroups.usage import read_usages
from agentd.host.groups import with_group_ids
from agentd.host.lookups import Lookups
from agentd.host.systemd.dbus import SystemdManager
from agentd.plugin_api import Features
from agentd.runtimes.host.failed_create import undo_create
from agentd.runtimes.host.host_exec import ExecTarget, exec_unit_name, start_host_exec
from agentd.runtimes.host.private_folder import Unreadable, os_errors_as_unavailable
from agentd.runtimes.host.request_limits import (
    HOST_MEMBERS,
    host_group_problems,
    host_options,
    host_problems,
)
from agentd.runtimes.host.user_accounts import UserAccounts
from agentd.runtimes.process.bundle import Bundle
from agentd.runtimes.process.bundles import AGENT, DEVICES, Bundles
from agentd.runtimes.process.logs import open_log, query_problems
from agentd.runtimes.process.spawn import (
    MAX_SPAWN_TIMEOUT_S,
    daemon_user_name,
    shim_request,
    spawn_shim,
    spawn_shim_unit,
    start_error,
)
from agentd.services.protocols import CreateProgress, KernelLog, LogQuery, Session, Support

log = structlog.get_logger()

MAX_REMOVE_ATTEMPTS = 10
WATCH_PAUSE_S = 1.0


class ProcessRuntime:
    """The process runtime; see `agentd.services.protocols.Runtime`."""

    name = "process"
    minimum_memory_bytes = 1
    unready_reason = ""
    unlimited = ""
    members = HOST_MEMBERS

    def __init__(
        self,
        folder: Path,
        node_id: str,
        boot_id: str,
        *,
        settings: ProcessSettings,
        accounts: UserAccounts,
        cgroups: Cgroups | None,
        manager: SystemdManager | None = None,
    ) -> None:
        """Create the runtime; `manager` starts shims as units, and is closed with this."""
        self._manager = manager
        self._bundles = Bundles(folder, node_id, boot_id, cgroups)
        self._cgroups = cgroups
        if not accounts.is_unprivileged:
            limited = cgroups.controllers if cgroups else frozenset()
            self.unlimited = " and ".join(sorted({MEMORY, PIDS} - limited))
        self._boot_id = boot_id
        self._settings = settings
        self._user_accounts = accounts
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._lookups: defaultdict[str, Lookups] = defaultdict(Lookups)
        self._spawns: defaultdict[str, Lookups] = defaultdict(Lookups)
        """By agent: no agent waits for the working directories of another, or for its groups."""
        self._is_followed = False
        self._events: asyncio.Queue[str] = asyncio.Queue()

    def update_settings(self, settings: ProcessSettings) -> None:
        """Replace the settings; existing kernels keep theirs."""
        self._settings = settings

    def update_accounts(self, accounts: UserAccounts) -> None:
        """Replace the user accounts; existing kernels keep theirs."""
        self._user_accounts = accounts

    async def close(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        if self._manager is not None:
            await self._manager.close()

    async def validate_spec(self, spec: KernelSpec) -> Sequence[Problem]:
        settings, user = self._settings, self._user_accounts.user_for(spec.agent_id) or ""
        lookups = self._lookups[spec.agent_id]
        if spec.user is not None and not user:
            user = await lookups.call("the user database", daemon_user_name)
        problems = host_problems(spec, "process", user, settings)
        allowed, accounts = settings.allowed_groups, self._user_accounts
        return [*problems, *await host_group_problems(spec, allowed, accounts, lookups)]

    async def support(self, spec: KernelSpec) -> Support:
        controllers = self._cgroups.controllers if self._cgroups else frozenset[str]()
        unsupported = {
            "image": spec.image is not None,
            "mem": MEMORY not in controllers,
            "pids_limit": PIDS not in controllers,
            "separation": not self._user_accounts.has_own_account(spec.agent_id),
            DEVICE_LABEL: self._cgroups is None or not self._cgroups.keeps_attributes,
        }
        return Support(
            Features(self.name),
            frozenset(name for name, is_unsupported in unsupported.items() if is_unsupported),
        )

    async def create(self, plan: KernelPlan, progress: CreateProgress) -> ObservedKernel:
        ref = KernelRef(plan.spec.kernel_id)
        bundle = self._bundles.bundle(ref.kernel_id)
        _refuse_unsupported_edits(plan.edits)
        progress(KernelState.CREATING)
        if bundle.path_exists():
            raise KernelConflict(f"{bundle.path} exists but is not a kernel of this node")
        try:
            return await self._start(await self._with_group_ids(plan), bundle)
        except BaseException as error:
            await undo_create(self.remove(ref), error, bundle.path)
            if isinstance(error, CoresUnavailable) and self._manager is not None:
                with suppress(RuntimeUnavailable):  # the next one says why it cannot start
                    await self._manager.unload(_shim_unit(self._kernel_name(ref)))
            raise

    async def _start(self, plan: KernelPlan, bundle: Bundle) -> ObservedKernel:
        with bundle.create(plan.record) as lock:
            await hit_async("create.after_record")
            cgroup = self._create_cgroup(plan)
            await hit_async("create.after_group")
            request = shim_request(
                plan,
                folder=bundle.path,
                boot_id=self._boot_id,
                settings=self._settings,
                account=self._user_accounts.account_for(plan.spec.agent_id),
                cgroup=cgroup,
            )
            spawn_task = asyncio.create_task(self._spawn_shim(plan, request, lock))
            try:
                answer = await asyncio.shield(spawn_task)
            except asyncio.CancelledError:
                await asyncio.wait([spawn_task])
                raise
        await hit_async("create.after_spawn")
        if "pid" not in answer:
            raise start_error(plan, answer, self._settings)
        self._watch(plan.spec.kernel_id)
        if (kernel := await self.find(KernelRef(plan.spec.kernel_id))) is None:
            raise RuntimeFailure(f"{bundle.path} was removed during the start of its kernel")
        return kernel

    async def _with_group_ids(self, plan: KernelPlan) -> KernelPlan:
        """Return a plan with the numbers of its groups, if kernels of its agent can have any."""
        if not self._user_accounts.has_account(plan.spec.agent_id):
            return plan
        requested, allowed = host_options(plan.spec).groups, self._settings.allowed_groups
        return await with_group_ids(plan, requested, allowed, self._lookups)

    async def _spawn_shim(
        self, plan: KernelPlan, request: Mapping[str, Any], lock: int
    ) -> dict[str, Any]:
        spawns = self._spawns[plan.spec.agent_id]
        if self._manager is None:
            spawn = partial(spawn_shim, request, lock)
            return await spawns.call("the start of a kernel", spawn, MAX_SPAWN_TIMEOUT_S)
        unit = _shim_unit(plan.name)
        return await spawn_shim_unit(self._manager, unit, request, lock, spawns)

    def _create_cgroup(self, plan: KernelPlan) -> Cgroup | None:
        if self._cgroups is None or not self._cgroups.is_writable:
            return None
        cgroup = self._cgroups.group(plan.name)
        pids = host_options(plan.spec).pids_limit or self._settings.pids_limit
        attributes = {AGENT: plan.spec.agent_id, DEVICES: plan.device_label}
        self._cgroups.create(cgroup, {MEMORY: plan.memory_bytes, PIDS: pids}, attributes)
        return cgroup

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        with os_errors_as_unavailable():
            processes = self._bundles.kernel_processes(ref.kernel_id)
            if not processes.is_running:
                return
            grace_s = self._settings.stop_timeout if timeout_s is None else timeout_s
            if grace_s > 0:
                processes.terminate()
                await hit_async("stop.after_term")
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace_s):
                        await processes.wait_ended()
            async for alive in processes.poll_members():
                await processes.kill(alive)
                await hit_async("stop.after_kill")

    async def signal(self, ref: KernelRef, number: int) -> bool:
        with os_errors_as_unavailable():
            return self._bundles.kernel_processes(ref.kernel_id).signal(number)

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        for _ in range(MAX_REMOVE_ATTEMPTS):
            if unless_alive:
                with os_errors_as_unavailable():
                    if self._bundles.kernel_processes(ref.kernel_id).is_running:
                        return False
            else:
                await self.stop(ref, 0)
            with os_errors_as_unavailable():
                is_gone = await self._bundles.remove_bundle(ref.kernel_id)
            if is_gone:
                return True  # otherwise its shim was faster
        raise RuntimeFailure(f"kernel {ref.kernel_id} keeps restarting")

    async def list_kernels(self) -> Listing:
        with os_errors_as_unavailable():
            listing = self._bundles.list_kernels()
        for kernel in listing.kernels:
            self._watch_if_alive(kernel)
        return listing

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        with os_errors_as_unavailable():
            kernel = self._bundles.observe(ref.kernel_id)
        self._watch_if_alive(kernel)
        return kernel

    async def watch_events(self) -> AsyncIterator[str]:
        with os_errors_as_unavailable():
            await self._bundles.recover_trash()
        self._is_followed = True
        await self.list_kernels()
        yield ""
        while True:
            yield await self._events.get()

    async def start_exec(self, kernel: Kernel, spec: ExecSpec) -> Session:
        with os_errors_as_unavailable():
            processes = self._bundles.kernel_processes(kernel.kernel_id)
            members = await asyncio.to_thread(processes.members)
        cgroup = self._bundles.cgroup(kernel.kernel_id)
        groups = [file for file in cgroup.procs_files if file.exists()] if cgroup else []
        target = ExecTarget(members, groups)
        return await start_host_exec(
            target, spec, self._manager, exec_unit_name(self._kernel_name(kernel))
        )

    def _kernel_name(self, kernel: Kernel | KernelRef) -> str:
        return kernel_name(self._bundles.node_id, kernel.kernel_id)

    async def usages(self, kernels: Sequence[Kernel]) -> Mapping[str, UsageReading]:
        accounts = {k.kernel_id: self._bundles.counters(k.kernel_id) for k in kernels}
        return await asyncio.to_thread(read_usages, accounts)

    @asynccontextmanager
    async def logs(self, ref: KernelRef, query: LogQuery) -> AsyncIterator[KernelLog]:
        if problems := list(query_problems(query)):
            raise InvalidRequest(problems)

        def is_running() -> bool:
            return query.follow and self._bundles.kernel_processes(ref.kernel_id).is_running

        async with open_log(self._bundles.bundle(ref.kernel_id).path, query, is_running) as opened:
            yield opened

    def _watch_if_alive(self, kernel: ObservedKernel | None) -> None:
        """Watch for the end of a kernel that was found alive."""
        if self._is_followed and kernel is not None and kernel.is_alive:
            self._watch(kernel.kernel_id)

    def _watch(self, kernel_id: str) -> None:
        if kernel_id not in self._watches:
            task = asyncio.create_task(self._wait_for_end(kernel_id))
            self._watches[kernel_id] = task
            task.add_done_callback(lambda _: self._watches.pop(kernel_id, None))

    async def _wait_for_end(self, kernel_id: str) -> None:
        is_reported = False
        while True:
            try:
                processes = self._bundles.kernel_processes(kernel_id)
                if processes.identity is not None:
                    await processes.identity.shim.wait()
                await processes.wait_ended()
                break
            except Unreadable:
                if not is_reported:  # the reconciler looks at it again by itself
                    self._events.put_nowait(kernel_id)
                is_reported = True
                await asyncio.sleep(WATCH_PAUSE_S)
            except OSError:  # no descriptor or memory: the kernel may still run
                await asyncio.sleep(WATCH_PAUSE_S)
            except Exception:
                log.exception("runtime.watch_failed", kernel_id=kernel_id)
                await asyncio.sleep(WATCH_PAUSE_S)
        self._events.put_nowait(kernel_id)


def _shim_unit(name: str) -> str:
    """Return the name of the unit of a kernel's shim."""
    return f"{name.replace('agentd-', 'agentd-shim-', 1)}.service"


def _refuse_unsupported_edits(edits: ContainerEdits) -> None:
    moved = [mount for mount in edits.mounts if mount.source != mount.target]
    if moved or edits.cdi or edits.device_requests:
        raise RuntimeFailure(
            "its devices require relocated files or CDI, which plain processes lack"
        )
