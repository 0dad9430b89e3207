import asyncio

import pytest
from msgspec.structs import replace

from agentd.client.errors import error_from_problem
from agentd.concurrency import Deadline
from agentd.core.kernel.states import Kernel, KernelRef, KernelState
from agentd.core.partition.rules import AgentRule, AllocationMode, SplitRules
from agentd.core.slots import ONE
from agentd.error_codes import Scope
from agentd.errors import (
    MAX_PROBLEMS,
    Draining,
    InsufficientResource,
    InvalidRequest,
    InvalidSlotAmount,
    KernelConflict,
    OutcomeUnknown,
    Problem,
    RequestError,
    RuntimeFailure,
    RuntimeUnavailable,
    UnknownAgent,
    UnsupportedResource,
)
from agentd.services.kernels.pending_creates import UNRESOLVED_GRACE_S
from agentd.state.schemas import Phase
from services.node import Rig, running, settled


async def test_create_begins_in_the_step_in_which_one_of_its_id_fails(rig: Rig) -> None:
    seconds: list[asyncio.Task[Kernel]] = []

    def begin_another(_: Kernel | None, now: Kernel | None) -> None:
        if now is None and not seconds:
            rig.runtime.fail_create, rig.runtime.gate = None, asyncio.Event()
            seconds.append(asyncio.create_task(rig.create()))

    rig.state.subscribe(begin_another)
    rig.runtime.fail_create = RuntimeFailure("full")
    with pytest.raises(RuntimeFailure):
        await rig.create()
    await settled(rig, "k1", "creating")
    assert "k1" in rig.creates
    rig.runtime.gate.set()
    assert (await seconds[0]).state is KernelState.RUNNING
    assert "k1" not in rig.creates


