import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from agentd.core.devices import DeviceId, Health
from agentd.core.kernel import Kernel, KernelSpec, KernelState
from agentd.core.policy import Policy
from agentd.core.ports import PortRange
from agentd.core.reconcile import FoundState
from agentd.core.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.slots import ONE, SlotKind, SlotType
from agentd.errors import (
    CommandNotFound,
    Draining,
    InsufficientResource,
    InvalidRequest,
    InvalidSlotAmount,
    KernelConflict,
    NotReady,
    OutcomeUnknown,
    PluginUnavailable,
    RuntimeFailure,
    RuntimeUnavailable,
    UnknownAgent,
    UnknownKernel,
    UnsupportedResource,
)
from agentd.services.adoption import Adoption
from agentd.services.devices import NodeDevices
from agentd.services.interfaces import Clock, PluginListing
from agentd.services.kernels import GRACE_S, KernelService
from agentd.services.monitor import Monitor
from agentd.services.planner import NodeRules, Planner
from core.machines import CPU, GIB, MEM, cores, gpus, memory
from fakes import FakeMemory, FakePlugins, FakeRuntime

CUDA = SlotType("cuda.device", SlotKind.COUNT, ONE)


class Rig:
    """A node of fakes with two GPUs and two agents, shared; the clock stands still."""

    def __init__(self, memory_of_node: FakeMemory | None = None) -> None:
        self.runtime = FakeRuntime()
        self.plugins = FakePlugins(PluginListing("cuda", (CUDA,), tuple(gpus(1, 1))))
        self.memory = memory_of_node or FakeMemory()
        self.now = 1000.0
        rules = SplitRules(AllocationMode.SHARED, (AgentRule("a"), AgentRule("b")))
        host = [*cores(4), memory(8 * GIB)]
        self.devices = NodeDevices(self.plugins, self.memory, rules, (CPU, MEM), host)
        self.devices.discover()
        slots, real = {"cpu": 1, "mem": "256m"}, frozenset("0123")
        node = NodeRules("n", Policy(), slots, real, PortRange(), lambda *_: True)
        self.service = KernelService(
            self.devices,
            Planner(self.devices, self.plugins, node),
            {"fake": self.runtime},
            "fake",
            self.memory,
            Clock(lambda: self.now, lambda: self.now),
        )
        self.adoption = Adoption(self.service)
        self.adoption.listening.add("fake")

    def spec(self, kernel_id: str = "k1", agent: str = "a", *command: str, **slots) -> KernelSpec:
        amounts = {name.replace("_", "."): amount for name, amount in slots.items()}
        words = command or ("sleep", "1000")
        return KernelSpec(kernel_id, agent, words, f"{agent}{words}{amounts}", slots=amounts)

    async def create(self, *args, **slots) -> Kernel:
        kernel, _ = await self.service.create(self.spec(*args, **slots))
        return kernel

    @property
    def free_gpus(self) -> int:
        partition = self.service.partition("a")
        devices = self.devices.inventory.by_name["cuda"]
        return sum(self.service.table.ledger.free(d, partition) for d in devices) // ONE

    @property
    def states(self) -> dict[str, str]:
        return {kernel.kernel_id: kernel.state.value for kernel in self.service.table}


@pytest.fixture
async def rig() -> Rig:
    made = Rig()
    await made.adoption.relist(made.runtime)
    return made


@pytest.fixture
async def watched(rig: Rig) -> AsyncIterator[Rig]:
    """The same, with the monitor running."""
    monitor = asyncio.create_task(Monitor(rig.service, rig.adoption, rig.plugins).run())
    while not rig.runtime._followers:
        await asyncio.sleep(0)
    yield rig
    monitor.cancel()


async def settled(rig: Rig, kernel_id: str, state: str) -> None:
    async with asyncio.timeout(5):
        while rig.states.get(kernel_id) != state:
            await asyncio.sleep(0)


async def test_a_kernel_holds_its_devices_until_it_is_removed(rig: Rig) -> None:
    kernel = await rig.create(cuda_device=1)
    assert kernel.state is KernelState.RUNNING
    assert rig.free_gpus == 1
    await rig.service.remove("k1")
    assert rig.free_gpus == 2
    assert rig.states == {}
    with pytest.raises(UnknownKernel):
        await rig.service.remove("k1")


