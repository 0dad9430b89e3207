"""Shares through MPS: what a client is given, and when there is no server for it."""

import os
import socket
import subprocess
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from msgspec.structs import replace

from agentd.core.allocation.ledger import Allocation, Share, SlotAmount
from agentd.core.devices import DeviceId
from agentd.core.kernel.edits import ContainerEdits, Mount
from agentd.core.slots import SlotKind, parse_base_units
from agentd.errors import PluginUnavailable
from agentd.plugin_api import Features
from agentd.pluginhost.host import PluginHost
from agentd.services.protocols import PluginState
from agentd_cuda import CudaPlugin
from agentd_cuda.mps import MpsServer, MpsShare
from plugins.test_cuda import HEALTHY, Node, devices, library, node, until

__all__ = ["library", "node"]

GIB = 1 << 30
ON = {"mode": "shares", "share-control": "mps"}


class Control:
    """A stand-in for nvidia-cuda-mps-control: a process, its pid file and its socket."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        self.process = subprocess.Popen(["sh", "-c", "sleep 1000 & wait # mps"])
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(str(folder / "control"))
        self.socket.listen()
        self.pid_file = folder / "nvidia-cuda-mps-control.pid"
        self.pid_file.write_text(f"{self.process.pid}\n")

    def stop(self) -> None:
        self.socket.close()
        self.process.kill()
        self.process.wait()


@pytest.fixture
def control(folder: Path) -> Iterator[Control]:
    made = Control(folder / "mps")
    yield made
    made.stop()


def mps(control: Control, **settings: object) -> dict[str, object]:
    return {**ON, "mps-pipe-directory": str(control.folder), **settings}


def given(**amounts: str) -> Allocation:
    return Allocation(
        tuple(
            Share(
                DeviceId("cuda", f"cuda{n}"),
                f"GPU-{gpu}",
                "cuda.shares",
                SlotKind.COUNT,
                parse_base_units(amount, SlotKind.COUNT),
            )
            for n, (gpu, amount) in enumerate(amounts.items())
        )
    )


async def edits(host: PluginHost, runtime: str = "docker", **amounts: str) -> ContainerEdits:
    return await host.container_edits(given(**amounts), Features(runtime, device_requests=True))


@pytest.mark.parametrize(
    ("amounts", "percentage", "limits"),
    [
        ({"aaaa": "0.5"}, "50", "0=40960M"),
        ({"aaaa": "1"}, "100", "0=81920M"),
        ({"aaaa": "0.01"}, "1", "0=819M"),
        ({"aaaa": "0.333333"}, "33.3333", "0=27306M"),
        ({"aaaa": "0.75", "bbbb": "0.75"}, "75", "0=61440M,1=61440M"),
        ({"aaaa": "1", "bbbb": "0.3"}, "30", "0=81920M,1=24576M"),
    ],
)
async def test_a_client_is_held_to_its_share(
    node: Node, control: Control, amounts: dict[str, str], percentage: str, limits: str
) -> None:
    host = await node.plugin(**mps(control))
    found = await edits(host, **amounts)
    assert found.env["CUDA_MPS_PIPE_DIRECTORY"] == str(control.folder)
    assert found.env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage
    assert found.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == limits
    assert found.env["CUDA_VISIBLE_DEVICES"] == ",".join(f"GPU-{gpu}" for gpu in amounts)
    pipes = str(control.folder)
    assert found.mounts == (
        Mount(pipes, pipes, read_only=False),
        Mount("/dev/shm", "/dev/shm", read_only=False),
    )
    assert found.device_requests[0].device_ids == tuple(f"GPU-{gpu}" for gpu in amounts)


async def test_memory_slot_decides_the_memory_limit_of_mps(node: Node, control: Control) -> None:
    host = await node.plugin(**mps(control, **{"memory-slot": True}))
    (share,) = given(aaaa="0.25").shares
    memory = SlotAmount("cuda.mem", SlotKind.BYTES, 20 * GIB)
    held = Allocation((replace(share, secondary=(memory,)),))
    env = (await host.container_edits(held, Features("docker", device_requests=True))).env
    assert env["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
    assert env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "0=20480M"


async def test_a_share_through_mps_is_still_not_enforced(node: Node, control: Control) -> None:
    host = await node.plugin(**mps(control))
    assert not host.listings()[0].slot_types[0].is_enforced


async def test_kernels_without_a_share_get_nothing_of_mps(node: Node, control: Control) -> None:
    host = await node.plugin(**mps(control))
    found = await edits(host)
    assert not [name for name in found.env if "MPS" in name]
    assert not found.mounts


async def test_mps_server_with_own_shared_memory_needs_containers(
    node: Node, control: Control, tmp_path: Path
) -> None:
    (tmp_path / "shm").mkdir()
    host = await node.plugin(**mps(control, **{"mps-shm-directory": str(tmp_path / "shm")}))
    found = await edits(host, aaaa="0.5")
    assert found.mounts[1] == Mount(str(tmp_path / "shm"), "/dev/shm", read_only=False)
    with pytest.raises(PluginUnavailable, match="plain processes use /dev/shm"):
        await edits(host, "process", aaaa="0.5")


def test_impossible_mps_setup_does_not_open(control: Control, tmp_path: Path) -> None:
    plugin = CudaPlugin("cuda", mps(control, **{"mps-shm-directory": str(tmp_path)}))
    with pytest.raises(RuntimeError, match="plain processes use /dev/shm"):
        plugin.container_edits([], Features("process"))
    assert plugin.container_edits([], Features("docker")).env


@pytest.mark.needs("root")
def test_mps_server_of_another_user_is_refused(control: Control) -> None:
    os.chown(control.folder, 61001, 61001)
    server = MpsServer(str(control.folder), "/dev/shm")
    assert "belongs to user 61001" in server.unavailable_reason()


def refused(host: PluginHost) -> str:
    status = host.statuses()[0]
    assert status.state is PluginState.PENDING
    return status.reason


async def test_plugin_explains_how_to_start_a_missing_mps_server(
    node: Node, control: Control
) -> None:
    control.stop()
    reason = refused(await node.plugin(**mps(control)))
    assert "no MPS control daemon is running" in reason
    assert f"CUDA_MPS_PIPE_DIRECTORY={control.folder} nvidia-cuda-mps-control -d" in reason


@pytest.mark.parametrize("text", ["", "what", "0x1", "99999999999999999999", "1", "0", "-1"])
def test_pid_file_of_a_dead_process_is_ignored(control: Control, text: str) -> None:
    server = MpsServer(str(control.folder), "/dev/shm")
    control.pid_file.write_text(text)
    assert server.unavailable_reason() == "", "its socket answers"
    control.socket.close()
    assert "no MPS control daemon is running" in server.unavailable_reason()


def test_without_a_setting_the_daemon_s_own_variable_says_where(monkeypatch, tmp_path) -> None:
    on = {"share-control": "mps"}
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert MpsServer.of(on) == MpsServer("/tmp/nvidia-mps", "/dev/shm")
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert MpsServer.of(on) == MpsServer(str(tmp_path), "/dev/shm")
    assert MpsServer.of({**on, "mps-pipe-directory": "/p"}) == MpsServer("/p", "/dev/shm")
    assert MpsServer.of({}) is None


@pytest.mark.parametrize(
    ("field", "why"),
    [
        ("cc=61", "cuda0: compute capability 6.1 is below"),
        ("mode=2", "cuda0: compute mode"),
    ],
)
async def test_a_gpu_that_cannot_be_shared_so_is_named(
    node: Node, control: Control, field: str, why: str
) -> None:
    node.say(HEALTHY.replace("uuid=GPU-aaaa", f"uuid=GPU-aaaa {field}"))
    assert why in refused(await node.plugin(**mps(control)))


async def test_ended_mps_server_makes_gpus_unhealthy(node: Node, control: Control) -> None:
    host = await node.plugin(**mps(control))
    control.stop()
    found = await until(host, lambda found: found[0].health == "unhealthy")
    assert "no MPS control daemon is running" in found[0].reason
    again = Control(control.folder.with_name("again"))
    try:
        control.pid_file.write_text(f"{again.process.pid}\n")
        await until(host, lambda found: found[0].health == "healthy")
    finally:
        again.stop()
    assert len(devices(host)) == 2


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"share-control": "mps"}, "share-control"),
        ({"share-control": "mps", "mode": "device"}, "share-control"),
        ({"share-control": "time-slicing", "mode": "shares"}, "share-control"),
        ({"share-control": True, "mode": "shares"}, "share-control"),
        ({"mode": "shares", "mps-pipe-directory": "/tmp/mps"}, "mps-pipe-directory"),
        ({**ON, "mps-shm-directory": "shm"}, "mps-shm-directory"),
        ({**ON, "mps-pipe-directory": 7}, "mps-pipe-directory"),
    ],
)
def test_wrong_settings_of_mps_are_named(settings: dict[str, object], key: str) -> None:
    assert key in [problem.key for problem in CudaPlugin.validate(settings)]
    assert CudaPlugin.validate(ON) == []


def test_memory_that_is_not_known_is_not_limited() -> None:
    parts = [MpsShare(Decimal("0.5"), 0), MpsShare(Decimal(1), GIB)]
    found = MpsServer("/p", "/dev/shm").edits(parts)
    assert found.env["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] == "1=1024M"
