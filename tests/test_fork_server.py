"""A forked program behaves as one that was started from scratch."""

import asyncio
import os
import re
import select
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support import fork_server
from support.daemon import Daemon
from support.fork_server import Forked, ForkServer


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[[ForkServer], Forked]]:
    """Start a daemon from a server, and kill it at the end."""
    started = []
    (folder / "agent.toml").write_text(
        f'[node]\nstate-dir = "{folder}/state"\nruntime = "process"\n[rpc]\nsocket = "{folder}/s"\n'
    )
    words = ["run", "--config", str(folder / "agent.toml")]

    def forked(server: ForkServer) -> Forked:
        with (folder / "log").open("wb") as log:
            number = log.fileno()
            started.append(server.fork("agentd", words, os.environ, number, number, number))
        return started[-1]

    yield forked
    for program in started:
        program.kill()
        program.wait(10)


@pytest.fixture
def running(start: Callable[[ForkServer], Forked]) -> Forked:
    return start(fork_server.of_worker())


def test_exit_status_and_output_are_those_of_the_program() -> None:
    done = fork_server.run("agentctl", "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("agentctl, version ")
    refused = fork_server.run("agentctl", "no-such-command")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "No such command" in refused.stderr


def test_environment_is_the_given_one_alone(folder: Path) -> None:
    done = fork_server.run("agentctl", "status", env={"AGENTD_SOCKET": f"{folder}/none"})
    assert f"{folder}/none" in done.stderr
    done = fork_server.run("agentctl", "status", env={"AGENTD_SOCKET": f"{folder}/other"})
    assert f"{folder}/other" in done.stderr


def test_program_has_a_pid_of_its_own_and_dies_of_signals(running: Forked) -> None:
    assert running.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        running.wait(0)
    assert Path(f"/proc/{running.pid}/cwd").readlink() == Path.cwd()
    running.send_signal(signal.SIGKILL)
    assert running.wait(10) == running.returncode == running.poll() == -signal.SIGKILL
    running.kill()


def test_server_kills_what_runs_when_its_worker_ends(
    start: Callable[[ForkServer], Forked],
) -> None:
    server = ForkServer()
    program = start(server)
    watch = os.pidfd_open(program.pid)
    server.close()
    assert select.select([watch], [], [], 10)[0]
    os.close(watch)


def descriptors(pid: int) -> list[str]:
    """Return the standard descriptors of a process; the others come and go."""
    return [str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in range(3)]


def plugin_of(daemon: Daemon) -> list[str]:
    """Return what a process knows that nobody has told it, of the daemon's only plugin."""
    assert daemon.process is not None
    pid = int(
        Path(f"/proc/{daemon.process.pid}/task/{daemon.process.pid}/children").read_text().strip()
    )
    process = Path(f"/proc/{pid}")
    opened = sorted(f"{fd.name} {fd.readlink()}" for fd in (process / "fd").iterdir())
    opened = [line for line in opened if "/libffi.so." not in line]  # 3.5 keeps its own file open
    status = (process / "status").read_text()
    signals = re.findall(r"(?m)^Sig(?:Blk|Ign|Cgt):.*(.{8})$", status)  # those below glibc's own
    places = [str((process / "cwd").readlink()), str(os.getsid(pid) == pid)]
    return [re.sub(r"(?<!^)\d+", "N", line) for line in opened] + signals + places


async def test_forked_daemon_and_plugin_look_like_cold_ones(folder: Path) -> None:
    views = []
    for name in ("forked", "cold"):
        (folder / name).mkdir()
        daemon = Daemon(folder / name, "process")
        if name == "cold":
            daemon.program = daemon.program
        await daemon.start()
        assert daemon.process is not None
        lines = sorted(re.findall(r'"event": "([\w.]+)"', daemon.log))
        processes = [descriptors(daemon.process.pid), plugin_of(daemon)]
        views.append((processes, lines, await daemon.get("/v1/agents")))
        assert await daemon.stop() == 0
        daemon.notes.close()
    forked, cold = ([v.replace(str(folder), "") for v in map(str, view)] for view in views)
    assert forked == [text.replace("cold", "forked") for text in cold]


async def test_forked_daemon_takes_shorter_deadlines(folder: Path) -> None:
    daemon = Daemon(folder, "process")
    daemon.deadlines = {"agentd.http.connections.connection.HEADER_TIMEOUT_S": 0.2}
    await daemon.start()
    reader, writer = await asyncio.open_unix_connection(str(folder / "agentd.sock"))
    writer.write(b"GET /livez HTTP/1.1\r\n")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await daemon.close()


@pytest.mark.parametrize("name", ["rpc.connections.NO_SUCH_S", "pluginhost.instance.Pace.no_such"])
def test_unknown_deadlines_end_the_program(name: str) -> None:
    status = fork_server.spawn(
        "agentctl", ["--version"], os.environ, stdout=1, stderr=1, deadlines={f"agentd.{name}": 1}
    ).wait(10)
    assert status == 1


async def test_daemons_are_waited_for_from_several_threads(running: Forked) -> None:
    ends = [asyncio.to_thread(running.wait, 20) for _ in range(3)]
    running.terminate()
    assert len(set(await asyncio.gather(*ends))) == 1
