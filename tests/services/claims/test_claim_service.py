import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from contextlib import suppress

import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from agentd.core.access import Caller, Role
from agentd.core.allocation.ledger import Allocation, ClaimRef
from agentd.core.claim.claim import (
    MAX_CLAIMS,
    CgroupHolder,
    ClaimHolder,
    ClaimSpec,
    EditsTarget,
    EndReason,
    NameHolder,
    ProcessHolder,
    TimeHolder,
)
from agentd.core.claim.record import decode
from agentd.core.kernel.record import RecordError, read_members, seal
from agentd.core.kernel.states import Kernel, KernelSpec, KernelState
from agentd.core.slots import ONE, SlotKind, SlotType
from agentd.errors import (
    ClaimConflict,
    InsufficientResource,
    InvalidRequest,
    OutcomeUnknown,
    PluginUnavailable,
    RuntimeFailure,
    StateUnavailable,
    TooManyClaims,
    UnknownClaim,
)
from agentd.events import EventKind
from agentd.rpc.rendering import claim_view
from agentd.services.protocols import PluginListing
from core.machines import gpus
from services.node import CUDA, Rig, settled
from support.damage import odd_records
from support.waiting import until

ADMIN = Caller("admin", Role.ADMIN)
PROCESS = ProcessHolder(17, 1)


def spec(
    claim_id: str = "c1", holder: ClaimHolder | None = None, gpus: int = 1, **more
) -> ClaimSpec:
    holder = holder or NameHolder(claim_id)
    agent = more.pop("agent", "a")
    slots = {"cuda.device": gpus} if gpus else {"cpu": 1}
    identity = f"{agent} {holder} {gpus} {more}"
    return ClaimSpec(claim_id, agent, holder, identity, slots=slots, **more)


def kernel(kernel_id: str = "k1", claim_id: str = "c1", *, keeps: bool = False, **slots):
    amounts = {name.replace("_", "."): amount for name, amount in slots.items()}
    words = ("sleep", "1000")
    identity = f"{claim_id} {keeps} {amounts}"
    return KernelSpec(
        kernel_id, "a", words, identity, slots=amounts, claim_id=claim_id, keeps_claim=keeps
    )


def reasons(rig: Rig) -> list[EndReason]:
    kept = rig.events._past
    return [event.value.reason for event in kept if event.kind is EventKind.CLAIM_REMOVED]


def held(rig: Rig, claim_id: str = "c1") -> int:
    holding = rig.state.ledger.holdings.get(ClaimRef(claim_id))
    return sum(s.amount for s in holding.allocation.shares) // ONE if holding else 0


@contextlib.asynccontextmanager
async def ticking(rig: Rig) -> AsyncIterator[None]:
    """With the loop that ends claims."""
    task = asyncio.create_task(rig.claim_ends.run())
    try:
        yield
    finally:
        task.cancel()


async def test_a_claim_holds_from_its_create_to_its_release(rig: Rig) -> None:
    status, is_new = await rig.claims.create(spec(gpus=2))
    assert is_new
    assert (rig.free_gpus, [*rig.memory.claims]) == (0, ["c1"])
    again, is_new = await rig.claims.create(spec(gpus=2))
    assert (again, is_new) == (status, False)
    rig.claims.release("c1", ADMIN)
    assert (rig.free_gpus, rig.memory.claims) == (2, {})
    assert reasons(rig) == [EndReason.RELEASED]
    with pytest.raises(UnknownClaim):
        rig.claims.release("c1", ADMIN)


@pytest.mark.parametrize("failure", ["plugin", "store", "gone"])
async def test_a_failed_claim_holds_nothing(rig: Rig, failure: str) -> None:
    if failure == "plugin":
        rig.plugins.failure = PluginUnavailable("hung")
    elif failure == "store":
        rig.memory.is_read_only = True
    else:
        rig.plugins.failure = asyncio.CancelledError()
    with pytest.raises((PluginUnavailable, StateUnavailable, asyncio.CancelledError)):
        await rig.claims.create(spec())
    assert (rig.free_gpus, rig.memory.claims, rig.claims.recorded_claims()) == (2, {}, [])
    assert [event.kind for event in rig.events._past][-1] is EventKind.FREE


