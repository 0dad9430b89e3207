"""Comfort of `agentctl`: completion, column selection, waiting, several logs."""

import asyncio
import contextlib
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from support import fork_server
from support.daemon import Daemon

BIN = Path(sys.executable).parent


def ctl(up: Daemon, *words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "AGENTD_SOCKET": str(up.folder / "agentd.sock"), **environ}
    done = fork_server.run("agentctl", *words, env=env)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def completed(up: Daemon, line: str) -> list[str]:
    words = line.split(" ")
    environ = {"_AGENTCTL_COMPLETE": "bash_complete", "COMP_WORDS": line}
    out = ctl(up, COMP_CWORD=str(len(words) - 1), **environ).stdout
    return [row.partition(",")[2] for row in out.splitlines() if row]


async def test_names_are_completed_from_the_live_node(up: Daemon) -> None:
    for kernel_id in ("train-1", "train-2", "other"):
        await up.running(kernel_id=kernel_id, slots={"cpu": 0})
    assert completed(up, "agentctl inspect train") == ["train-1", "train-2"]
    assert completed(up, "agentctl create agent") == ["agent-1", "agent-2"]
    assert completed(up, "agentctl drain cuda") == ["cuda0", "cuda1"]
    await up.stop()
    assert completed(up, "agentctl inspect train") == []


async def test_columns_are_chosen_by_output(up: Daemon) -> None:
    await up.running(kernel_id="k1", slots={"cpu": 0}, labels={"queue": "night"})
    await up.running(kernel_id="k2", slots={"cpu": 0})
    assert ctl(up, "ls", "-o", "name").stdout.splitlines() == ["k1", "k2"]
    assert ctl(up, "ls", "-o", "name", "-l", "queue=night").stdout == "k1\n"
    assert ctl(up, "ls", "-o", "name", "--state", "failed").stdout == ""
    wide, narrow = ctl(up, "ls", "-o", "wide").stdout, ctl(up, "ls").stdout
    assert ("LABELS" in wide, "LABELS" in narrow) == (True, False)
    assert "sleep, 1000" in wide
    assert ctl(up, "devices", "-o", "name").stdout.splitlines()[-1] == "mem/root"
    assert "unknown state" not in ctl(up, "ls", "--state", "asleep", code=1).stdout


async def test_ps_lists_kernels_and_quiet_their_ids(up: Daemon) -> None:
    await up.running(kernel_id="k1", slots={"cpu": 0})
    assert ctl(up, "ps").stdout == ctl(up, "ls").stdout
    assert ctl(up, "ls", "-q").stdout == ctl(up, "ps", "-q").stdout == "k1\n"
    as_json = json.loads(ctl(up, "ls", "--json").stdout)
    assert yaml.safe_load(ctl(up, "ls", "-o", "yaml").stdout) == as_json
    assert "Alias of ls." in ctl(up, "--help").stdout


async def test_error_suggests_the_nearest_name(up: Daemon) -> None:
    device = ctl(up, "drain", "cuda-1", code=1).stderr
    assert device == "agentctl: UnknownDevice: unknown device cuda-1\n  did you mean cuda1?\n"
    slot = ctl(up, "explain", "agent-1", "-s", "cuda.devcie=1", code=1).stderr
    assert slot.splitlines()[1:] == ["  did you mean cuda.device?"]
    for words in (["create", "agent1", "--", "true"], ["explain", "agent1", "-s", "cpu=1"]):
        agent = ctl(up, *words, code=1).stderr
        assert agent.startswith("agentctl: UnknownAgent: ")
        assert agent.splitlines()[1:] == ["  did you mean agent-1?"]
    assert "did you mean inspect?" in ctl(up, "inspct", "k1", code=2).stderr