async def test_a_caller_that_goes_away_does_not_stop_the_create(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    caller = asyncio.create_task(rig.service.create(rig.spec(cuda_device=1)))
    await settled(rig, "k1", "creating")
    caller.cancel()
    rig.runtime.gate.set()
    await settled(rig, "k1", "running")
    assert rig.free_gpus == 1


async def test_delete_cancels_a_create_and_releases_its_share(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    caller = asyncio.create_task(rig.service.create(rig.spec(cuda_device=2)))
    await settled(rig, "k1", "creating")
    assert rig.free_gpus == 0
    with pytest.raises(KernelConflict):
        await rig.service.stop("k1")
    await rig.service.remove("k1")
    assert rig.free_gpus == 2
    assert rig.states == {}
    with pytest.raises(KernelConflict, match="deleted while it was being created"):
        await caller


async def test_an_explicit_time_overtakes_a_stop_under_way(rig: Rig) -> None:
    await rig.create()
    killed = asyncio.Event()

    async def stop(ref: KernelRef, timeout_s: float | None) -> None:
        if timeout_s == 0:
            killed.set()
        await killed.wait()
        rig.runtime.end(ref.kernel_id, 137)

    rig.runtime.stop = stop
    slow = asyncio.create_task(rig.service.stop("k1", 3600))
    await settled(rig, "k1", "stopping")
    await rig.service.remove("k1", 0)
    await asyncio.gather(slow, return_exceptions=True)
    assert rig.states == {}


async def test_a_dry_run_refuses_what_the_create_would(rig: Rig) -> None:
    empty = replace(rig.spec(), command=())
    labelled = replace(rig.spec(), labels={"io.agentd.node": "x"})
    for spec in (empty, labelled):
        with pytest.raises(InvalidRequest):
            await rig.service.dry_run_create(spec)
        with pytest.raises(InvalidRequest):
            await rig.service.create(spec, wait=False)
    assert rig.states == {}


async def test_the_same_request_joins_the_create_under_way(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    creates = [asyncio.create_task(rig.service.create(rig.spec(cuda_device=1))) for _ in range(3)]
    await settled(rig, "k1", "creating")
    with pytest.raises(KernelConflict):
        await rig.service.create(rig.spec(cuda_device=2))
    rig.runtime.gate.set()
    answers = await asyncio.gather(*creates)
    assert [is_new for _, is_new in answers] == [True, False, False]
    assert {kernel.handle for kernel, _ in answers} == {"1"}


@pytest.mark.parametrize(
    ("first", "again", "is_same"),
    [("a", "a", True), ("a", "", True), ("", "", True), ("a", "b", False), ("", "b", False)],
    ids=["repetition", "unmarked-repetition", "both-unmarked", "another", "first-unmarked"],
)
@pytest.mark.parametrize("restarts", [False, True], ids=["", "after-a-restart"])
async def test_create_of_a_known_id_depends_on_the_attempt(
    rig: Rig, first: str, again: str, is_same: bool, restarts: bool
) -> None:
    made, _ = await rig.service.create(replace(rig.spec(), attempt=first))
    if restarts:
        after = Rig(rig.memory)
        after.runtime.kernels = rig.runtime.kernels
        after.recall()
        await after.relist()
        rig = after
    spec = replace(rig.spec(), attempt=again)
    if is_same:
        assert await rig.service.create(spec) == (rig.state.kernel("k1"), False)
        assert rig.state.kernel("k1").handle == made.handle
        return
    for create in (rig.service.create(spec), rig.service.create(spec, wait=False)):
        with pytest.raises(KernelConflict, match="another attempt created it; use another id, or"):
            await create
    with pytest.raises(KernelConflict, match="another attempt"):
        rig.service.find_existing(spec)


async def test_attempts_of_an_id_compete_while_one_is_created(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    create = asyncio.create_task(rig.service.create(replace(rig.spec(), attempt="a")))
    await settled(rig, "k1", "creating")
    with pytest.raises(KernelConflict, match="another attempt"):
        await rig.service.create(replace(rig.spec(), attempt="b"))
    joined = asyncio.create_task(rig.service.create(replace(rig.spec(), attempt="a")))
    rig.runtime.gate.set()
    assert [is_new for _, is_new in await asyncio.gather(create, joined)] == [True, False]


async def test_signal_is_for_kernels_that_run(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    create = asyncio.create_task(rig.service.create(rig.spec()))
    await settled(rig, "k1", "creating")
    with pytest.raises(KernelConflict, match="k1 is creating, expected running"):
        await rig.service.signal("k1", 10)
    rig.runtime.gate.set()
    await create
    await rig.service.signal("k1", 10)
    with pytest.raises(KernelConflict, match="the first process of kernel k1 has ended"):
        await rig.service.signal("k1", 10)  # its end was not observed yet
    await rig.relist()
    assert rig.state.kernel("k1").ending.exit_code == 138
    with pytest.raises(KernelConflict, match="k1 is terminated"):
        await rig.service.signal("k1", 10)


async def test_signal_does_not_wait_for_a_stop(rig: Rig) -> None:
    await rig.create()
    stopping, ended = asyncio.Event(), asyncio.Event()

    async def stop(ref: KernelRef, timeout_s: float | None) -> None:
        stopping.set()
        await ended.wait()

    rig.runtime.stop = stop
    slow = asyncio.create_task(rig.service.stop("k1", 3600))
    await stopping.wait()
    await rig.service.signal("k1", 9)
    ended.set()
    assert (await slow).ending.exit_code == 137


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
async def test_refused_request_reaches_no_runtime(rig: Rig, change, error) -> None:
    spec = replace(
        rig.spec(agent=change.get("agent", "a")),
        slots=change.get("slots", {}),
        command=change.get("command", ("sleep", "1")),
    )
    with pytest.raises(error):
        await rig.service.create(spec)
    assert rig.states == {}
    assert rig.runtime.plans == []
    assert rig.memory.records == {}


@pytest.mark.parametrize(
    ("change", "failure", "scope"),
    [
        ({"command": ()}, None, Scope.NODE),
        ({}, InvalidRequest([Problem("groups", "not on this host")]), Scope.NODE),
        ({"command": ("nothing",), "image": None}, None, Scope.NODE),
        ({"command": ("nothing",), "image": "x"}, None, Scope.REQUEST),
        ({"command": (), "slots": {"cuda.device": "0.5"}}, None, Scope.REQUEST),
    ],
)
async def test_refusal_by_this_node_alone_says_so(rig: Rig, change, failure, scope) -> None:
    rig.runtime.fail_create = failure
    with pytest.raises(RequestError) as refused:
        await rig.service.create(replace(rig.spec(), **change))
    members = {"code": refused.value.code, "detail": "x", **refused.value.members()}
    assert (refused.value.scope, error_from_problem(members).scope) == (scope, scope)


async def test_stop_keeps_the_kernel_listed_and_frees_its_devices(rig: Rig) -> None:
    await rig.create(cuda_device=2)
    kernel = await rig.service.stop("k1", 0)
    assert (kernel.state, kernel.ending.exit_code) == (KernelState.TERMINATED, 137)
    assert rig.free_gpus == 2
    assert (await rig.service.stop("k1")) == kernel


async def test_failed_stop_leaves_the_kernel_unchanged(rig: Rig) -> None:
    await rig.create(cuda_device=2)
    rig.runtime.is_down = True
    for call in (rig.service.stop, rig.service.remove):
        with pytest.raises(RuntimeUnavailable):
            await call("k1")
        assert (rig.states, rig.free_gpus) == ({"k1": "running"}, 0)


async def test_two_removes_at_once_are_one_and_a_not_found(rig: Rig) -> None:
    await rig.create()
    answers = await asyncio.gather(
        rig.service.remove("k1"), rig.service.remove("k1"), return_exceptions=True
    )
    assert sorted(type(answer).__name__ for answer in answers) == ["NoneType", "UnknownKernel"]


async def test_draining_refuses_creates_and_waits_for_those_under_way(rig: Rig) -> None:
    rig.runtime.gate = asyncio.Event()
    caller = asyncio.create_task(rig.service.create(rig.spec()))
    await settled(rig, "k1", "creating")
    draining = asyncio.create_task(rig.creates.drain(Deadline.after(5)))
    await asyncio.sleep(0)
    with pytest.raises(Draining):
        await rig.create("k2")
    rig.runtime.gate.set()
    await draining
    assert (await caller)[0].state is KernelState.RUNNING


@pytest.mark.parametrize(
    "failure", [RuntimeError("Session is closed"), OSError(), asyncio.CancelledError()]
)
async def test_a_failure_without_proof_leaves_a_create_unresolved(rig: Rig, failure) -> None:
    rig.runtime.fail_create = failure
    with pytest.raises(OutcomeUnknown):
        await rig.create(cuda_device=1)
    assert (rig.free_gpus, rig.states) == (1, {"k1": "creating"})
    assert rig.memory.records["k1"].phase is Phase.INTENT
    rig.now += UNRESOLVED_GRACE_S
    await rig.relist()
    assert (rig.free_gpus, rig.states, rig.memory.records) == (2, {}, {})


async def test_a_failure_before_the_runtime_is_asked_leaves_nothing(rig: Rig) -> None:
    rig.runtime.pull_gate = asyncio.Event()
    caller = asyncio.create_task(rig.create(cuda_device=1))
    await settled(rig, "k1", "pulling")
    rig.creates._tasks["k1"].cancel()
    with pytest.raises(KernelConflict):
        await caller
    assert (rig.free_gpus, rig.states, rig.memory.records) == (2, {}, {})


async def test_repeated_unresolved_create_is_unavailable(rig: Rig) -> None:
    rig.runtime.fail_create = OutcomeUnknown("lost")
    spec = rig.spec(cuda_device=1)
    with pytest.raises(OutcomeUnknown) as lost:
        await rig.service.create(spec)
    with pytest.raises(OutcomeUnknown, match="is unresolved") as repeated:
        await rig.service.create(spec)
    assert [e.value.facts() for e in (lost, repeated)] == [{"kernel_id": "k1"}] * 2
    rig.now += UNRESOLVED_GRACE_S
    await rig.reconciler.relist(rig.runtime)
    assert rig.states == {}


async def test_create_deleted_before_its_start_is_gone(rig: Rig) -> None:
    """Nothing was asked of a runtime: its outcome is known."""
    creating = asyncio.create_task(rig.create(cuda_device=2))
    await asyncio.sleep(0)
    assert rig.states == {"k1": "preparing"}
    await rig.service.remove("k1")
    assert (rig.states, rig.free_gpus, rig.state.unresolved) == ({}, 2, {})
    with pytest.raises(KernelConflict):
        await creating
    async with rig.state.kernel_lock("k1"):
        creating = asyncio.create_task(rig.create(cuda_device=2))
        await settled(rig, "k1", "preparing")
        await asyncio.sleep(0)
        await rig.service.remove("k1")
    assert (rig.states, rig.free_gpus) == ({}, 2)
    with pytest.raises(KernelConflict):
        await creating


async def test_unenforced_share_is_reported() -> None:
    for is_enforced, asked, expected in (
        (False, 0.25, ("cuda.device",)),
        (False, 1, ()),
        (True, 0.25, ()),
    ):
        rig = Rig()
        (listing,) = rig.plugins.ready
        parts = replace(listing.slot_types[0], quantum=ONE // 100, is_enforced=is_enforced)
        rig.plugins.ready = [replace(listing, slot_types=(parts,))]
        rig.devices.discover()
        async with running(rig):
            kernel = await rig.create(cuda_device=asked)
            assert kernel.not_enforced == expected


async def test_agent_without_cores_reports_cpu_unenforced() -> None:
    agents = tuple(AgentRule(name) for name in ("a", "b", "c", "d", "e"))
    rig = Rig(rules=SplitRules(AllocationMode.AUTO_SPLIT, agents))
    async with running(rig):
        for agent, cores, missing in (("a", ("0",), ()), ("e", (), ("cpu",))):
            kernel = await rig.create(agent, agent, cpu=0)
            assert kernel.not_enforced == missing
            assert rig.runtime.plans[-1].cpus == cores


async def test_unknown_devices_are_listed_up_to_a_bound(rig: Rig) -> None:
    spec = replace(rig.spec(), devices={"cuda": ("nothing",) * 4096, "tpu": ("nothing",) * 4096})
    with pytest.raises(InvalidRequest) as refused:
        await rig.service.create(spec)
    assert len(refused.value.problems) == MAX_PROBLEMS
    assert str(refused.value).count("unknown device") <= MAX_PROBLEMS


@pytest.mark.parametrize(("length", "is_kept"), [(10_000, True), (11_000, False)])
async def test_long_command_is_kept_by_its_bytes(rig: Rig, length: int, is_kept: bool) -> None:
    kernel = await rig.create("k1", "a", "sleep", "\u20ac" * length)
    assert bool(kernel.command) is is_kept
