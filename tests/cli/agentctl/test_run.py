"""`agentctl run`: which kernels it stops and deletes, and what a dry run does."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentd.cli.agentctl.run import RUN_LABEL, add_own_devices
from support import fork_server
from support.daemon import Daemon
from support.scripted_node import Agentctl, ScriptedNode


def run(up: Daemon, *words: str) -> Agentctl:
    return Agentctl(up.folder, "run", "agent-1", *words)


async def ids(up: Daemon) -> list[str]:
    return [kernel["kernel_id"] for kernel in await up.get("/v1/kernels")]


async def listed(up: Daemon, state: str) -> dict[str, Any]:
    """Wait until a kernel is in a state, and return it."""
    async with asyncio.timeout(20):
        while True:
            for kernel in await up.get("/v1/kernels"):
                if kernel["state"] == state:
                    return dict(kernel)
            await asyncio.sleep(0.02)


async def test_refused_run_leaves_the_kernel_of_its_id(up: Daemon) -> None:
    await up.running(kernel_id="train")
    assert (await run(up, "--id", "nightly", "--", "echo", "hi").done())[:2] == (0, "hi\n")
    for name in ("train", "nightly"):
        done = await run(up, "--id", name, "--rm", "--", "echo", "hi").done()
        assert (done.status, done.stdout) == (125, "")
        assert "KernelConflict" in done.stderr
    assert (await up.get("/v1/kernels/train"))["state"] == "running"
    assert await ids(up) == ["train", "nightly"]


async def test_run_has_a_label_of_its_own(up: Daemon) -> None:
    for _ in range(2):
        assert (await run(up, "--label", "a=b", "--", "true").done()).status == 0
    first, second = [kernel["labels"] for kernel in await up.get("/v1/kernels")]
    assert first.keys() == {"a", RUN_LABEL}
    assert first[RUN_LABEL] != second[RUN_LABEL]
    assert len(bytes.fromhex(first[RUN_LABEL])) == 8
    refused = await run(up, "--label", f"{RUN_LABEL}=x", "--", "true").done()
    assert (refused.status, f"duplicate name {RUN_LABEL}" in refused.stderr) == (2, True)


async def test_run_leaves_a_kernel_that_replaced_its_own(up: Daemon) -> None:
    running = run(up, "--id", "k1", "--rm", "--", "sleep", "1000")
    await listed(up, "running")
    assert (await up.call("DELETE", "/v1/kernels/k1?timeout=0")).status == 204
    await up.running(kernel_id="k1")
    done = await running.done()
    assert (done.status, "UnknownKernel" in done.stderr) == (125, True)
    assert (await up.get("/v1/kernels/k1"))["state"] == "running"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_signal_cancels_the_create_of_its_run(up: Daemon, number: int) -> None:
    await up.stop()
    await up.start(AGENTD_FAILPOINTS="create.after_commit=delay(600000)")
    running = run(up, "--", "sleep", "1000")
    await listed(up, "preparing")
    running.send(number)
    assert await running.done() == (128 + number, "", "")
    assert await ids(up) == []


async def test_run_goes_on_when_agentd_dies_in_its_create(up: Daemon) -> None:
    await up.stop()
    await up.start(AGENTD_FAILPOINTS="create.after_runtime=kill")
    assert up.process is not None
    running = run(up, "--rm", "--", "echo", "hi")
    await asyncio.to_thread(up.process.wait, 40)
    await up.start()
    assert await running.done() == (0, "hi\n", "")
    assert await ids(up) == []


async def test_dry_run_prints_the_decision_and_runs_nothing(up: Daemon) -> None:
    done = await run(up, "-s", "cuda.device=1", "--rm", "--dry-run", "--", "echo", "ran").done()
    assert (done.status, "cuda0" in done.stdout, "ran" in done.stdout) == (0, True, False)
    refused = await run(up, "-s", "cuda.device=9", "--dry-run", "--", "echo", "ran").done()
    assert (refused.status, "InsufficientResource" in refused.stderr) == (1, True)
    assert await ids(up) == []


@pytest.mark.parametrize(
    "option",
    ["--claim", "--id", "--image", "--workdir", "--user", "--platform", "--network", "--shm-size"],
)
async def test_run_with_an_empty_value_is_refused(up: Daemon, option: str) -> None:
    """A script's `--claim "$AGENTD_CLAIM"` without this variable must not run without the claim."""
    done = await run(up, option, "", "--", "echo", "ran").done()
    assert (done.status, done.stdout) == (2, ""), done.stderr
    assert await ids(up) == []


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[ScriptedNode]:
    made = ScriptedNode()
    async with made.serving(folder):
        yield made


async def created(node: ScriptedNode, folder: Path, *words: str, **how: float) -> Agentctl:
    """Begin a run of k1, and wait until the node has its create."""
    running = Agentctl(folder, "run", "agent-1", "--id", "k1", *words, "--", "true", **how)
    async with asyncio.timeout(20):
        await node.created.wait()
    return running


