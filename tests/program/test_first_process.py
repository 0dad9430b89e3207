"""The first process of a pid namespace, which a container without an init is."""

import os
import signal
import subprocess
import sys

import pytest

from agentd.host.processes import read_children
from agentd.program.first_process import leave_first_process

pytestmark = pytest.mark.needs("root")
UNSHARE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
BEGIN = "from agentd.program.first_process import leave_first_process; leave_first_process()\n"


def start(script: str, **environ: str) -> subprocess.Popen[str]:
    command = [*UNSHARE, sys.executable, "-c", BEGIN + script]
    env = {**os.environ, **environ}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(78)", 78),
        ("import os; os.abort()", 134),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
    ids=["done", "refused", "aborted", "killed"],
)
def test_process_1_ends_with_the_status_of_its_child(script: str, status: int) -> None:
    with start(script) as process:
        assert process.wait(20) == status


def test_orphans_are_reaped_and_own_children_are_not() -> None:
    script = """
import os, subprocess, sys, time
own = subprocess.Popen(["sh", "-c", "exit 7"])
orphan = subprocess.run(["sh", "-c", "sleep 0 & echo $!"], stdout=subprocess.PIPE).stdout
while os.path.exists(f"/proc/{int(orphan)}"):
    time.sleep(0.01)
print(own.wait(), os.getppid())
"""
    with start(script) as process:
        assert process.communicate(timeout=20)[0] == "7 1\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_signals_are_passed_on(number: signal.Signals) -> None:
    script = f"""
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, [{number:d}])
print("ready", flush=True)
signal.sigwait([{number:d}])
raise SystemExit(5)
"""
    with start(script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (first,) = read_children(process.pid)
        os.kill(first, number)
        assert process.wait(20) == 5


def test_hangup_before_the_child_has_begun_does_not_end_it() -> None:
    script = """
import os, runpy, signal, sys
fork = os.fork
def fork_after_hangup():
    os.kill(1, signal.SIGHUP)
    return fork()
os.fork = fork_after_hangup
sys.argv = ["agentd", "run", "--config", "/nonexistent"]
runpy.run_module("agentd", run_name="__main__", alter_sys=True)
"""
    command = [*UNSHARE, sys.executable, "-c", script]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 78


def test_variables_of_a_manager_name_the_child() -> None:
    script = 'import os; print(os.environ["LISTEN_PID"] == str(os.getpid()), os.getpgrp() > 1)'
    with start(script, LISTEN_PID="1") as process:
        assert process.communicate(timeout=20)[0] == "True True\n"


def test_another_process_stays_as_it_is() -> None:
    before = os.getpid()
    leave_first_process()
    assert os.getpid() == before
