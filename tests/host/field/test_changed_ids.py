"""A node id, a boot id or a clock that changes under what a node has."""

import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.daemon import Daemon

OTHER_BOOT = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(folder, "process")
    yield daemon
    daemon.boot_id = ""
    await daemon.close()


async def test_ended_kernels_of_another_node_id_wait_for_it(node: Daemon) -> None:
    first = node.node
    await node.start()
    await node.running(kernel_id="k1", command=["sh", "-c", "exit 3"])
    await node.until("k1", "terminated")
    await node.stop()
    node.node = f"{first}-new"
    node.configure()
    await node.start()
    assert await node.kernel_ids() == set()
    assert [check["findings"] for check in await node.failed_checks()] == [["folder k1"]]
    await node.running(kernel_id="k2", command=["true"])
    await node.until("k2", "terminated")
    await node.stop()
    node.node = first
    node.configure()
    await node.start()
    assert await node.kernel_ids() == {"k1"}
    kernel = await node.until("k1", "terminated")
    assert (kernel["exit_code"], kernel["reason"]) == (3, "")


@pytest.mark.needs("root")
async def test_claim_outlives_a_boot_id_with_its_process(node: Daemon) -> None:
    await node.start()
    with subprocess.Popen(["sleep", "1000"]) as holder:
        start_time = int(Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[19])
        body = {
            "claim_id": "c1",
            "slots": {"cuda.device": 1},
            "holder": {"pid": holder.pid, "start_time": start_time},
        }
        answer = await node.call("POST", "/v1/agents/agent-1/claims", body)
        assert answer.status == 201, answer
        node.boot_id = OTHER_BOOT
        await node.restart()
        assert [claim["claim_id"] for claim in await node.get("/v1/claims")] == ["c1"]
        assert await node.free("cuda.device") == "1"
        await node.stop()
        holder.kill()
    await node.start()
    assert await node.get("/v1/claims") == []
    assert await node.free("cuda.device") == "2"
