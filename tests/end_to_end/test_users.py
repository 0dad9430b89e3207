"""Things that people do around the command line: nohup, pipes, full disks, signals, restarts."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.daemon import AGENTS, Daemon
from support.waiting import until

BIN = Path(sys.executable).parent
STEPS = "n=0; until [ -e $GO ]; do echo step $((n=n+1)); sleep 0.1; done; echo over; exit 7"
WAITS = "echo begun; until [ -e $GO ]; do sleep 0.1; done; exit 3"


@dataclass(frozen=True)
class Case:
    """A script of a shell; what it prints, and the kernels that it leaves."""

    script: str
    out: str
    err: str = ""
    left: tuple[str, ...] = ()


BEGUN = "until grep -qs begun out; do sleep 0.1; done"
CASES = {
    "nohup, and the terminal goes away": Case(
        f"nohup agentctl run agent-1 -e GO=$PWD/go --id k -- sh -c '{WAITS}' >out 2>&1 & p=$!\n"
        f"{BEGUN}; kill -HUP $p; kill -HUP $p; touch go; wait $p; echo $?",
        "3\n",
        left=("k",),
    ),
    "a job in the background of a script, and Ctrl-C": Case(
        f"agentctl run agent-1 -e GO=$PWD/go --id k -- sh -c '{WAITS}' >out 2>&1 & p=$!\n"
        f"{BEGUN}; kill -INT $p; kill -INT $p; touch go; wait $p; echo $?",
        "3\n",
        left=("k",),
    ),
    "Ctrl-C is the kernel's own": Case(
        'set -m; agentctl run agent-1 --rm -- sh -c \'trap "echo got it; exit 9" INT; echo begun;'
        " while :; do sleep 0.1; done' >out 2>&1 & p=$!\n"
        f"{BEGUN}; kill -INT $p; wait $p; echo $?; cat out",
        "9\nbegun\ngot it\n",
    ),
    "a pipe that nobody writes to": Case(
        "sleep 2 | agentctl run agent-1 --rm -- echo hello; echo $?", "hello\n0\n"
    ),
    "input that no kernel can read": Case(
        "echo data | agentctl run agent-1 --rm -- cat; echo $?", "2\n", "< /dev/null"
    ),
    "timeout": Case(
        "timeout --preserve-status 3 agentctl run agent-1 --rm -- sleep 1000; echo $?", "143\n"
    ),
    "xargs": Case(
        "printf '%s\\n' 1 2 3 | xargs -P 3 -I N agentctl run agent-1 --rm -- echo line N | sort",
        "line 1\nline 2\nline 3\n",
    ),
    "head of a kernel that prints on": Case(
        "agentctl run agent-1 --rm -- sh -c 'while :; do echo y; sleep 0.1; done' | head -n 1\n"
        "echo ${PIPESTATUS[0]}",
        "y\n141\n",
    ),
    "head of a kernel that prints nothing more": Case(
        "agentctl run agent-1 --rm -- sh -c 'echo y; sleep 1000' | head -n 1\n"
        "echo ${PIPESTATUS[0]}",
        "y\n141\n",
    ),
    "head of a log that is followed": Case(
        "agentctl create agent-1 --id k -- sh -c 'echo y; sleep 1000' >/dev/null\n"
        "agentctl logs -f k | head -n 1; echo ${PIPESTATUS[0]}",
        "y\n141\n",
        left=("k",),
    ),
    "a reader that pauses": Case(
        "agentctl create agent-1 --id k -- sh -c 'yes | head -c 3000000' >/dev/null\n"
        "agentctl logs -f k | (sleep 5; wc -c); echo ${PIPESTATUS[0]}",
        "3000000\n0\n",
        left=("k",),
    ),
    "run on a full disk": Case(
        "agentctl run agent-1 --rm --id k -- sh -c 'echo y; sleep 1000' >/dev/full; echo $?",
        "74\n",
        "No space left on device",
        left=("k",),
    ),
    "other commands on a full disk": Case(
        "agentctl create agent-1 --id k -- sh -c 'echo y; sleep 1000' >/dev/null\n"
        "for command in 'logs k' 'exec k echo x' ls 'ls -o json' 'inspect k' status devices; do\n"
        "agentctl $command >/dev/full; echo $?; done",
        "74\n" * 7,
        "No space left on device",
        left=("k",),
    ),
    "closed output": Case(
        "agentctl create agent-1 --id k -- sh -c 'echo y; sleep 1000' >/dev/null\n"
        "for command in 'logs k' 'exec k echo x' ls; do agentctl $command >&-; echo $?; done",
        "74\n" * 3,
        left=("k",),
    ),
    "closed input and error output": Case(
        "agentctl create agent-1 --id k -- sleep 1000 >/dev/null\n"
        "agentctl exec k echo x <&-; agentctl exec k sh -c 'exit 5' 2>&-; echo $?",
        "x\n5\n",
        left=("k",),
    ),
    "the same id twice": Case(
        "for _ in 1 2; do agentctl run agent-1 --id k -- echo one; echo $?; done\n"
        "agentctl create agent-1 --id k -- echo one; echo $?",
        "one\n0\n125\n1\n",
        "created it; use another id, or delete it",
        left=("k",),
    ),
    "options of the command": Case(
        "agentctl create agent-1 --id k -- sleep 1000 >/dev/null\n"
        "agentctl exec k grep -c -i ROOT:x /etc/passwd; agentctl run agent-1 --rm echo -n --rm",
        "1\n--rm",
        left=("k",),
    ),
    "ends of exec": Case(
        "agentctl create agent-1 --id k -- sleep 1000 >/dev/null\n"
        "for words in 'k false' 'k no-such' 'k /etc/passwd' 'nobody true'; do\n"
        "agentctl exec $words; echo $?; done",
        "1\n127\n126\n125\n",
        "UnknownKernel",
        left=("k",),
    ),
    "a dry run": Case("agentctl run agent-1 --dry-run -- echo no | grep -c no$", "0\n"),
    "a terminal without UTF-8": Case(
        "PYTHONIOENCODING=latin-1 agentctl run agent-1 --rm -- printf 'h\\342\\202\\254\\n'", "h€\n"
    ),
}


class Shell:
    """A shell in a folder of its own, for one node."""

    def __init__(self, daemon: Daemon) -> None:
        self.daemon, self.folder = daemon, daemon.folder / "user"
        self.folder.mkdir()

    def start(self, script: str) -> subprocess.Popen[str]:
        socket = str(self.daemon.folder / "agentd.sock")
        return subprocess.Popen(
            ["bash", "-c", script],
            cwd=self.folder,
            env=os.environ | {"AGENTD_SOCKET": socket, "PATH": f"{BIN}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    async def run(self, script: str) -> tuple[str, str]:
        process = self.start(script)
        try:
            return await asyncio.to_thread(process.communicate, timeout=60)
        finally:
            process.kill()

    async def kernels(self) -> set[str]:
        return {kernel["kernel_id"] for kernel in await self.daemon.get("/v1/kernels")}


@pytest.fixture
async def shell(plain: Daemon) -> Shell:
    await plain.start(AGENTS)
    return Shell(plain)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
async def test_user(shell: Shell, case: Case) -> None:
    out, err = await shell.run(case.script)
    assert out == case.out, err
    assert case.err in err
    assert "Traceback" not in err
    await until(shell.kernels, set(case.left))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_daemon_restarts_in_the_middle_of_each_command(
    shell: Shell, number: signal.Signals
) -> None:
    """Each command goes on; of what was printed meanwhile nothing is lost and nothing doubled."""
    daemon, go = shell.daemon, shell.folder / "go"
    command = ["sh", "-c", STEPS]
    await daemon.running("agent-1", kernel_id="k", command=command, env={"GO": str(go)})
    running = {
        "events": shell.start("exec agentctl events -o json >events"),
        "wait": shell.start("agentctl wait k"),
        "logs": shell.start("set -o pipefail; agentctl logs -f k | tee log"),
        "run": shell.start(
            f"set -o pipefail; agentctl run agent-1 -e GO={go} --id r -- sh -c '{STEPS}' | tee run"
        ),
    }
    for file in (shell.folder / "log", shell.folder / "run"):
        await until(lambda file=file: file.is_file() and "step 20\n" in file.read_text())
    printed = shell.folder / "events"
    for restarts in (1, 2):
        await daemon.stop(number)
        await daemon.start()
        await until(shell.kernels, {"k", "r"})
        # It says that events were missed, also the end of a kernel, if that came before it.
        await until(lambda: printed.read_text().count('"event": "reset"'), restarts)
    go.touch()
    for name in ("run", "logs", "wait"):
        out, err = await asyncio.to_thread(running[name].communicate, timeout=60)
        assert "Traceback" not in err
        assert len(err.splitlines()) <= 2 * 2, err
        status = {"run": 7, "logs": 0, "wait": 0}[name]
        assert running[name].returncode == status, err
        if name != "wait":
            steps = [int(step) for step in re.findall(r"step (\d+)\n", out)]
            assert steps == [*range(1, len(steps) + 1)]
            assert out.endswith("over\n")
    await until(printed.read_text, lambda text: "terminated" in text)
    running["events"].send_signal(signal.SIGINT)
    _, err = await asyncio.to_thread(running["events"].communicate, timeout=60)
    assert running["events"].returncode == 130, err
    events: list[dict[str, Any]] = [json.loads(line) for line in printed.read_text().splitlines()]
    assert all(event["id"] and event["at"] for event in events if event["event"] != "reset")