async def test_a_claim_that_is_not_recorded_yet_cannot_be_seen(rig: Rig) -> None:
    asked, answered = asyncio.Event(), asyncio.Event()

    async def edits(allocation, features):
        asked.set()
        await answered.wait()
        return rig.plugins.edits

    rig.plugins.container_edits = edits
    creating = asyncio.create_task(rig.claims.create(spec()))
    await asked.wait()
    assert rig.free_gpus == 1
    assert rig.claims.recorded_claims() == []
    for act in (
        lambda: rig.claims.get("c1"),
        lambda: rig.claims.release("c1", ADMIN),
        lambda: rig.claims.renew("c1", 5, ADMIN),
    ):
        with pytest.raises(UnknownClaim):
            act()
    with pytest.raises(UnknownClaim):
        await rig.service.create(kernel())
    second = asyncio.create_task(rig.claims.create(spec()))
    answered.set()
    assert (await creating)[1]
    assert not (await second)[1]


async def test_other_requests_of_one_id_conflict(rig: Rig) -> None:
    await rig.claims.create(spec())
    for other in (spec(gpus=2), spec(agent="b"), spec(holder=TimeHolder(5))):
        with pytest.raises(ClaimConflict):
            await rig.claims.create(other)
    with pytest.raises(InvalidRequest):
        await rig.claims.create(ClaimSpec("c2", "a", NameHolder("x"), "h"))
    with pytest.raises(InsufficientResource):
        await rig.claims.create(spec("c2", gpus=3))


