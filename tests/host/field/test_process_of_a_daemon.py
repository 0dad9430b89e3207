"""A daemon in the process that it was given: signals, variables of Python, and a hidden `/proc`."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentd.client import AsyncClient
from agentd.program.process import STRAY_SIGNALS, python_command
from support.daemon import Daemon

CONFIGURES_ITS_LOG = "agentd.log.configure"
DAEMONS = {
    "agentd run": ("agentd.__main__:main", CONFIGURES_ITS_LOG),
    "agentd-fleet gateway": ("agentd_fleet.cli:agentd_fleet", CONFIGURES_ITS_LOG),
    "agentd-fleet join": ("agentd_fleet.join.publisher:main", CONFIGURES_ITS_LOG),
    "agentd-slurm sync": ("agentd_slurm.cli:agentd_slurm", "agentd_slurm.commands.sync.Notifier"),
}
"""The program and an early step of each daemon; systemd restarts none that ends of SIGHUP."""
STRAY_AT_EARLY_STEP = """
import importlib, os, signal, sys

def be_struck(*_, **__):
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
        os.kill(os.getpid(), number)
    os._exit(7)

module, _, name = sys.argv.pop(1).rpartition(".")
setattr(importlib.import_module(module), name, be_struck)
program, _, function = sys.argv.pop(1).partition(":")
getattr(importlib.import_module(program), function)()
"""
STRAY_AT_FIRST_IMPORT = """
import importlib, os, signal, sys

class First:
    def find_spec(self, name, path, target=None):
        sys.meta_path.remove(self)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            os.kill(os.getpid(), number)

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a test may run under nohup
main = importlib.import_module(sys.argv.pop(1)).main
sys.meta_path.insert(0, First())
main()
"""
"""Send stray signals while the program imports its first library."""
HIDDEN = {
    "hidden": "mount -t tmpfs none /proc/sys",
    "empty": "mount --bind /dev/null /proc/sys/kernel/random/boot_id",
}


@pytest.fixture
async def daemon(folder: Path) -> AsyncIterator[Daemon]:
    """agentd on the process runtime, not started yet."""
    made = Daemon(folder, "process")
    yield made
    await made.close()


async def run_some_requests(daemon: Daemon) -> None:
    """Make requests of each kind, and check that they succeed."""
    kernel = await daemon.running()
    path = f"/v1/kernels/{kernel['kernel_id']}"
    for readable in ("/readyz", "/v1/node", "/v1/kernels", path, f"{path}/stats", "/metrics"):
        assert (await daemon.call("GET", readable)).status == 200
    assert (await daemon.call("POST", f"{path}/stop")).status == 200
    assert (await daemon.call("DELETE", path)).status == 204


def test_stray_signals_during_the_imports_are_survived(tmp_path: Path) -> None:
    words = ["agentd.__main__", "run", "--config", str(tmp_path / "missing.toml")]
    done = subprocess.run(
        [sys.executable, "-c", STRAY_AT_FIRST_IMPORT, *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "missing.toml: cannot be read" in done.stderr) == (78, True)


@pytest.mark.parametrize("command", DAEMONS)
def test_every_daemon_survives_stray_signals(command: str, tmp_path: Path) -> None:
    main, step = DAEMONS[command]
    (tmp_path / "agent.toml").write_text('[node]\nid = "n"\n')
    done = subprocess.run(
        [sys.executable, "-c", STRAY_AT_EARLY_STEP, step, main, *command.split()[1:]],
        env={**os.environ, "AGENTD_CONFIG": str(tmp_path / "agent.toml")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 7, done.stderr


async def test_stray_signals_do_not_end_a_daemon(daemon: Daemon) -> None:
    await daemon.start()
    for number in STRAY_SIGNALS:
        daemon.process.send_signal(number)
    await daemon.until_logged("daemon.reloaded")
    await run_some_requests(daemon)
    assert await daemon.stop() == 0


async def test_hangup_before_the_start_is_a_reload_after_it(daemon: Daemon) -> None:
    daemon.configure()
    daemon.program = ("-c", STRAY_AT_FIRST_IMPORT, "agentd.__main__")
    await daemon.start()
    await daemon.until_logged("daemon.reloaded")


async def test_warnings_as_errors_fail_no_request(daemon: Daemon) -> None:
    await daemon.start(PYTHONWARNINGS="error")
    await run_some_requests(daemon)
    assert "Warning" not in daemon.log


async def test_python_variables_of_a_user_reach_no_isolated_part(
    daemon: Daemon, tmp_path: Path
) -> None:
    """Start as the packaged command does; plugins and execs are processes of their own."""
    for module in ("msgspec", "aiohttp", "click"):
        (tmp_path / f"{module}.py").write_text("raise SystemExit('of a user')")
    daemon.program = ("-I", "-m", "agentd")
    await daemon.start(PYTHONPATH=str(tmp_path), PYTHONHOME="/nowhere", PYTHONWARNINGS="error")
    kernel = await daemon.running(slots={"cuda.device": 1})
    await run_some_requests(daemon)
    async with (
        AsyncClient(daemon.folder / "agentd.sock") as client,
        client.exec(kernel["kernel_id"], ["true"]) as running,
    ):
        assert [output async for output in running] == []
    assert running.exit_code == 0


@pytest.mark.parametrize("flag", ["-I", "-P", "-B"])
def test_python_command_is_isolated_as_its_parent(flag: str, tmp_path: Path) -> None:
    """No part imports from the working directory, and one of an isolated program no variable."""
    code = "from agentd.program.process import python_command; print(*python_command())"
    done = subprocess.run(
        [sys.executable, flag, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [sys.executable, "-I" if flag == "-I" else "-P"]
    (tmp_path / "click.py").write_text("raise SystemExit('of a user')")
    subprocess.run([*python_command(), "-c", "import click"], cwd=tmp_path, check=True)


@pytest.mark.needs("root")
@pytest.mark.parametrize("case", HIDDEN)
@pytest.mark.parametrize("command", ["run", "check-config", "plan"])
def test_boot_id_that_cannot_be_read_is_refused(daemon: Daemon, case: str, command: str) -> None:
    daemon.configure()
    script = f'{HIDDEN[case]} && exec "$@"'
    words = [sys.executable, "-m", "agentd", command, "--config", str(daemon.config_file)]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, "sh", *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if command == "plan":
        assert done.returncode == 0
        return
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "/proc/sys/kernel/random/boot_id is hidden or empty; without it" in done.stderr
