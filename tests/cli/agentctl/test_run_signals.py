"""`agentctl run` and signals: which it passes on, which end it, and which it leaves alone."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.daemon import Daemon
from support.scripted_node import Agentctl, ScriptedNode
from support.waiting import until

INT, HUP, QUIT, TERM = signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM
USR1, USR2 = signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
async def node(folder: Path) -> AsyncIterator[ScriptedNode]:
    made = ScriptedNode()
    made.accept()
    made.log = [b"here\n"]
    async with made.serving(folder):
        yield made


async def started(node: ScriptedNode, folder: Path, *words: str, prefix: str = "") -> Agentctl:
    """Begin a run of k1, and wait until it prints the kernel's output."""
    del node
    words = ("run", "agent-1", "--id", "k1", *words, "--", "true")
    running = Agentctl(folder, *words, prefix=prefix)
    await until(lambda: running.stdout, "here\n")
    return running


PASSED_ON = {
    "INT": ([INT], ["INT"]),
    "HUP": ([HUP], ["HUP"]),
    "QUIT": ([QUIT], ["QUIT"]),
    "TERM": ([TERM], ["stop"]),
    "a second INT": ([INT, INT], ["INT", "stop 0"]),
    "TERM after INT": ([INT, TERM], ["INT", "stop 0"]),
    "USR1 twice and USR2": ([USR1, USR1, USR2], ["USR1", "USR1", "USR2"]),
    "USR1 before INT": ([USR1, INT, QUIT], ["USR1", "INT", "stop 0"]),
}


@pytest.mark.parametrize(("numbers", "calls"), PASSED_ON.values(), ids=PASSED_ON)
async def test_run_passes_on(
    node: ScriptedNode, folder: Path, numbers: list[signal.Signals], calls: list[str]
) -> None:
    node.ends_of = set()
    running = await started(node, folder)
    for count, number in enumerate(numbers, 1):
        running.send(number)
        await node.until_called("create", *calls[:count])
    node.end(7)
    assert await running.done() == (7, "here\n", "")
    assert node.calls == ["create", *calls, "read"]


@pytest.mark.parametrize("is_created", [True, False], ids=["running", "creating"])
async def test_third_signal_ends_run_at_once(
    node: ScriptedNode, folder: Path, is_created: bool
) -> None:
    node.ends_of = set()
    node.hangs = True
    if is_created:
        running = await started(node, folder, "--rm")
    else:
        node.may_answer.clear()
        running = Agentctl(folder, "run", "agent-1", "--id", "k1", "--rm", "--", "true")
        await node.created.wait()
    for number in (INT, TERM, QUIT):  # two of one number at once would be one
        running.send(number)
    done = await running.done()
    assert done.status - 128 in (INT, TERM, QUIT)
    assert "kernel k1 may run" in done.stderr
    assert "delete" not in node.calls


async def test_third_signal_ends_run_whose_reader_takes_nothing(
    node: ScriptedNode, folder: Path
) -> None:
    node.ends_of = set()
    node.log = [bytes(1 << 20)]
    reader, writer = os.pipe()
    words = ("run", "agent-1", "--id", "k1", "--", "true")
    running = Agentctl(folder, *words, stdout=writer, prefix="exec 2>&1;")
    os.close(writer)
    await asyncio.to_thread(os.read, reader, 1)
    for number, call in ((INT, "INT"), (TERM, "stop 0")):
        running.send(number)
        async with asyncio.timeout(20):
            while call not in node.calls:
                await asyncio.sleep(0.02)
    running.send(TERM)
    assert (await running.done()).status == 128 + TERM
    os.close(reader)


IGNORED = {
    "nohup": ("trap '' HUP;", HUP),
    "a job of a script": ("trap '' INT;", INT),
    "QUIT": ("trap '' QUIT;", QUIT),
}


@pytest.mark.parametrize(("prefix", "number"), IGNORED.values(), ids=IGNORED)
async def test_signal_ignored_at_the_start_stays_ignored(
    node: ScriptedNode, folder: Path, prefix: str, number: signal.Signals
) -> None:
    running = await started(node, folder, prefix=prefix)
    for _ in range(3):
        running.send(number)
    running.send(USR1)
    await node.until_called("create", "USR1")
    running.send(TERM)
    assert (await running.done()).status == 143
    assert node.calls == ["create", "USR1", "stop", "read"]


async def test_interrupt_reaches_the_first_process(up: Daemon) -> None:
    script = "trap 'echo interrupted; exit 5' INT; echo ready; while :; do sleep 0.05; done"
    running = Agentctl(up.folder, "run", "agent-1", "--rm", "--", "sh", "-c", script)
    await until(lambda: running.stdout, "ready\n")
    running.send(INT)
    assert await running.done() == (5, "ready\ninterrupted\n", "")
    assert await up.get("/v1/kernels") == []
