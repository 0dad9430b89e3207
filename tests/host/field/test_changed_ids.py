"""A node id, a boot id or a clock that changes under what a node has."""

import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.daemon import BASE, Daemon
from support.waiting import until

YEAR_S = 365 * 24 * 3600
OTHER_BOOT = "11111111-2222-3333-4444-555555555555"


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[Daemon]:
    daemon = Daemon(folder, "process")
    yield daemon
    daemon.boot_id = ""
    await daemon.close()


async def ended(node: Daemon, kernel_id: str, *command: str) -> None:
    """Run a kernel to its end."""
    answer = await node.create(kernel_id=kernel_id, command=[*command])
    assert answer.status == 201, answer
    await node.until(kernel_id, "terminated")


async def test_ended_kernels_of_another_node_id_wait_for_it(node: Daemon) -> None:
    first = node.node
    await node.start()
    await ended(node, "k1", "sh", "-c", "exit 3")
    await node.stop()
    node.node = f"{first}-new"
    node.configure()
    await node.start()
    assert await node.kernel_ids() == set()
    assert [check["findings"] for check in await node.failed_checks()] == [["folder k1"]]
    await ended(node, "k2", "true")
    await node.stop()
    node.node = first
    node.configure()
    await node.start()
    assert await node.kernel_ids() == {"k1"}
    kernel = await node.until("k1", "terminated")
    assert (kernel["exit_code"], kernel["reason"]) == (3, "")


async def test_clock_that_was_years_ahead_prunes_no_new_end(node: Daemon) -> None:
    """As a battery of a clock that is empty, until the network gives the time."""
    keep = BASE.replace("[node]", "[node]\nkeep-ended = 2")
    node.configure(base=keep)
    await node.start()
    for kernel_id in ("ahead", "before"):
        await ended(node, kernel_id, "true")
    await node.stop()
    file = node.folder / "state/kernels/ahead/exit.json"
    ending = json.loads(file.read_text())
    file.write_text(json.dumps(ending | {"finished_at": ending["finished_at"] + 10 * YEAR_S}))
    await node.start()
    for kernel_id, listed in (("k1", {"before", "k1"}), ("k2", {"k1", "k2"})):
        await ended(node, kernel_id, "true")
        await until(node.kernel_ids, listed, text=f"{listed} are kept")


@pytest.mark.needs("root")
async def test_claim_outlives_a_boot_id_with_its_process(node: Daemon) -> None:
    await node.start()
    with subprocess.Popen(["sleep", "1000"]) as holder:
        start_time = int(
            Path(f"/proc/{holder.pid}/stat").read_text().rpartition(")")[2].split()[19]
        )
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