async def test_agents_share_the_claims_of_a_node_equally(rig: Rig) -> None:
    made = (await rig.claims.create(spec()))[0].claim
    for number in range(MAX_CLAIMS // 2 - 1):
        rig.state._claims[f"more{number}"] = replace(made, claim_id=f"more{number}")
    reason = f"agent a has {MAX_CLAIMS // 2} claims, the maximum is {MAX_CLAIMS // 2}"
    with pytest.raises(TooManyClaims, match=reason):
        await rig.claims.create(spec("c2"))
    assert (await rig.claims.create(spec("c2", agent="b")))[1]


async def test_node_has_only_so_many_claims(rig: Rig) -> None:
    made = (await rig.claims.create(spec()))[0].claim
    for number in range(MAX_CLAIMS - 1):  # of agents that it had before
        old = replace(made, claim_id=f"more{number}", agent_id="old")
        rig.state._claims[old.claim_id] = old
    with pytest.raises(TooManyClaims, match=f"this node has {MAX_CLAIMS} claims"):
        await rig.claims.create(spec("c2", agent="b"))
    for claim in list(rig.state.claims.values()):
        rig.state._claims[claim.claim_id] = replace(claim, agent_id="b")
    with pytest.raises(TooManyClaims, match=f"agent b has {MAX_CLAIMS} claims"):
        await rig.claims.create(spec("c2", agent="b"))


async def test_pid_holders_leave_half_of_the_descriptors(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    made = (await rig.claims.create(spec(holder=PROCESS)))[0].claim
    for number in range(255):
        rig.state._claims[f"more{number}"] = replace(made, claim_id=f"more{number}")
    reason = "agent a has 256 claims that end with a process, the maximum is 256"
    with pytest.raises(TooManyClaims, match=reason):
        await rig.claims.create(spec("c2", holder=PROCESS))
    assert (await rig.claims.create(spec("c2", gpus=0)))[1]


@pytest.mark.parametrize(("owner", "asked", "lives"), [
    (None, None, False), (1000, None, True), (1000, False, False), (None, True, True),
])  # fmt: skip
async def test_claim_with_an_owner_is_kept_by_default(
    rig: Rig, owner: int | None, asked: bool | None, lives: bool
) -> None:
    await rig.claims.create(spec(owner_uid=owner))
    await rig.service.create(replace(kernel(), keeps_claim=asked))
    assert ("c1" in rig.state.claims) is lives
    assert rig.state.kernel("k1").keeps_claim is lives


async def test_a_record_that_stays_keeps_the_devices(rig: Rig) -> None:
    await rig.claims.create(spec(holder=PROCESS))
    rig.memory.is_read_only = True
    with pytest.raises(StateUnavailable):
        rig.claims.release("c1", ADMIN)
    rig.holders.ended[PROCESS]()
    assert rig.free_gpus == 1
    with pytest.raises(UnknownClaim):
        await rig.service.create(kernel())
    rig.memory.is_read_only = False
    async with ticking(rig), asyncio.timeout(5):
        while rig.free_gpus == 1:
            await asyncio.sleep(0)
    assert reasons(rig) == [EndReason.PROCESS]


async def test_a_failed_end_is_logged_once_however_often_it_is_tried(rig: Rig) -> None:
    await rig.claims.create(spec(holder=PROCESS))
    rig.memory.is_read_only = True
    with capture_logs() as logged:
        rig.holders.ended[PROCESS]()
        for _ in range(3):
            async with ticking(rig):
                await asyncio.sleep(0)
    assert [line["event"] for line in logged] == ["claim.end_failed"]
    assert held(rig) == 1


async def test_time_ends_a_claim_unless_it_is_renewed(rig: Rig) -> None:
    status, _ = await rig.claims.create(spec(holder=TimeHolder(60)))
    assert status.expires_at == rig.now + 60
    rig.now += 50
    assert rig.claims.renew("c1", None, ADMIN).expires_at == rig.now + 60
    rig.now += 50
    async with ticking(rig):
        await asyncio.sleep(0)
        assert rig.free_gpus == 1
        assert rig.claims.renew("c1", 1, ADMIN).claim.holder == TimeHolder(1)
        rig.now += 1
        await until(lambda: rig.free_gpus != 1, within_s=5)
    assert reasons(rig) == [EndReason.TIME]


async def test_a_renewal_that_is_not_recorded_changes_nothing(rig: Rig) -> None:
    await rig.claims.create(spec(holder=TimeHolder(60)))
    rig.memory.is_read_only = True
    rig.now += 10
    with pytest.raises(StateUnavailable):
        rig.claims.renew("c1", 600, ADMIN)
    assert rig.claims.get("c1").expires_at == rig.now + 50


@pytest.mark.parametrize("holder", [PROCESS, NameHolder("x")], ids=str)
async def test_only_a_time_limit_is_renewed(rig: Rig, holder: ClaimHolder) -> None:
    await rig.claims.create(spec(holder=holder))
    with pytest.raises(ClaimConflict):
        rig.claims.renew("c1", 5, ADMIN)


async def test_a_kernel_takes_a_claim_over(rig: Rig) -> None:
    await rig.claims.create(spec(gpus=2))
    rig.runtime.gate = asyncio.Event()
    creating = asyncio.create_task(rig.service.create(kernel(cuda_device=1)))
    await settled(rig, "k1", "creating")
    assert (held(rig), rig.free_gpus) == (1, 0)
    assert rig.claims.get("c1").is_used
    for refused in (kernel("k2"), kernel("k2", keeps=True)):
        with pytest.raises(ClaimConflict):
            await rig.service.create(refused)
    with pytest.raises(ClaimConflict):
        rig.claims.release("c1", ADMIN)
    rig.runtime.gate.set()
    await creating
    assert (held(rig), rig.free_gpus, rig.memory.claims) == (0, 1, {})
    assert reasons(rig) == [EndReason.USED]
    await rig.service.remove("k1")
    assert rig.free_gpus == 2


async def test_holder_that_ends_during_a_create_waits_for_its_outcome(rig: Rig) -> None:
    for fails in (True, False):
        await rig.claims.create(spec(gpus=2, holder=PROCESS))
        rig.runtime.gate = asyncio.Event()
        rig.runtime.fail_create = RuntimeFailure("full") if fails else None
        creating = asyncio.create_task(rig.service.create(kernel()))
        await settled(rig, "k1", "creating")
        rig.holders.ended[PROCESS]()
        assert (rig.free_gpus, [*rig.memory.claims]) == (0, ["c1"])
        rig.runtime.gate.set()
        await asyncio.wait([creating])
        assert rig.memory.claims == {}
        assert rig.free_gpus == (2 if fails else 0)
    assert reasons(rig) == [EndReason.PROCESS, EndReason.USED]


async def test_a_create_of_unknown_outcome_keeps_its_claim(rig: Rig) -> None:
    await rig.claims.create(spec(gpus=2, holder=PROCESS))
    rig.runtime.fail_create = OutcomeUnknown("lost")
    with pytest.raises(OutcomeUnknown):
        await rig.service.create(kernel(cuda_device=1))
    rig.holders.ended[PROCESS]()
    assert (rig.free_gpus, [*rig.memory.claims]) == (0, ["c1"])
    rig.now += 3600
    await rig.relist()
    assert (rig.free_gpus, rig.memory.claims, rig.states) == (2, {}, {})


async def test_a_kept_claim_takes_its_devices_back(rig: Rig) -> None:
    await rig.claims.create(spec(gpus=2))
    await rig.service.create(kernel("k1", keeps=True, cuda_device=1))
    await rig.service.create(kernel("k2", keeps=True))
    assert (held(rig), rig.free_gpus) == (0, 0)
    with pytest.raises(ClaimConflict):
        await rig.service.create(kernel("k3"))
    with pytest.raises(InsufficientResource):
        await rig.service.create(kernel("k3", keeps=True, cuda_device=1))
    with pytest.raises(ClaimConflict):
        rig.claims.release("c1", ADMIN)
    await rig.service.remove("k1")
    assert (held(rig), rig.free_gpus) == (1, 0)
    rig.runtime.end("k2")
    await rig.relist()
    assert (held(rig), rig.claims.get("c1").is_used) == (2, False)
    rig.claims.release("c1", ADMIN)
    assert rig.free_gpus == 2


async def test_create_from_a_used_up_claim_is_refused(rig: Rig) -> None:
    await rig.claims.create(spec(gpus=2))
    await rig.service.create(kernel(keeps=True))
    with pytest.raises(InsufficientResource, match=r"left of claim c1 \(its kernels: k1\)"):
        await rig.service.create(kernel("k2", keeps=True))
    assert "k2" not in rig.state.kernels
    beside, _ = await rig.service.create(kernel("k3", keeps=True, cpu=1))
    assert beside.slots["cpu"] == "1", "it names slots of its own"


async def test_the_rest_of_a_kept_claim_is_taken_as_it_is() -> None:
    """It need not be equal parts of its devices."""
    shares = SlotType("cuda.shares", SlotKind.COUNT, ONE // 100)
    devices = tuple(replace(device, slot="cuda.shares") for device in gpus(1, 1))
    rig = Rig(listings=[PluginListing("cuda", (shares,), devices)])
    await rig.relist()
    await rig.claims.create(replace(spec(), slots={"cuda.shares": "1.2"}))
    await rig.service.create(kernel("k1", keeps=True, cuda_shares="0.2"))
    rest, _ = await rig.service.create(kernel("k2", keeps=True))
    amounts = sorted(s.amount for s in rest.allocation.shares_by_device_name("cuda"))
    assert amounts == [4 * ONE // 10, 6 * ONE // 10]


async def test_the_holder_of_a_kept_claim_ends_once_no_kernel_lives(rig: Rig) -> None:
    await rig.claims.create(spec(gpus=2, holder=PROCESS))
    await rig.service.create(kernel(keeps=True, cuda_device=1))
    rig.holders.ended[PROCESS]()
    assert (rig.free_gpus, [*rig.memory.claims]) == (0, ["c1"])
    await rig.service.remove("k1")
    assert (rig.free_gpus, rig.memory.claims) == (2, {})


async def test_a_renewal_tells_others_nothing(rig: Rig) -> None:
    await rig.claims.create(spec(holder=TimeHolder(60)))
    rig.claims.renew("c1", 90, ADMIN)
    kept = [event for event in rig.events._past if event.kind is EventKind.CLAIM]
    assert [event.changes_shares for event in kept] == [True, False]


async def test_a_restart_gives_each_its_whole_time_again(rig: Rig) -> None:
    await rig.claims.create(spec(holder=TimeHolder(60)))
    rig.now += 50
    again = Rig(rig.memory)
    again.now = 5.0
    again.recall()
    assert again.claims.get("c1").expires_at == 65.0


async def test_a_reboot_ends_what_does_not_survive_it(rig: Rig) -> None:
    await rig.claims.create(spec("c1", holder=PROCESS))
    await rig.claims.create(spec("c2", holder=NameHolder("x", survives_reboot=True)))
    again = Rig(rig.memory)
    again.claims._boot_id = "boot-2"
    again.recall()
    assert ([*rig.memory.claims], again.free_gpus) == (["c2"], 1)
    assert reasons(again) == [EndReason.REBOOT]


async def test_another_boot_id_ends_no_claim_of_a_live_process(rig: Rig) -> None:
    await rig.claims.create(spec("c1", holder=PROCESS))
    again = Rig(rig.memory)
    again.holders.ended = rig.holders.ended
    again.claims._boot_id = "boot-2"
    again.recall()
    assert ([*rig.memory.claims], again.free_gpus) == (["c1"], 1)
    again.holders.ended[PROCESS]()
    assert ([*rig.memory.claims], again.free_gpus) == ([], 2)
    assert reasons(again) == [EndReason.PROCESS]


async def test_an_unreadable_record_withholds_every_device(rig: Rig) -> None:
    rig.memory.claims["c1"] = "{"
    rig.recall()
    assert rig.free_gpus == 0
    with pytest.raises(ClaimConflict, match="its record cannot be read"):
        await rig.claims.edits_of(["c1"], EditsTarget.PROCESS, ADMIN)
    with pytest.raises(ClaimConflict, match="its record cannot be read"):
        await rig.service.create(kernel())
    rig.claims.release("c1", ADMIN)
    assert (rig.free_gpus, rig.memory.claims) == (2, {})


async def test_an_unreadable_claim_withholds_devices_that_come_late() -> None:
    """As after a damaged list of devices, while their plugin has not answered yet."""
    rig = Rig(listings=[])
    rig.memory.claims["c1"] = "{"
    rig.recall()
    rig.plugins.ready = [PluginListing("cuda", (CUDA,), tuple(gpus(1, 1)))]
    rig.devices.refresh("cuda")
    assert rig.free_gpus == 0
    rig.claims.release("c1", ADMIN)
    assert rig.free_gpus == 2


async def test_no_value_in_a_record_breaks_a_start_or_a_list() -> None:
    before = Rig()
    await before.claims.create(spec(labels={"a": "b"}, owner_uid=5))
    texts = [*before.memory.claims.values()]
    for holder in (TimeHolder(5), PROCESS, CgroupHolder("/a", 1)):
        content = {**read_members(texts[0]), "holder": msgspec.to_builtins(holder)}
        texts.append(seal(content))
    for text in (text for whole in texts for text in odd_records(whole)):
        with suppress(RecordError):
            decode("c1", text)
            rig = Rig()
            rig.memory.claims["c1"] = text
            rig.recall()
            for claim in rig.claims.recorded_claims():
                view = claim_view(rig.claims.status(claim), rig.devices.inventory)
                assert msgspec.json.encode(view)
                assert rig.free_gpus == 1 or "X" in text


async def test_an_observed_claim_starts_nothing_on_what_others_hold(rig: Rig) -> None:
    await rig.create("k1", cuda_device=2)
    await rig.claims.create(spec(is_observed=True))
    with pytest.raises(InsufficientResource, match="others hold device cuda/cuda0"):
        await rig.service.create(kernel("k2"))
    with pytest.raises(InsufficientResource):
        await rig.service.dry_run_create(kernel("k2"))
    assert (rig.states, held(rig)) == ({"k1": "running"}, 1)
    allowed, _ = await rig.service.create(replace(kernel("k2", keeps=True), overcommits=True))
    assert allowed.state is KernelState.RUNNING
    await rig.service.remove("k2")
    await rig.service.remove("k1")
    again, _ = await rig.service.create(kernel("k3"))
    assert again.state is KernelState.RUNNING


async def test_observed_claim_starts_nothing_on_a_renamed_slot(rig: Rig) -> None:
    """A device whose holder has another slot of it is held whole, whatever the sum of its slots."""
    await rig.claims.create(spec(is_observed=True))
    (share,) = rig.state.claim("c1").allocation.shares
    old = Allocation((replace(share, slot="cuda.shares", secondary=()),))
    made = Kernel("old", "b", KernelState.RUNNING, "h", 1.0, "fake", allocation=old)
    rig.state.put_kernel(made)
    with pytest.raises(InsufficientResource):
        await rig.service.create(kernel())


async def test_a_holder_that_cannot_be_observed_now_is_tried_again(rig: Rig) -> None:
    rig.holders.failure = OSError(24, "Too many open files")
    with capture_logs() as logged:
        await rig.claims.create(spec(holder=PROCESS))
        async with ticking(rig):
            await asyncio.sleep(0)
    assert [line["event"] for line in logged] == ["claim.watch_failed", "claim.created"]
    rig.holders.failure = None
    async with ticking(rig), asyncio.timeout(5):
        while PROCESS not in rig.holders.ended:
            await asyncio.sleep(0)
    rig.holders.ended[PROCESS]()
    assert rig.free_gpus == 2


async def test_an_observed_claim_is_charged_beside_others(rig: Rig) -> None:
    await rig.create(cuda_device=2)
    await rig.claims.create(spec(is_observed=True))
    (collision,) = [e.value for e in rig.events._past if e.kind is EventKind.COLLISION]
    assert collision.holders == ("k1", ClaimRef("c1"))
    await rig.service.remove("k1")
    assert rig.free_gpus == 1


async def test_id_is_taken_while_a_kernel_of_an_earlier_claim_lives(rig: Rig) -> None:
    """Else the kernel would count as a user of the new claim, and end it when it changes."""
    await rig.claims.create(spec())
    await rig.service.create(kernel())
    with pytest.raises(ClaimConflict, match="until kernel k1 has ended"):
        await rig.claims.create(spec(holder=PROCESS))
    await rig.service.stop("k1")
    await rig.claims.create(spec(holder=PROCESS))
    assert (held(rig), rig.free_gpus) == (1, 1)


async def test_ended_kernel_never_ends_a_later_claim_of_its_id(rig: Rig) -> None:
    await rig.claims.create(spec())
    await rig.service.create(kernel())
    await rig.service.stop("k1")
    await rig.claims.create(spec(gpus=2))
    rig.state.put_kernel(replace(rig.state.kernel("k1"), state=KernelState.RUNNING))
    assert [*rig.memory.claims] == ["c1"]
    rig.state.put_kernel(replace(rig.state.kernel("k1"), state=KernelState.TERMINATED))
    again = Rig(rig.memory)
    again.recall()
    await again.relist()
    assert (held(again), [*rig.memory.claims]) == (2, ["c1"])
    await again.service.remove("k1")
    assert (held(again), [*rig.memory.claims]) == (2, ["c1"])


async def test_id_is_free_after_a_failed_create_or_a_kept_kernel(rig: Rig) -> None:
    await rig.claims.create(spec())
    await rig.service.create(kernel(keeps=True))
    await rig.service.stop("k1")
    rig.claims.release("c1", ADMIN)
    await rig.claims.create(spec(holder=PROCESS))
    assert held(rig) == 1