@pytest.mark.parametrize("words", [(), ("--rm",), ("--claim", "c1", "--rm")], ids=" ".join)
async def test_early_signal_leaves_the_kernel_of_another(
    node: ScriptedNode, folder: Path, words: tuple[str, ...]
) -> None:
    running = await created(node, folder, *words)
    node.set_kernel("running", labels={RUN_LABEL: "0" * 16})
    running.send(signal.SIGINT)
    async with asyncio.timeout(20):
        for _ in range(3):
            await node.lookups.acquire()
    node.answer = 409, {"code": "KernelConflict", "detail": "another request"}
    node.may_answer.set()
    assert await running.done() == (130, "", "")
    assert node.calls == ["create"]


async def test_signal_stops_a_kernel_whose_answer_was_lost(
    node: ScriptedNode, folder: Path
) -> None:
    running = await created(node, folder)
    running.send(signal.SIGTERM)
    async with asyncio.timeout(20):
        await node.lookups.acquire()  # it is not there yet
    node.set_kernel("running")
    node.may_answer.set()
    assert await running.done() == (143, "", "")
    assert node.calls == ["create", "stop", "read"]


async def test_signal_before_any_outcome_creates_nothing_more(
    node: ScriptedNode, folder: Path
) -> None:
    running = await created(node, folder, "--rm")
    running.send(signal.SIGTERM)
    async with asyncio.timeout(20):
        await node.lookups.acquire()
    node.may_answer.set()
    assert await running.done() == (143, "", "")
    assert node.calls == ["create"]


async def test_unanswered_create_ends_after_a_signal(node: ScriptedNode, folder: Path) -> None:
    running = await created(node, folder, "--rm", patience_s=0.5)
    running.send(signal.SIGINT)
    text = "agentctl: kernel k1 may exist: its create was not answered\n"
    assert await running.done() == (130, "", text)
    assert node.calls == ["create"]


async def test_refused_create_deletes_its_kernel_alone(node: ScriptedNode, folder: Path) -> None:
    """A proxy's refusal says nothing about the kernel: its label does."""
    running = await created(node, folder, "--rm")
    node.set_kernel("running")
    node.answer = 502, {"code": "Internal", "detail": "bad gateway"}
    node.may_answer.set()
    assert (await running.done()).status == 125
    assert node.calls == ["create", "delete"]


async def test_create_is_not_repeated_before_its_time(node: ScriptedNode, folder: Path) -> None:
    node.answer = 503, {"code": "ImageUnavailable", "detail": "rate limit", "status": 503}
    node.may_answer.set()
    done = await (await created(node, folder, patience_s=5.0)).done()
    assert (done.status, "ImageUnavailable: rate limit" in done.stderr) == (125, True)
    assert node.calls == ["create"]


async def test_long_create_is_repeated_after_a_restart(node: ScriptedNode, folder: Path) -> None:
    running = await created(node, folder, "--rm", patience_s=4.0)
    await asyncio.sleep(5)  # longer than a create is repeated
    node.created.clear()
    node.may_answer.set()
    async with asyncio.timeout(20):
        await node.created.wait()
    node.end(0)
    node.answer = 200, node.kernel or {}
    assert await running.done() == (0, "", "")
    assert node.calls == ["create"] * node.calls.count("create") + ["read", "delete"]
    assert node.calls.count("create") > 1


@pytest.mark.parametrize("words", [(), ("--rm",)], ids=["kept", "removed"])
async def test_create_of_a_run_has_its_attempt(
    node: ScriptedNode, folder: Path, words: tuple[str, ...]
) -> None:
    """The node deletes a kernel of --rm, whatever ends agentctl."""
    node.ended.set()
    node.accept()
    assert (await (await created(node, folder, *words)).done()).status == 0
    assert node.body["attempt"] == node.labels[RUN_LABEL]
    assert node.body.get("remove") == (True if words else None)


async def test_run_is_no_command_of_a_fleet(folder: Path) -> None:
    done = fork_server.run("agentctl", "--fleet", f"unix:{folder}/none", "run", "a", "--", "true")
    assert (done.returncode, "not for a fleet" in done.stderr) == (2, True)


TASK = {"AGENTD_CLAIM": "c1", "AGENTD_SLOTS": "cuda.device=1", "AGENTD_DEVICES": "cuda=cuda1"}


@pytest.mark.parametrize(
    ("body", "changes", "wanted"),
    [
        pytest.param({}, {}, ({"cuda.device": "1"}, {"cuda": ["cuda1"]}), id="a task"),
        pytest.param(
            {"slots": {"cpu": "0"}},
            {"AGENTD_SLOTS": "a.device=2", "AGENTD_DEVICES": "a=a0 a=a1"},
            ({"a.device": "2", "cpu": "0"}, {"a": ["a0", "a1"]}),
            id="other slots are kept",
        ),
        pytest.param({}, {"AGENTD_CLAIM": "c2"}, (None, None), id="another claim"),
        pytest.param({}, {"AGENTD_SLOTS": ""}, (None, None), id="no GPUs"),
        pytest.param(
            {"slots": {"cuda.device": "2"}}, {}, ({"cuda.device": "2"}, None), id="own amounts"
        ),
        pytest.param(
            {"devices": {"cuda": ["cuda3"]}}, {}, (None, {"cuda": ["cuda3"]}), id="own devices"
        ),
    ],
)
def test_task_of_slurm_names_its_own_devices(
    body: dict[str, Any], changes: dict[str, str], wanted: tuple[Any, Any]
) -> None:
    body = {"claim": "c1", **body}
    add_own_devices(body, TASK | changes)
    assert (body.get("slots"), body.get("devices")) == wanted