@pytest.mark.parametrize(
    "failure",
    [RuntimeFailure("no space left"), CommandNotFound("x"), RuntimeUnavailable("down"), OSError()],
)
async def test_a_failed_create_gives_the_devices_back(rig: Rig, failure) -> None:
    rig.runtime.fail_create = failure
    with pytest.raises(type(failure)):
        await rig.create(cuda_device=2)
    assert rig.free_gpus == 2
    assert rig.states == {}
    assert rig.memory.intents == {}


async def test_a_plugin_that_does_not_answer_gives_the_devices_back(rig: Rig) -> None:
    rig.plugins.failure = PluginUnavailable("hung")
    with pytest.raises(PluginUnavailable):
        await rig.create(cuda_device=2)
    assert rig.free_gpus == 2


async def test_a_caller_that_goes_away_does_not_stop_the_create(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    caller = asyncio.create_task(rig.service.create(rig.spec(cuda_device=1)))
    while rig.states.get("k1") != "creating":
        await asyncio.sleep(0)
    caller.cancel()
    rig.runtime.gate.set()
    await settled(rig, "k1", "running")
    assert rig.free_gpus == 1


async def test_deleting_what_is_being_created_cancels_it_and_gives_back(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    caller = asyncio.create_task(rig.service.create(rig.spec(cuda_device=2)))
    while rig.states.get("k1") != "creating":
        await asyncio.sleep(0)
    assert rig.free_gpus == 0
    with pytest.raises(KernelConflict):
        await rig.service.stop("k1")
    await rig.service.remove("k1")
    assert rig.free_gpus == 2
    assert rig.states == {}
    with pytest.raises(KernelConflict, match="deleted while it was being created"):
        await caller


async def test_deleting_twice_does_not_interrupt_the_clean_up(rig: Rig) -> None:
    cleaned = asyncio.Event()

    async def create(plan, progress):
        progress(KernelState.CREATING)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            cleaned.set()

    rig.runtime.create = create
    caller = asyncio.create_task(rig.service.create(rig.spec(cuda_device=2)))
    while rig.states.get("k1") != "creating":
        await asyncio.sleep(0)
    removes = [asyncio.create_task(rig.service.remove("k1")) for _ in range(3)]
    await asyncio.sleep(0)
    late = asyncio.create_task(rig.service.remove("k1"))
    await asyncio.gather(*removes, late, return_exceptions=True)
    assert cleaned.is_set()
    assert rig.free_gpus == 2
    with pytest.raises(KernelConflict):
        await caller


async def test_what_cannot_be_removed_yet_is_held_and_tried_again(rig: Rig) -> None:
    await rig.create(cuda_device=2)
    cut_short = replace(rig.runtime.kernels["k1"], state=FoundState.CREATED)
    after = Rig()
    after.runtime.kernels["k1"] = cut_short
    discard = after.runtime.discard

    async def failing(*_: object) -> bool:
        raise RuntimeFailure("500")

    after.runtime.discard = failing
    await after.adoption.relist(after.runtime)
    assert (after.states, after.free_gpus) == ({"k1": "creating"}, 0)
    assert after.service.not_listed == {}
    after.runtime.discard = discard
    await after.adoption.retry()
    assert (after.states, after.free_gpus) == ({}, 2)


async def test_what_was_to_be_removed_and_runs_after_all_is_adopted(watched: Rig) -> None:
    await watched.create(cuda_device=1)
    running = watched.runtime.kernels["k1"]
    after = Rig()
    after.runtime.kernels["k1"] = running
    stale = replace(running, state=FoundState.CREATED)
    lists = iter([[stale], [running]])

    async def listing():
        return next(lists)

    after.runtime.list = listing
    await after.adoption.relist(after.runtime)
    assert "k1" in after.runtime.kernels
    await after.adoption.observe(await after.service.operations.to_look_at())
    assert after.states == {"k1": "running"}


async def test_nothing_is_created_while_the_runtime_is_unavailable(rig: Rig) -> None:
    rig.runtime.is_down = True
    with pytest.raises(RuntimeUnavailable):
        await rig.adoption.relist(rig.runtime)
    rig.runtime.is_down = False
    with pytest.raises(RuntimeUnavailable):
        await rig.create()
    await rig.adoption.retry()
    assert (await rig.create()).state is KernelState.RUNNING


async def test_a_name_that_is_gone_from_the_list_is_no_proof(rig: Rig) -> None:
    await rig.create(cuda_device=1)

    async def without() -> list:
        return []

    rig.runtime.list = without
    await rig.adoption.relist(rig.runtime)
    assert rig.states == {"k1": "running"}


async def test_an_explicit_time_overtakes_a_stop_under_way(rig: Rig) -> None:
    await rig.create()
    killed = asyncio.Event()

    async def stop(kernel_id: str, handle: str, timeout_s: float | None) -> None:
        if timeout_s == 0:
            killed.set()
        await killed.wait()
        rig.runtime.end(kernel_id, 137)

    rig.runtime.stop = stop
    slow = asyncio.create_task(rig.service.stop("k1", 3600))
    while rig.states["k1"] != "stopping":
        await asyncio.sleep(0)
    await rig.service.remove("k1", 0)
    await asyncio.gather(slow, return_exceptions=True)
    assert rig.states == {}


async def test_a_dry_run_refuses_what_the_create_would(rig: Rig) -> None:
    empty = replace(rig.spec(), command=())
    labelled = replace(rig.spec(), labels={"io.agentd.node": "x"})
    for spec in (empty, labelled):
        with pytest.raises(InvalidRequest):
            await rig.service.decide(spec)
        with pytest.raises(InvalidRequest):
            await rig.service.create(spec, wait=False)
    assert rig.states == {}


async def test_an_unknown_outcome_stays_held_until_absence_is_proved(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("the answer was lost")
    with pytest.raises(OutcomeUnknown):
        await rig.create(cuda_device=2)
    assert rig.free_gpus == 0
    await rig.adoption.relist(rig.runtime)
    assert rig.free_gpus == 0
    rig.now += GRACE_S
    rig.runtime.is_down = True
    with pytest.raises(RuntimeUnavailable):
        await rig.adoption.relist(rig.runtime)
    assert rig.free_gpus == 0
    rig.runtime.is_down = False
    await rig.adoption.relist(rig.runtime)
    assert rig.free_gpus == 2
    assert rig.states == {}
    assert rig.memory.intents == {}


async def test_a_create_that_comes_true_late_is_adopted(rig: Rig) -> None:
    await rig.create(cuda_device=1)
    late = replace(rig.runtime.kernels["k1"], kernel_id="k2", handle="77")
    record = rig.runtime.plans[0].record.replace('"kernel_id":"k1"', '"kernel_id":"k2"')
    rig.runtime.fail_create = OutcomeUnknown("lost")
    with pytest.raises(OutcomeUnknown):
        await rig.create("k2", cuda_device=1)
    rig.runtime.kernels["k2"] = replace(late, record=record)
    await rig.adoption.relist(rig.runtime)
    assert rig.states["k2"] == "running"
    assert rig.service.unknown_until == {}


async def test_an_intent_of_the_last_daemon_is_held_until_it_is_settled(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("killed here")
    with pytest.raises(OutcomeUnknown):
        await rig.create(cuda_device=2)
    after = Rig(rig.memory)
    after.adoption.recall_intents()
    assert (after.states, after.free_gpus) == ({"k1": "creating"}, 0)
    await after.adoption.relist(after.runtime)
    assert after.free_gpus == 0
    after.now += GRACE_S
    await after.adoption.relist(after.runtime)
    assert (after.states, after.free_gpus) == ({}, 2)


async def test_nothing_is_created_before_the_first_complete_list() -> None:
    rig = Rig()
    with pytest.raises(NotReady):
        await rig.create()
    rig.runtime.is_down = True
    with pytest.raises(RuntimeUnavailable):
        await rig.adoption.relist(rig.runtime)
    assert rig.adoption.first_try["fake"].is_set()
    with pytest.raises(RuntimeUnavailable, match="the fake is down"):
        await rig.create()
    rig.runtime.is_down = False
    await rig.adoption.relist(rig.runtime)
    assert (await rig.create()).state is KernelState.RUNNING


async def test_the_same_request_joins_the_create_under_way(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    creates = [asyncio.create_task(rig.service.create(rig.spec(cuda_device=1))) for _ in range(3)]
    while rig.states.get("k1") != "creating":
        await asyncio.sleep(0)
    with pytest.raises(KernelConflict):
        await rig.service.create(rig.spec(cuda_device=2))
    rig.runtime.gate.set()
    answers = await asyncio.gather(*creates)
    assert [is_new for _, is_new in answers] == [True, False, False]
    assert {kernel.handle for kernel, _ in answers} == {"1"}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"agent": "nobody"}, UnknownAgent),
        ({"slots": {"tpu.chip": 1}}, UnsupportedResource),
        ({"slots": {"cuda.device": "0.5"}}, InvalidSlotAmount),
        ({"slots": {"mem": 0}}, InvalidSlotAmount),
        ({"slots": {"cuda.device": 3}}, InsufficientResource),
        ({"command": ()}, InvalidRequest),
    ],
)
async def test_a_refused_request_reaches_nobody(rig: Rig, change, error) -> None:
    spec = replace(
        rig.spec(agent=change.get("agent", "a")),
        slots=change.get("slots", {}),
        command=change.get("command", ("sleep", "1")),
    )
    with pytest.raises(error):
        await rig.service.create(spec)
    assert rig.states == {}
    assert rig.runtime.plans == []
    assert rig.memory.intents == {}


async def test_a_failed_plugin_is_named_in_the_refusal_and_a_late_one_can_be_retried(rig) -> None:
    rig.plugins.failed = {"tpu": "no driver"}
    rig.plugins.pending = ["npu"]
    with pytest.raises(UnsupportedResource, match="plugin tpu failed: no driver"):
        await rig.create(tpu_chip=1)
    with pytest.raises(PluginUnavailable):
        await rig.create(npu_device=1)


async def test_stop_keeps_the_kernel_listed_and_frees_its_devices(rig: Rig) -> None:
    await rig.create(cuda_device=2)
    kernel = await rig.service.stop("k1", 0)
    assert (kernel.state, kernel.ending.exit_code) == (KernelState.TERMINATED, 137)
    assert rig.free_gpus == 2
    assert (await rig.service.stop("k1")) == kernel


async def test_a_stop_that_the_runtime_cannot_do_leaves_the_kernel_as_it_was(rig: Rig) -> None:
    await rig.create(cuda_device=2)
    rig.runtime.is_down = True
    for call in (rig.service.stop, rig.service.remove):
        with pytest.raises(RuntimeUnavailable):
            await call("k1")
        assert rig.states == {"k1": "running"}
        assert rig.free_gpus == 0


async def test_two_removes_at_once_are_one_and_a_not_found(rig: Rig) -> None:
    await rig.create()
    answers = await asyncio.gather(
        rig.service.remove("k1"), rig.service.remove("k1"), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["NoneType", "UnknownKernel"]


async def test_draining_refuses_creates_and_waits_for_those_under_way(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    caller = asyncio.create_task(rig.service.create(rig.spec()))
    while rig.states.get("k1") != "creating":
        await asyncio.sleep(0)
    draining = asyncio.create_task(rig.service.drain(5))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await rig.create("k2")
    rig.runtime.gate.set()
    await draining
    assert (await caller)[0].state is KernelState.RUNNING


async def test_an_end_seen_by_an_event_frees_the_devices(watched: Rig) -> None:
    await watched.create(cuda_device=2)
    watched.runtime.end("k1", 4)
    await settled(watched, "k1", "terminated")
    assert watched.service.table.get("k1").ending.exit_code == 4
    assert watched.free_gpus == 2


async def test_an_end_during_the_create_is_not_missed(watched: Rig) -> None:
    await watched.create("k1", "a", "sh", "-c", "exit 3")
    await settled(watched, "k1", "terminated")
    assert watched.service.table.get("k1").ending.exit_code == 3


async def test_a_kernel_that_somebody_removes_is_lost_and_its_devices_come_back(watched) -> None:
    await watched.create(cuda_device=2)
    watched.runtime.vanish("k1")
    await settled(watched, "k1", "lost")
    assert watched.free_gpus == 2
    await watched.service.remove("k1")
    assert watched.states == {}


async def test_a_kernel_started_again_by_hand_is_charged_even_beyond_what_there_is(watched) -> None:
    await watched.create("k1", cuda_device=2)
    await watched.service.stop("k1", 0)
    await watched.create("k2", cuda_device=2)
    watched.runtime.put(replace(watched.runtime.kernels["k1"], state=FoundState.RUNNING))
    await settled(watched, "k1", "running")
    device = watched.devices.inventory.by_name["cuda"][0]
    assert watched.service.table.ledger.used(device.device_id) == 2 * ONE
    assert watched.free_gpus == 0


async def test_a_runtime_that_comes_back_is_listed_again(watched: Rig) -> None:
    await watched.create(cuda_device=1)
    watched.runtime.is_down = True
    with pytest.raises(RuntimeUnavailable):
        await watched.adoption.relist(watched.runtime)
    assert watched.adoption.statuses["fake"].state == "unavailable"
    assert watched.states == {"k1": "running"}
    assert watched.free_gpus == 1
    watched.runtime.is_down = False
    await watched.adoption.relist(watched.runtime)
    assert watched.adoption.statuses["fake"].state == "available"


async def test_an_unhealthy_device_leaves_capacity_not_the_known_slots(rig: Rig) -> None:
    sick = replace(gpus(1, 1)[0], health=Health.UNHEALTHY, reason="Xid 79")
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (sick, gpus(1, 1)[1]))]
    rig.devices.discover()
    assert rig.free_gpus == 1
    assert "cuda.device" in rig.devices.inventory.slot_types


async def test_a_late_plugin_joins_without_moving_anything(rig: Rig) -> None:
    await rig.create(cuda_device=1)
    npu = SlotType("npu.device", SlotKind.COUNT, ONE)
    devices = tuple(replace(d, aliases=()) for d in gpus(1, slot="npu.device"))
    rig.plugins.ready.append(PluginListing("npu", (npu,), devices))
    before = rig.devices.generation
    rig.devices.refresh("npu")
    assert rig.devices.generation > before
    assert rig.free_gpus == 1
    await rig.create("k2", npu_device=1)


async def test_a_late_plugin_takes_nothing_from_the_one_that_serves(rig: Rig) -> None:
    """Also where it comes first in the order of plugins; the next start decides anew."""
    await rig.create(cuda_device=2)
    npu = SlotType("npu.device", SlotKind.COUNT, ONE)
    same = [replace(d, device_id=DeviceId("npu", d.device_id.id)) for d in gpus(1, 1)]
    new = replace(same[0], device_id=DeviceId("npu", "npu9"), stable_id="N", aliases=())
    rig.plugins.ready.insert(0, PluginListing("npu", (npu,), (*same, new)))
    rig.devices.refresh("npu")
    assert [d.stable_id for d in rig.devices.inventory.by_name["npu"]] == ["N"]
    assert len(rig.devices.inventory.by_name["cuda"]) == 2
    assert rig.free_gpus == 0
    assert sum("withheld" in warning for warning in rig.devices.warnings) == 2
    rig.devices.refresh("npu")
    assert not any("appeared" in warning for warning in rig.devices.warnings)
    again = Rig(rig.memory)
    again.plugins.ready = rig.plugins.ready
    again.devices.discover()
    again.runtime = rig.runtime
    again.service.runtimes = {"fake": rig.runtime}
    await again.adoption.relist(rig.runtime)
    served = again.devices.inventory.by_name["npu"]
    assert [d.stable_id for d in served] == ["GPU-cuda-0", "GPU-cuda-1", "N"]
    ledger = again.service.table.ledger
    assert all(ledger.holders(device.device_id) for device in served[:2])
    with pytest.raises(InsufficientResource):
        await again.create("k2", npu_device=2)


async def test_a_neighbour_that_keeps_failing_changes_nothing(rig: Rig) -> None:
    rig.plugins.failed["bad"] = "it was killed"
    extra = replace(gpus(1)[0], device_id=DeviceId("cuda", "cuda9"), stable_id="X", aliases=())
    ready = rig.plugins.ready[0]
    rig.plugins.ready[0] = replace(ready, devices=(*ready.devices, extra))
    before = rig.devices.generation
    for _ in range(3):
        rig.devices.refresh("bad")
    assert (rig.devices.generation, len(rig.devices.inventory.by_name["cuda"])) == (before, 2)


async def test_whole_gpus_that_are_parts_now_hold_back_their_parts(rig: Rig) -> None:
    kernel = await rig.create(cuda_device=1)
    held = kernel.allocation.devices_of("cuda")[0].device_id.id
    mig = SlotType("cuda.device:1g-mig", SlotKind.UNIQUE, ONE)
    first, second = gpus(1, 1)
    taken = next(d for d in (first, second) if d.device_id.id == held)
    parts = tuple(
        replace(
            taken, device_id=DeviceId("cuda", f"{held}:{n}"), stable_id=f"MIG-{n}", slot=mig.name,
            kind=SlotKind.UNIQUE, parent=taken.stable_id, aliases=(),
        )
        for n in range(2)
    )  # fmt: skip
    again = Rig(rig.memory)
    again.plugins.ready = [PluginListing("cuda", (CUDA, mig), parts)]
    again.devices.discover()
    again.service.runtimes = {"fake": rig.runtime}
    await again.adoption.relist(rig.runtime)
    spec = replace(rig.spec("k2"), slots={"cuda.device:1g-mig": 1}, spec_hash="other")
    with pytest.raises(InsufficientResource):
        await again.service.create(spec)


async def test_what_a_plugin_says_later_changes_devices_and_the_generation_only_then(rig) -> None:
    await rig.create(cuda_device=1)
    first, second = gpus(1, 1)
    before = rig.devices.generation
    rig.devices.refresh("cuda")
    assert rig.devices.generation == before
    sick = replace(second, health=Health.UNHEALTHY, reason="Xid 79")
    third = replace(second, device_id=DeviceId("cuda", "cuda7"), stable_id="GPU-new")
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (first, sick, third))]
    rig.devices.refresh("cuda")
    assert (rig.devices.generation, rig.free_gpus) == (before + 1, 0)
    assert any("GPU-new) appeared" in warning for warning in rig.devices.warnings)
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), (first, second))]
    rig.devices.refresh("cuda")
    assert rig.free_gpus == 1
    assert not any("appeared" in warning for warning in rig.devices.warnings)


