"""The devices that a node serves beside others."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

import pytest
from msgspec.structs import replace

from agentd.core.allocation.ledger import Allocation, Share
from agentd.core.claim.claim import Claim, NameHolder
from agentd.errors import InsufficientResource
from agentd.services.peers import SharedDevices
from agentd.services.protocols import Peer, PluginListing, Served, ServedDevice
from core.machines import GIB, gpus
from services.node import CUDA, Rig


class FakePeers:
    """Peers under control of a test."""

    def __init__(self) -> None:
        self.there: list[Peer] = []
        self.before: Served | None = None
        self.told: list[Served] = []
        self.may_decide = True

    @contextlib.contextmanager
    def deciding(self, patience_s: float) -> Iterator[bool]:
        yield self.may_decide

    def own(self) -> Served | None:
        return self.before

    def others(self) -> Sequence[Peer]:
        return self.there

    def publish(self, served: Served) -> None:
        self.told.append(served)

    def warnings(self) -> Sequence[str]:
        return ()

    def serve(self, *keys: str, is_alive: bool = True, held: bool = False, **more) -> None:
        devices = tuple(ServedDevice(f"cuda/{key}", (key,), held) for key in keys)
        self.there = [Peer("other", "root", 17, is_alive, Served(devices, **more))]

    @property
    def served(self) -> list[str]:
        return [device.name for device in self.told[-1].devices]

    @property
    def held(self) -> list[str]:
        return [device.name for device in self.told[-1].devices if device.held]


class Node(Rig):
    """A node of fakes beside others; it has two GPUs, `GPU-0` and `GPU-1`."""

    def __init__(
        self,
        before: Served | None = None,
        *,
        may_decide: bool = True,
        is_simulated: bool = False,
    ) -> None:
        devices = tuple(replace(gpu, is_simulated=is_simulated) for gpu in gpus(1, 1))
        super().__init__(listings=[PluginListing("cuda", (CUDA,), devices)])
        self.peers = FakePeers()
        self.peers.may_decide = may_decide
        self.peers.before = before
        self.serving = SharedDevices(self.devices, self.state, self.peers, "0123", 8 * GIB)
        self.keys = [d.stable_id for d in self.devices.inventory.by_name["cuda"]]
        self.recall()
        self.serving.update()

    @classmethod
    async def listed(cls, *, is_simulated: bool = False) -> "Node":
        node = cls(is_simulated=is_simulated)
        await node.relist()
        return node

    @property
    def withheld(self) -> list[str]:
        return [d.device_id.id for d in self.devices.inventory.devices if d.withheld]


async def test_devices_without_peer_are_served_and_published() -> None:
    node = Node()
    assert node.peers.served == ["cuda/cuda0", "cuda/cuda1"]
    assert (node.free_gpus, node.withheld, node.peers.held) == (2, [], [])
    assert node.peers.told[-1].cores == tuple("0123")


async def test_device_of_a_peer_is_withheld_until_free() -> None:
    node = Node()
    node.peers.serve(node.keys[0])
    node.serving.update()
    assert (node.free_gpus, node.withheld) == (1, ["cuda0"])
    assert node.peers.served == ["cuda/cuda1"]
    assert "cuda0 is withheld: served by agentd other (root, pid 17)" in node.devices.warnings
    assert node.devices.inventory.listed, "its place is kept"
    node.peers.there = []
    node.serving.update()
    assert (node.free_gpus, node.withheld) == (2, [])


async def test_a_refusal_says_who_serves_the_device() -> None:
    node = await Node.listed()
    node.peers.serve(*node.keys)
    node.serving.update()
    with pytest.raises(InsufficientResource) as refused:
        await node.create(cuda_device=1)
    assert "served by agentd other" in str(vars(refused.value))


async def test_a_kernel_keeps_what_another_came_to_serve() -> None:
    node = await Node.listed()
    kernel = await node.create(cuda_device=1)
    held = next(iter(kernel.allocation.shares)).device_id
    node.peers.serve(node.devices.inventory.by_id[held].stable_id)
    node.serving.update()
    assert node.withheld == [held.id]
    assert node.state.ledger.holders(held).keys() == {"k1"}
    assert node.free_gpus == 1


@pytest.mark.parametrize(("held", "withheld"), [(True, ["cuda0"]), (False, [])])
async def test_only_held_devices_of_a_dead_peer_are_withheld(
    held: bool, withheld: list[str]
) -> None:
    node = Node()
    node.peers.serve(node.keys[0], is_alive=False, held=held)
    node.serving.update()
    assert node.withheld == withheld
    assert any("which is not running" in warning for warning in node.devices.warnings) is held


async def test_device_is_published_as_held_for_a_kernels_life() -> None:
    node = await Node.listed()
    seen = []
    create = node.runtime.create

    async def watched(plan, progress):
        seen.append(node.peers.held)
        return await create(plan, progress)

    node.runtime.create = watched
    await node.create(cuda_device=1, cpu=1)
    assert seen == [["cuda/cuda0"]]
    await node.service.remove("k1")
    assert node.peers.held == []


async def test_kernels_without_accelerators_publish_nothing() -> None:
    node = await Node.listed()
    told = len(node.peers.told)
    await node.create(cpu=1)
    assert len(node.peers.told) == told


@pytest.mark.parametrize("is_simulated", [False, True])
async def test_claimed_device_is_published_unless_simulated(is_simulated: bool) -> None:
    node = await Node.listed(is_simulated=is_simulated)
    device, _ = node.devices.inventory.by_name["cuda"]
    told = len(node.peers.told)
    share = Share(device.device_id, device.stable_id, device.slot, device.kind, device.capacity)
    claim = Claim("c1", "a", NameHolder("c1"), "", 0.0, "", allocation=Allocation((share,)))
    node.state.put_claim(claim)
    node.state.put_claim(replace(claim, labels={"a": "b"}))
    assert len(node.peers.told) == told + (not is_simulated)
    assert node.peers.held == ([] if is_simulated else ["cuda/cuda0"])
    node.state.drop_claim("c1")
    assert node.peers.held == []


async def test_devices_stay_published_until_runtimes_are_listed() -> None:
    before = await Node.listed()
    await before.create(cuda_device=1)
    node = Node(before=before.peers.told[-1])
    assert node.peers.held == ["cuda/cuda0"]
    node.state.note_available("fake")
    node.serving.update()
    assert node.peers.held == []


async def test_at_the_end_only_what_is_held_stays_told() -> None:
    node = await Node.listed()
    await node.create(cuda_device=1)
    node.serving.close()
    assert (node.peers.served, node.peers.told[-1].cores) == (["cuda/cuda0"], ())
    node.serving.update()
    assert node.peers.served == ["cuda/cuda0"]


async def test_while_another_decides_nothing_new_is_served() -> None:
    node = Node()
    node.peers.may_decide = False
    node.serving.update()
    assert node.withheld == [], "what is served already stays so"
    late = Node(may_decide=False)
    assert late.withheld == ["cuda0", "cuda1"]


async def test_simulated_devices_never_meet() -> None:
    node = Node()
    inventory = node.devices.inventory
    for device in inventory.by_name["cuda"]:
        inventory = inventory.with_device(replace(device, is_simulated=True))
    node.devices._take(inventory)
    node.peers.serve(*node.keys)
    node.serving.update()
    assert (node.withheld, node.peers.served) == ([], [])


async def test_parts_of_one_gpu_are_served_by_one_daemon() -> None:
    node = Node()
    inventory = node.devices.inventory
    for device in inventory.by_name["cuda"]:
        inventory = inventory.with_device(replace(device, parent="GPU-whole"))
    node.devices._take(inventory)
    node.peers.serve("GPU-whole")
    node.serving.update()
    assert node.withheld == ["cuda0", "cuda1"]


async def test_cores_and_memory_served_twice_are_a_warning_alone() -> None:
    node = await Node.listed()
    node.peers.serve(cores=("2", "3", "4"), memory=GIB)
    node.serving.update()
    twice = [warning for warning in node.devices.warnings if "other (root, pid 17)" in warning]
    assert twice[0] == "2 cores (cores 2 to 3) are also served by agentd other (root, pid 17)"
    assert twice[1].startswith("memory is also served by agentd other (root, pid 17)")
    assert (await node.create(cpu=4)).state == "running"


async def test_what_another_came_to_serve_stays_told_as_held() -> None:
    node = await Node.listed()
    kernel = await node.create(cuda_device=1)
    held = next(iter(kernel.allocation.shares)).device_id
    node.peers.serve(node.devices.inventory.by_id[held].stable_id)
    node.serving.update()
    assert node.peers.held == [str(held)]
    node.serving.close()
    assert node.peers.served == [str(held)]


async def test_held_device_stays_published_before_it_is_listed() -> None:
    late = ServedDevice("cuda/cuda9", ("GPU-late",), held=True)
    node = Node(before=Served((late,)))
    assert node.peers.held == ["cuda/cuda9"]
    node.state.note_available("fake")
    node.serving.update()
    assert "cuda/cuda9" not in node.peers.served


async def test_a_look_beside_a_change_does_not_undo_it() -> None:
    node = await Node.listed()
    looking = asyncio.create_task(node.serving.look())
    await asyncio.sleep(0)
    await node.create(cuda_device=1)
    await looking
    assert node.peers.held == ["cuda/cuda0"]