@pytest.mark.needs("cgroups")
async def test_stats_measures_the_processor_time_of_live_kernels(up: Daemon) -> None:
    busy = ["sh", "-c", "while :; do :; done"]
    await up.running(kernel_id="busy", slots={"cpu": 1}, command=busy)
    await up.running(kernel_id="ended", slots={"cpu": 0})
    await up.call("POST", "/v1/kernels/ended/stop", {"timeout": 0})
    head, _, *rows = ctl(up, "stats").stdout.splitlines()
    at = head.split().index("CPU")
    cells = {row.split()[0]: row.split()[at] for row in rows if row.strip()}
    assert re.fullmatch(r"[1-9][0-9]*%", cells["busy"])
    assert cells["ended"] == "-"


class Terminal:
    """A command on a terminal."""

    def __init__(self, up: Daemon, *words: str, **environ: str) -> None:
        self._ours, theirs = pty.openpty()
        env = {**os.environ, "AGENTD_SOCKET": str(up.folder / "agentd.sock"), "TERM": "xterm"}
        env |= {"COLUMNS": "80", "LINES": "24", **environ}
        self._process = subprocess.Popen(
            [BIN / "agentctl", *words], stdout=theirs, stderr=theirs, env=env
        )
        os.close(theirs)

    async def shown(self) -> bytes:
        """Wait for the end of the command, and return all that the terminal shows."""
        text = b""
        with contextlib.suppress(OSError):  # EIO is the end of a terminal
            while True:
                text += await asyncio.to_thread(os.read, self._ours, 65536)
        self._process.wait(timeout=30)
        os.close(self._ours)
        return text


async def test_colours_are_for_terminals_without_no_color(up: Daemon) -> None:
    await up.running(kernel_id="k1", slots={"cpu": 0})
    assert b"\x1b[32mrunning\x1b[0m" in await Terminal(up, "ls", NO_COLOR="").shown()
    for environ in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        text = await Terminal(up, "ls", **environ).shown()
        assert b"running" in text
        assert b"\x1b" not in text
    assert "\x1b" not in ctl(up, "ls", FORCE_COLOR="1").stdout


async def test_waiting_ends_as_it_says(up: Daemon) -> None:
    await up.create(kernel_id="short", command=["sh", "-c", "sleep 0.3"], slots={"cpu": 0})
    await up.running(kernel_id="long", slots={"cpu": 0})
    ctl(up, "wait", "--for", "running", "--timeout", "20", "long")
    ctl(up, "wait", "--timeout", "20", "short")
    late = ctl(up, "wait", "--timeout", "0.3", "short", "long", code=3)
    assert late.stderr == "agentctl: not ended: long\n"
    never = ctl(up, "wait", "--for", "running", "short", code=1)
    assert "short is terminated, and will not be running any more" in never.stderr
    ctl(up, "wait", "nobody", code=1)
    ctl(up, "wait", "--for", "removed", "nobody")


async def test_several_logs_are_told_apart(up: Daemon) -> None:
    for kernel_id in ("a", "long-name"):
        script = f"for i in 1 2 3; do echo {kernel_id} $i; sleep 0.05; done; printf end"
        await up.create(kernel_id=kernel_id, command=["sh", "-c", script], slots={"cpu": 0})
    lines = ctl(up, "logs", "-f", "a", "long-name").stdout.splitlines()
    assert sorted(lines) == sorted(
        [f"a         | {text}" for text in ("a 1", "a 2", "a 3", "end")]
        + [f"long-name | {text}" for text in ("long-name 1", "long-name 2", "long-name 3", "end")]
    )
    one = ctl(up, "logs", "--tail", "1", "a").stdout
    assert one == "end"
    assert "UnknownKernel" in ctl(up, "logs", "a", "nobody", code=1).stderr


async def test_tables_fit_the_terminal_and_keep_their_lines(up: Daemon) -> None:
    labels = {"note": "a text of many words that no terminal of eighty columns can show in a cell"}
    await up.running(kernel_id="k1", slots={"cpu": 0}, labels=labels)
    plain = ctl(up, "ls", "-o", "wide").stdout.splitlines()
    assert len(plain) == 3
    assert labels["note"] in plain[-1]
    text = (await Terminal(up, "ls").shown()).decode()
    shown = re.sub(r"\x1b\[[0-9;]*m|\r", "", text).splitlines()
    assert len(shown) == 3
    assert shown[-1].startswith("k1 ")
    assert max(map(len, shown)) <= 80