async def test_plugins_hear_of_each_step_of_a_kernel_once(rig: Rig) -> None:
    await rig.create(cuda_device=1)
    await rig.service.stop("k1")
    await rig.service.remove("k1")
    assert rig.plugins.told == [
        ("before-create", "k1"),
        ("after-start", "k1"),
        ("before-stop", "k1"),
        ("after-stop", "k1"),
    ]


async def test_64_creates_at_once_share_out_every_device_once(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    creates = [
        asyncio.create_task(rig.create(f"k{n}", "ab"[n % 2], cuda_device=1, cpu=0, mem=1))
        for n in range(64)
    ]
    await asyncio.sleep(0)
    rig.runtime.gate.set()
    answers = await asyncio.gather(*creates, return_exceptions=True)
    assert sum(isinstance(answer, Kernel) for answer in answers) == 2
    assert sum(isinstance(answer, InsufficientResource) for answer in answers) == 62


async def test_a_retry_of_what_is_not_known_yet_is_told_so(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("lost")
    spec = rig.spec(cuda_device=1)
    with pytest.raises(OutcomeUnknown):
        await rig.service.create(spec)
    with pytest.raises(RuntimeUnavailable, match="not known yet"):
        await rig.service.create(spec)
    rig.now += GRACE_S
    await rig.adoption.relist(rig.runtime)
    assert rig.states == {}


async def test_who_did_not_wait_sees_what_became_of_a_lost_create(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("lost")
    await rig.service.create(rig.spec(cuda_device=1), wait=False)
    await settled(rig, "k1", "creating")
    while "k1" not in rig.service.unknown_until:
        await asyncio.sleep(0)
    rig.now += GRACE_S
    await rig.adoption.relist(rig.runtime)
    assert rig.states == {"k1": "failed"}
    assert rig.free_gpus == 2


async def test_a_runtime_that_nobody_follows_is_not_made_available_by_a_list(rig: Rig) -> None:
    rig.adoption.listening.clear()
    rig.adoption.unavailable("fake", "its events ended")
    await rig.adoption.retry()
    assert rig.adoption.statuses["fake"].state == "unavailable"
    rig.adoption.listening.add("fake")
    await rig.adoption.retry()
    assert rig.adoption.statuses["fake"].state == "available"
