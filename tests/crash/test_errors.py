"""Every step fails once: the client gets an error, the daemon lives, and the ledger is right."""

import os
import signal

import pytest

from agentd.core.invariants import NodeSnapshot
from crash.points import POINTS
from support.checked_node import ONE, CheckedNode
from support.daemon import AGENTS, gpus
from support.waiting import until

NODE = '[plugins]\nallow = ["sim"]\n' + AGENTS + gpus(64)
TRIES = 25


def armed(*steps: str, error: str = "ENOSPC") -> str:
    """Set an error at every point of these steps, one after another."""
    return ";".join(f"{p}=1*error({error})" for p in POINTS if p.split(".")[0] in steps)


@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EMFILE"])
async def test_a_create_fails_at_every_step_and_leaves_nothing(
    node: CheckedNode, error: str
) -> None:
    daemon = node.daemon
    await node.start(armed("create", "intent", "record", error=error), NODE)
    failures = []
    for number in range(TRIES):
        answer = await daemon.create(kernel_id=f"k{number}", slots=ONE)
        if answer.status == 201:
            break
        assert answer.status in (500, 502, 503)
        failures.append(answer.json["detail"])
        await node.check()
    assert len(failures) >= 7, failures
    assert answer.status == 201
    assert daemon.process is not None
    assert daemon.process.poll() is None
    for number in range(len(failures)):
        again = await daemon.create(kernel_id=f"k{number}", slots=ONE)
        assert again.status in (200, 201, 503)
    await node.remove_kernels_except()
    await node.check()
    assert await daemon.free("cuda.device") == "64"


@pytest.mark.parametrize("point", [p for p in POINTS if p.startswith("shim.")])
async def test_a_shim_that_dies_leaves_its_kernel_accounted_or_nothing(
    point: str, process_node: CheckedNode
) -> None:
    node = process_node
    await node.start(f"{point}=kill", NODE)
    ran = node.daemon.folder / "ran"
    ran.touch()
    ran.chmod(0o666)
    rest = "exit 0" if point.endswith("_exit") else "sleep 1000"
    command = ["sh", "-c", f"echo yes > {ran}; {rest}"]
    answer = await node.daemon.create(kernel_id="k1", slots=ONE, command=command)
    assert answer.status in (201, 502)
    assert (answer.status == 201) == point.endswith("_exit"), answer.content
    if point.endswith("_exit"):
        ended = await node.daemon.until("k1", "terminated")
        assert (ended["exit_code"], ended["reason"]) == (0, "")  # it was written before
    await node.check()
    has_go = point not in ("shim.after_fork", "shim.before_identity", "shim.after_identity")
    assert has_go or ran.read_text() == "", "who it is stands on disk before the command runs"
    await node.kill()
    await node.start()
    await node.check()


async def test_stop_and_delete_can_be_repeated_after_any_failure(node: CheckedNode) -> None:
    daemon = node.daemon
    await node.start(armed("stop", "delete"), NODE)
    await daemon.running(kernel_id="k1", slots=ONE)
    await daemon.running(kernel_id="k2", slots=ONE)
    for method, path in (("POST", "/v1/kernels/k1/stop"), ("DELETE", "/v1/kernels/k1?timeout=0")):
        for _ in range(TRIES):
            body = {"timeout": 0.1} if method == "POST" else None
            answer = await daemon.call(method, path, body)
            await node.check()
            if answer.status in (200, 204, 404):
                break
            assert answer.status in (500, 502, 503)
        assert answer.status in (200, 204, 404)
    assert "k1" not in node.live_commands()
    assert "k2" in node.live_commands()
    await node.check()


async def test_failed_reconcile_is_repeated(node: CheckedNode) -> None:
    daemon = node.daemon
    await node.start(armed("adopt", "reconcile"), NODE)
    await until(
        lambda: daemon.create(kernel_id="k1", slots=ONE),
        lambda value: value.status in (200, 201),
        within_s=30,
    )
    for number in range(4):
        await daemon.running(kernel_id=f"e{number}", slots=ONE)
        os.kill(node.live_commands()[f"e{number}"][0], signal.SIGKILL)
    for number in range(4):
        await daemon.until(f"e{number}", "terminated")
    await node.check()
    assert daemon.process is not None
    assert daemon.process.poll() is None


async def test_a_plugin_that_cannot_be_started_is_tried_again(node: CheckedNode) -> None:
    daemon = node.daemon
    await node.start(text=NODE)
    await daemon.running(kernel_id="k1", slots=ONE)
    before, lives = await node.check(), node.live_commands()
    await node.kill()
    await node.start("plugin.before_spawn=2*error(EMFILE)->2*off->1*error(EMFILE)")
    assert node.live_commands() == lives
    await node.check(before)
    await created_again(node, before)
    for _ in range(2):
        node.kill_plugins()
        await created_again(node, before)
    assert node.live_commands() == lives


async def created_again(node: CheckedNode, before: NodeSnapshot) -> None:
    """Wait until a kernel gets a device, and remove it."""
    await until(
        lambda: node.daemon.create(kernel_id="k2", slots=ONE),
        lambda value: value.status in (200, 201),
        within_s=40,
    )
    await node.check(before, {"k2"})
    await node.remove("k2")
