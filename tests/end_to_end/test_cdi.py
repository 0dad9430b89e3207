"""GPUs by the Container Device Interface: the real `pynvml`, a real Engine 26, device files."""

import json
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from agentd.core.kernel.edits import ContainerEdits, DeviceRequest
from agentd.errors import RuntimeFailure
from agentd.runtimes.docker.docker_facts import parse_docker_facts
from end_to_end.containers import printed
from native.libraries import nvml_library
from support.daemon import AGENTS, Daemon
from support.engine import Engine
from support.engine_proxy import EngineProxy

pytestmark = pytest.mark.docker
GPUS = """driver 570.124.06
init 0
gpu uuid=GPU-{node}-a pci={domain:08X}:3B:00.0 mem=85899345920 used=0 util=0 temp=40 power=70000 \
lost=0 mig=0 recovery=0 events=8 name=NVIDIA H100 80GB HBM3
gpu uuid=GPU-{node}-b pci={domain:08X}:5E:00.0 mem=85899345920 used=0 util=0 temp=40 power=70000 \
lost=0 mig=0 recovery=0 events=8 name=NVIDIA H100 80GB HBM3
"""


class Node:
    """agentd with two GPUs of NVML, an engine with their specification, a proxy between them."""

    def __init__(self, daemon: Daemon, proxy: EngineProxy, engine: Engine) -> None:
        self.daemon, self.proxy, self.engine = daemon, proxy, engine
        self.environ: dict[str, str] = {}

    def gpu(self, which: str) -> str:
        """The UUID of a GPU, which no other test's daemon serves."""
        return f"GPU-{self.daemon.folder.name}-{which}"

    async def start(self, table: str) -> None:
        await self.daemon.start(AGENTS + table, **self.environ)

    def specify(self, *uuids: str) -> None:
        """Say what the engine is to do for these GPUs, as `nvidia-ctk cdi generate` does."""
        for number in range(2):
            file = self.engine.folder / f"nvidia{number}"
            if not file.exists():
                os.mknod(file, 0o666 | 0o020000, os.makedev(1, 3 + 2 * number))
        devices = [
            {"name": uuid, "containerEdits": {"deviceNodes": [_node(self.engine.folder, n)]}}
            for n, uuid in enumerate(uuids)
        ]
        spec = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices,
                "containerEdits": {"env": ["SPECIFIED=yes"]}}  # fmt: skip
        (self.engine.cdi_specs / "nvidia.json").write_text(json.dumps(spec))


def _node(folder: Path, number: int) -> dict[str, Any]:
    return {"path": f"/dev/nvidia{number}", "hostPath": str(folder / f"nvidia{number}")}


@pytest.fixture
async def node(
    engine26: Engine, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Node]:
    proxy = EngineProxy(folder / "proxy.sock", engine26.socket)
    await proxy.start()
    daemon = Daemon(folder, "docker", engine26)
    daemon.engine = proxy.path
    made = Node(daemon, proxy, engine26)
    made.specify(made.gpu("a"), made.gpu("b"))
    (folder / "gpus").write_text(
        GPUS.format(node=folder.name, domain=crc32(folder.name.encode()) % 2**16)
    )
    made.environ = {
        "LD_LIBRARY_PATH": str(nvml_library(tmp_path_factory)),
        "FAKE_NVML_FILE": str(folder / "gpus"),
    }
    await made.start("[plugins.cuda]\n")
    yield made
    proxy.clear()
    await daemon.close()
    await proxy.stop()
    engine26.clean()


async def test_a_kernel_has_its_gpu_and_no_other(node: Node) -> None:
    script = "exec 2>&1; ls /dev | grep nvidia; env; head -c 1 /dev/nvidia1 | od -An -tx1"
    await node.daemon.running(kernel_id="first", slots={"cuda.device": 1})
    seen = await printed(node.daemon, script, slots={"cuda.device": 1})
    assert "nvidia1" in seen
    assert "nvidia0" not in seen
    assert " 00\n" in seen  # the file is the device, and can be read
    visible = f"CUDA_VISIBLE_DEVICES={node.gpu('b')}"
    for line in ("SPECIFIED=yes", visible, "NVIDIA_VISIBLE_DEVICES=void"):
        assert line in seen
    none = await printed(node.daemon, script)
    assert "No such file or directory" in none
    assert "nvidia0" not in none
    assert "SPECIFIED" not in none


async def test_a_kernel_never_runs_without_the_names_it_was_given(node: Node) -> None:
    """As with Podman's socket, which drops device requests without a word."""
    node.proxy.rule(
        "POST .*/containers/create",
        node.proxy.change(lambda body: body["HostConfig"].pop("DeviceRequests")),
    )
    answer = await node.daemon.create(slots={"cuda.device": 1})
    assert (answer.status, answer.json["code"]) == (502, "RuntimeFailure")
    assert "the engine omitted cdi nvidia.com/gpu=GPU-" in answer.json["detail"]
    assert node.engine.containers() == []
    assert await node.daemon.free("cuda.device") == "2"


async def test_a_gpu_that_is_not_specified_is_asked_of_the_driver(node: Node) -> None:
    """Which this engine has not: the create fails, and leaves nothing."""
    node.specify(node.gpu("a"))
    await node.daemon.running(kernel_id="first", slots={"cuda.device": 1})
    answer = await node.daemon.create(slots={"cuda.device": 1})
    assert (answer.status, answer.json["code"]) == (502, "RuntimeFailure")
    assert "device driver" in answer.json["detail"]
    assert len(node.engine.containers()) == 1
    assert await node.daemon.free("cuda.device") == "1"


@pytest.mark.parametrize(
    ("edits", "why"),
    [
        (ContainerEdits(cdi=("nvidia.com/gpu=0",)), "does not support CDI"),
        (
            ContainerEdits(device_requests=(DeviceRequest("nvidia", ("0",)),)),
            "not support device requests",
        ),
    ],
)
def test_unsupported_edits_are_refused_before_the_create(edits, why) -> None:
    old = parse_docker_facts({}, {"ApiVersion": "1.39", "Os": "linux", "Arch": "amd64"})
    with pytest.raises(RuntimeFailure, match=why):
        old.refuse_unsupported(edits)


async def test_a_kernel_with_a_share_reaches_the_mps_server(node: Node, folder: Path) -> None:
    """The stand-in for its control daemon is a socket, and a file in shared memory of its own."""
    for name in ("pipes", "shm"):
        (folder / name).mkdir()
    (folder / "shm/cuda.shm.server").write_text("the server's")
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(folder / "pipes/control"))
        control.listen()
        await node.daemon.stop()
        await node.start(
            '[plugins.cuda]\nmode = "shares"\nshare-control = "mps"\n'
            f'mps-pipe-directory = "{folder}/pipes"\nmps-shm-directory = "{folder}/shm"\n'
        )
        see = "env; cat /dev/shm/cuda.shm.server; test -S $CUDA_MPS_PIPE_DIRECTORY/control"
        shown = await printed(node.daemon, f"{see} && echo REACHED", slots={"cuda.shares": "0.25"})
        ended = await node.daemon.running(slots={"cuda.shares": "0.25"}, kernel_id="k2")
    assert "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25\n" in shown
    assert "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20480M\n" in shown
    assert "the server's" in shown
    assert "REACHED" in shown
    assert ended["not_enforced"] == ["cuda.shares"]
    answer = await node.daemon.create(
        slots={"cuda.shares": "0.25"}, env={"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100"}
    )
    assert (answer.status, answer.json["code"]) == (422, "InvalidRequest")
