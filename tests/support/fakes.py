"""Stand-ins for the outside; the runtime passes the same contract suite as the real ones."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager

from msgspec.structs import replace

from agentd.core.claim.claim import CgroupHolder, ClaimHolder, ProcessHolder
from agentd.core.conditions import Condition
from agentd.core.devices import Device, DeviceId, Health
from agentd.core.kernel.edits import ContainerEdits
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.observation import Listing, ObservedKernel
from agentd.core.kernel.plan import KernelPlan
from agentd.core.kernel.states import (
    Ending,
    Kernel,
    KernelRef,
    KernelSpec,
    KernelState,
    ObservedState,
)
from agentd.core.kernel.usage import UsageReading
from agentd.core.partition.plugin_assignment import PluginAssignment
from agentd.errors import (
    CommandNotFound,
    PluginUnavailable,
    Problem,
    RuntimeUnavailable,
    StateUnavailable,
)
from agentd.plugin_api import Features, Measurement
from agentd.runtimes.docker.container_config import CONTAINER_MEMBERS
from agentd.services.protocols import (
    CreateProgress,
    CreateUndone,
    KernelLog,
    LogQuery,
    PluginListing,
    PluginState,
    PluginStatus,
    PluginVitals,
    Session,
    Support,
)
from agentd.state.schemas import Phase, SavedDevices, SavedRecord, StoppedPlugin

KNOWN_COMMANDS = ("sh", "sleep", "printf")


class FakeRuntime:
    """Kernels in memory. It knows `sleep`, `sh -c "exit N"` and `sh -c "printf TEXT; …"`."""

    name = "fake"
    minimum_memory_bytes = 1
    unready_reason = ""
    unlimited = ""
    members = CONTAINER_MEMBERS

    def __init__(self) -> None:
        self.kernels: dict[str, ObservedKernel] = {}
        self.output: dict[str, bytes] = {}
        self.plans: list[KernelPlan] = []
        self.fail_create: BaseException | None = None
        self.is_down = False
        self.gate: asyncio.Event | None = None
        self.pull_gate: asyncio.Event | None = None
        self.used: dict[str, UsageReading] = {}
        self._followers: list[asyncio.Queue[str]] = []
        self._count = 0

    async def close(self) -> None:
        self._followers.clear()

    async def support(self, spec: KernelSpec) -> Support:
        return Support(Features(self.name))

    async def start_exec(self, kernel: Kernel, spec: ExecSpec) -> Session:
        raise RuntimeUnavailable("the fake runs nothing inside its kernels")

    async def usages(self, kernels: Sequence[Kernel]) -> Mapping[str, UsageReading]:
        self._answer()
        return {k.kernel_id: self.used[k.kernel_id] for k in kernels if k.kernel_id in self.used}

    def _answer(self) -> None:
        if self.is_down:
            raise RuntimeUnavailable("the fake is down")

    async def validate_spec(self, spec: KernelSpec) -> Sequence[Problem]:
        return [] if spec.command else [Problem("command", "is empty")]

    async def create(self, plan: KernelPlan, progress: CreateProgress) -> ObservedKernel:
        self._answer()
        if self.pull_gate is not None:
            progress(KernelState.PULLING)
            await self.pull_gate.wait()
        progress(KernelState.CREATING)
        try:
            if self.gate is not None:
                await self.gate.wait()
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise CreateUndone from None
        if self.fail_create is not None:
            raise self.fail_create
        command = plan.spec.command
        if command[0] not in KNOWN_COMMANDS:
            raise CommandNotFound(f"command {command[0]!r}: not found")
        self._count += 1
        self.plans.append(plan)
        found = ObservedKernel(
            kernel_id=plan.spec.kernel_id,
            agent_id=plan.spec.agent_id,
            runtime=self.name,
            handle=str(self._count),
            state=ObservedState.RUNNING,
            record=plan.record,
            device_label=plan.device_label,
            started_at=1.0,
        )
        self.kernels[found.kernel_id] = found
        script = command[-1] if command[0] == "sh" else ""
        text = script.partition("printf '")[2].partition("'")[0]
        self.output[found.kernel_id] = text.encode().decode("unicode_escape").encode("latin-1")
        if "exit " in script:
            self.end(found.kernel_id, int(script.rpartition("exit ")[2]))
        return found

    def end(self, kernel_id: str, exit_code: int = 0) -> None:
        """The kernel ends by itself."""
        ending = Ending(exit_code, finished_at=2.0)
        self.put(replace(self.kernels[kernel_id], state=ObservedState.EXITED, ending=ending))

    def put(self, found: ObservedKernel) -> None:
        """Something happens to a kernel from outside."""
        self.kernels[found.kernel_id] = found
        self._notify(found.kernel_id)

    def vanish(self, kernel_id: str) -> None:
        """Somebody removes it."""
        del self.kernels[kernel_id]
        self._notify(kernel_id)

    def _notify(self, kernel_id: str) -> None:
        for follower in self._followers:
            follower.put_nowait(kernel_id)

    async def stop(self, ref: KernelRef, timeout_s: float | None) -> None:
        self._answer()
        found = self.kernels.get(ref.kernel_id)
        if found is not None and found.state is not ObservedState.EXITED:
            self.end(ref.kernel_id, 137 if timeout_s == 0 else 143)

    async def signal(self, ref: KernelRef, number: int) -> bool:
        self._answer()
        found = self.kernels.get(ref.kernel_id)
        if found is None or not found.is_alive:
            return False
        self.end(ref.kernel_id, 128 + number)
        return True

    async def remove(self, ref: KernelRef, *, unless_alive: bool = False) -> bool:
        self._answer()
        found = self.kernels.get(ref.kernel_id)
        if unless_alive and found is not None and found.is_alive:
            return False
        self.kernels.pop(ref.kernel_id, None)
        return True

    async def list_kernels(self) -> Listing:
        self._answer()
        return Listing(tuple(self.kernels.values()))

    async def find(self, ref: KernelRef) -> ObservedKernel | None:
        self._answer()
        return self.kernels.get(ref.kernel_id)

    async def watch_events(self) -> AsyncIterator[str]:
        self._answer()
        events: asyncio.Queue[str] = asyncio.Queue()
        self._followers.append(events)
        yield ""
        while True:
            yield await events.get()

    @asynccontextmanager
    async def logs(self, ref: KernelRef, query: LogQuery) -> AsyncIterator[KernelLog]:
        output = self.output[ref.kernel_id]
        lines = output.splitlines(keepends=True)
        position = min(query.from_position or 0, len(output))
        if query.tail is not None:
            position = len(b"".join(lines[: max(0, len(lines) - query.tail)]))

        async def chunks() -> AsyncGenerator[bytes]:
            yield output[position:]

        yield KernelLog(position, chunks())


class FakePlugins:
    """Plugins that offer fixed listings."""

    def __init__(self, *listings: PluginListing) -> None:
        self.ready = list(listings)
        self.failed: dict[str, str] = {}
        self.absent: dict[str, str] = {}
        self.pending: list[str] = []
        self.stopped: dict[str, str] = {}
        self.edits = ContainerEdits()
        self.failure: Exception | None = None
        self.told: list[tuple[str, str]] = []
        self.measured: dict[str, Sequence[Measurement]] = {}

    def vitals(self) -> dict[str, PluginVitals]:
        return {}

    def statuses(self) -> list[PluginStatus]:
        restored = {item.name: "stopped by ann" for item in self.ready if item.is_restored}
        stopped = restored | self.stopped
        return [
            *(
                PluginStatus(
                    item.name,
                    item.name,
                    PluginState.STOPPED if item.name in stopped else PluginState.READY,
                    stopped.get(item.name, ""),
                    is_serving=item.name not in stopped,
                )
                for item in self.ready
            ),
            *(PluginStatus(n, n, PluginState.FAILED, why) for n, why in self.failed.items()),
            *(PluginStatus(n, n, PluginState.ABSENT, why) for n, why in self.absent.items()),
            *(PluginStatus(name, name, PluginState.PENDING) for name in self.pending),
        ]

    def listings(self) -> list[PluginListing]:
        return self.ready

    def conditions(self) -> list[Condition]:
        return []

    async def stop(self, name: str, reason: str) -> PluginStatus:
        self.stopped[name] = reason
        return next(status for status in self.statuses() if status.name == name)

    async def start(self, name: str) -> PluginStatus:
        self.stopped.pop(name, None)
        return await self.retry(name)

    async def clear(self, name: str, stable_ids: Sequence[str]) -> None:
        status = next(status for status in self.statuses() if status.name == name)
        if status.state is not PluginState.READY:
            raise PluginUnavailable(f"plugin {name} is {status.text}")
        self.ready = [
            replace(
                listing,
                devices=tuple(
                    replace(d, health=Health.HEALTHY, reason="") if d.stable_id in stable_ids else d
                    for d in listing.devices
                ),
            )
            for listing in self.ready
        ]

    async def retry(self, name: str) -> PluginStatus:
        return next(status for status in self.statuses() if status.name == name)

    def measurements(self) -> dict[str, Sequence[Measurement]]:
        return self.measured

    async def changes(self) -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield ""

    def notify(self, step: str, kernel_id: str, allocation: object) -> None:
        self.told.append((step, kernel_id))

    async def container_edits(self, allocation: object, features: object) -> ContainerEdits:
        if self.failure is not None:
            raise self.failure
        return self.edits


class FakeHolders:
    """Processes and cgroups that end when a test says so."""

    def __init__(self) -> None:
        self.ended: dict[object, Callable[[], None]] = {}
        self.failure: OSError | None = None

    def find_process(
        self, pid: int, start_time: int | None, *, caller_pid: int, caller_uid: int | None
    ) -> ProcessHolder:
        return ProcessHolder(pid, start_time or 1)

    def find_cgroup(
        self, path: str, kernel_pids: Collection[int], containers: Collection[str]
    ) -> CgroupHolder:
        return CgroupHolder(path, 1)

    def is_alive(self, holder: ClaimHolder) -> bool:
        return holder in self.ended or not isinstance(holder, ProcessHolder)

    def watch(self, holder: ClaimHolder, ended: Callable[[], None]) -> Callable[[], None]:
        if self.failure is not None:
            raise self.failure
        self.ended[holder] = ended
        return lambda: self.ended.pop(holder, None)


class FakeMemory:
    """A state store in memory."""

    def __init__(self) -> None:
        self.devices: Sequence[Device] = ()
        self.dealings: Mapping[str, PluginAssignment] = {}
        self.stopped: Mapping[str, StoppedPlugin] = {}
        self.forgotten: frozenset[DeviceId] = frozenset()
        self.records: dict[str, SavedRecord] = {}
        self.runtimes: Sequence[str] = ()
        self.claims: dict[str, str] = {}
        self.ready_engines: Mapping[str, str] = {}
        self.is_read_only = False

    def load_claims(self) -> dict[str, str]:
        return dict(self.claims)

    def save_claim(self, claim_id: str, text: str, *, is_lasting: bool) -> None:
        self._require_writable()
        self.claims[claim_id] = text

    def drop_claim(self, claim_id: str) -> None:
        self._require_writable()
        self.claims.pop(claim_id, None)

    def _require_writable(self) -> None:
        if self.is_read_only:
            raise StateUnavailable("the folder is read-only")

    def probe_bundles(self, runtime: str) -> None:
        pass

    def load_devices(self) -> SavedDevices:
        return SavedDevices(
            self.devices,
            dealings=self.dealings,
            stopped=self.stopped,
            forgotten=[*self.forgotten],
        )

    def save_devices(self, saved: SavedDevices) -> None:
        self.devices, self.dealings, self.stopped = saved.devices, saved.dealings, saved.stopped
        self.forgotten = frozenset(saved.forgotten)

    def load_ready_engines(self) -> Mapping[str, str]:
        return self.ready_engines

    def save_ready_engines(self, ready: Mapping[str, str]) -> None:
        self._require_writable()
        self.ready_engines = ready

    def save_runtimes(self, names: Sequence[str]) -> None:
        self.runtimes = names

    def load_records(self) -> Sequence[SavedRecord]:
        return list(self.records.values())

    def save_intent(self, kernel_id: str, text: str) -> None:
        self.records[kernel_id] = SavedRecord(kernel_id, Phase.INTENT, text)

    def save_phase(self, kernel_id: str, phase: Phase, text: Callable[[], str]) -> None:
        before = self.records.get(kernel_id)
        known = before.text if before else text()
        self.records[kernel_id] = SavedRecord(kernel_id, phase, known)

    def save_record(self, kernel_id: str, text: str) -> None:
        self.records[kernel_id] = replace(self.records[kernel_id], text=text)

    def drop_record(self, kernel_id: str) -> None:
        self.records.pop(kernel_id, None)

    def retry(self) -> None:
        pass

    def conditions(self) -> Sequence[Condition]:
        return ()