LOST = "agentctl: the output cannot be written: {}\n"
OUTPUTS = {
    "closed": (">&-", 74, LOST.format("Bad file descriptor")),
    "full disk": (">/dev/full", 74, LOST.format("No space left on device")),
    "all closed": ("<&- >&- 2>&-", 74, ""),
    "no reader": (">&$WITHOUT_READER", 141, ""),
    "no reader of both": (">&$WITHOUT_READER 2>&1", 141, ""),
    "errors to a full disk": ("2>/dev/full", 0, ""),
}
PRINTING = ("ls --json", "logs k1", "logs -f k1 k1", "top --count 1", "--help")


@pytest.mark.parametrize("output", OUTPUTS)
async def test_output_that_cannot_be_written_has_a_status(up: Daemon, output: str) -> None:
    target, status, errors = OUTPUTS[output]
    await up.create(kernel_id="k1", command=["echo", "line"], slots={"cpu": 0})
    reader, without_reader = os.pipe()
    os.close(reader)
    env = {**os.environ, "AGENTD_SOCKET": str(up.folder / "agentd.sock")}
    for words in PRINTING:
        process = await asyncio.create_subprocess_exec(
            "bash",
            "-c",
            f"exec {BIN}/agentctl {words} {target}",
            env={**env, "WITHOUT_READER": str(without_reader)},
            pass_fds=[without_reader],
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        _, told = await asyncio.wait_for(process.communicate(), 20)
        assert (process.returncode, told.decode()) == (status, errors), words
    os.close(without_reader)


async def test_refusal_keeps_its_status_without_a_reader(up: Daemon) -> None:
    env = {**os.environ, "AGENTD_SOCKET": str(up.folder / "agentd.sock")}
    for target in ("2>&-", "2>/dev/full", ">/dev/full"):
        process = await asyncio.create_subprocess_shell(
            f"exec {BIN}/agentctl inspect nobody {target}",
            env=env,
            stderr=asyncio.subprocess.DEVNULL,
        )
        assert await asyncio.wait_for(process.wait(), 20) == 1, target


async def test_characters_that_a_terminal_lacks_are_escaped(up: Daemon) -> None:
    await up.running(kernel_id="k1", slots={"cpu": 0}, labels={"a": "caf\xe9 \u2713"})
    env = {"PYTHONIOENCODING": "latin-1", "PYTHONUTF8": "0"}
    for words in (["ls", "-o", "wide"], ["inspect", "k1"]):
        process = subprocess.run(
            [BIN / "agentctl", *words], capture_output=True, check=True,
            env={**os.environ, "AGENTD_SOCKET": str(up.folder / "agentd.sock"), **env},
        )  # fmt: skip
        assert b"caf\xe9 \\u2713" in process.stdout


async def test_errors_are_json_where_answers_are(up: Daemon) -> None:
    for option in (["-o", "json"], ["--json"], ["--output=json"]):
        shown = ctl(up, "inspect", "nobody", *option, code=1).stderr
        assert json.loads(shown)["code"] == "UnknownKernel"
    assert ctl(up, "status", "-o", "name").stdout == f"{up.node}\n"
    shown = ctl(up, "inspect", "nobody", "-o", "yaml", code=1).stderr
    assert yaml.safe_load(shown)["code"] == "UnknownKernel"


def test_help_shows_how() -> None:
    for command in ("create", "ls", "logs", "wait"):
        text = subprocess.run(
            [BIN / "agentctl", command, "--help"], capture_output=True, text=True, check=True
        ).stdout
        assert f"\n  agentctl {command} " in text


def test_help_lists_the_commands_of_a_fleet() -> None:
    words = [BIN / "agentctl", "--fleet", "unix:/none", "--help"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    listed = [line.split()[0] for line in text.partition("Commands:")[2].split("\n") if line]
    assert "nodes" in listed
    assert "drain" not in listed
