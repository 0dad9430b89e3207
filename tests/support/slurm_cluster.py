"""A real Slurm cluster of the test's own: munge, slurmctld and some slurmds on this machine.

The daemons live in namespaces, with keys, sockets, folders and users of their own, and node names
that no other run has: they are part of the paths of cgroups. Every process is stopped by its pid.
Each slurmd has a mount namespace too, in which one path, `own`, is the folder of its node.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from support import other_users

ADDRESS = "10.99.0.1"
CONTROLLER_PORT = 6817
WAIT_S = 60.0
"""For what Slurm does within seconds on a quiet machine."""
NEW_MOUNTS = ("unshare", "--mount", "--propagation=slave")
CGROUPS = Path("/sys/fs/cgroup")

CONFIG = """
ClusterName=agentd
SlurmctldHost={host}({address})
SlurmctldPort={controller_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/slurmctld
SlurmdLogFile={folder}/log/%n
SlurmctldDebug=verbose
SlurmdDebug=verbose
ProctrackType=proctrack/cgroup
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
GresTypes=gpu
ReturnToService=2
PrologFlags=Alloc
SlurmdParameters=config_overrides
KillWait=2
CompleteWait=0
MessageTimeout=20
UnkillableStepTimeout=20
PrologEpilogTimeout=60
"""
"""`cred_expire` is also the delay of a requeued job: two minutes by default."""


class SlurmCluster:
    """One cluster below a folder; `gres` is a node's lines of gres.conf and its `Gres=`."""

    def __init__(self, folder: Path, nodes: int = 1) -> None:
        self.folder = folder
        mark = secrets.token_hex(3)
        self.nodes = [f"n{number}-{mark}" for number in range(1, nodes + 1)]
        self.extra: dict[str, str] = {}
        self.gres: dict[str, tuple[str, str]] = {}
        self.constrains_devices = "no"
        self.partitions = {"main": "Nodes=ALL Default=YES MaxTime=INFINITE State=UP"}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}
        self._namespace: subprocess.Popen[bytes] | None = None
        self.folders: dict[str, Path] = {}
        """The folder of each node, which its processes see as `own`."""
        self.own = folder / "own"
        for name in ("munge", "state", "spool", "run", "log", "etc", "users", "own"):
            (folder / name).mkdir()
        for node in self.nodes:
            (folder / "spool" / node).mkdir()

    @property
    def environment(self) -> dict[str, str]:
        """Return the environment of the Slurm commands."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "etc/slurm.conf"), "LANG": "C"}

    def configure(self) -> None:
        """Write slurm.conf, gres.conf and cgroup.conf."""
        etc = self.folder / "etc"
        filled = CONFIG.format(
            host=socket.gethostname(),
            address=ADDRESS,
            controller_port=CONTROLLER_PORT,
            folder=self.folder,
        )
        kept = (line for line in filled.splitlines() if line.partition("=")[0] not in self.extra)
        lines = [*kept, *(f"{key}={value}" for key, value in self.extra.items())]
        for number, node in enumerate(self.nodes):
            gres = self.gres.get(node, ("", ""))[1]
            where = f"NodeAddr={ADDRESS} Port={18001 + number} NodeHostname={socket.gethostname()}"
            lines.append(f"NodeName={node} {where} CPUs=16 {gres} State=UNKNOWN")
        lines += (f"PartitionName={name} {text}" for name, text in self.partitions.items())
        (etc / "slurm.conf").write_text("\n".join(lines) + "\n")
        (etc / "gres.conf").write_text(
            "".join(
                f"NodeName={node} {line}\n"
                for node, (text, _) in self.gres.items()
                for line in text.splitlines()
            )
        )
        (etc / "cgroup.conf").write_text(
            f"CgroupAutomount=no\nConstrainDevices={self.constrains_devices}\n"
        )

    def start(self) -> None:
        """Start everything and wait until each node is idle."""
        self.configure()
        self._enter_namespace()
        self._start_munge()
        self.start_controller()
        for node in self.nodes:
            self.start_node(node)
        self.until(self.are_idle, f"nodes are not idle: {self.run('sinfo', '-N', '-l')}")

    def _enter_namespace(self) -> None:
        words = [*other_users.mounts(self.folder / "users"), "echo", "exec sleep infinity"]
        self._namespace = subprocess.Popen(
            [*NEW_MOUNTS, "--net", "sh", "-ec", "\n".join(words)],
            stdout=subprocess.PIPE, cwd=self.folder,
        )  # fmt: skip
        assert self._namespace.stdout
        assert self._namespace.stdout.readline(), "the namespace is not set up"
        for command in ("link set lo up", f"addr add {ADDRESS}/32 dev lo"):
            self.run("ip", *command.split())

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        folder.chmod(0o711)
        (folder / "key").write_bytes(secrets.token_bytes(128))
        (folder / "key").chmod(0o600)
        files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log"}
        named = [f"--{option}={folder / name}" for option, name in files.items()]
        self._daemons["munged"] = self.spawn(
            "munged", "--foreground", "--force", "--num-threads=2",
            f"--seed-file={folder / 'seed'}", *named,
        )  # fmt: skip
        self.until((folder / "socket").exists, "munged has no socket")

    def start_controller(self) -> None:
        """Start slurmctld and wait until it answers."""
        self._daemons["slurmctld"] = self.spawn("slurmctld", "-D", "-f", self._config)
        self.until(lambda: self.succeeds("scontrol", "ping"), "slurmctld does not answer")

    def start_node(self, node: str, *options: str) -> None:
        """Start a slurmd; with the option `-b` it reports that the node was rebooted."""
        self._daemons[node] = self.spawn(
            *self._in_own(node), "slurmd", "-D", "-N", node, "-f", self._config, *options
        )

    @property
    def _config(self) -> str:
        return str(self.folder / "etc/slurm.conf")

    def pid(self, name: str) -> int:
        """Return the pid of a daemon: `munged`, `slurmctld` or a node."""
        return self._daemons[name].pid

    def kill(self, name: str, number: int = signal.SIGKILL) -> None:
        """Stop a daemon with a signal and wait for its end."""
        daemon = self._daemons.pop(name)
        daemon.send_signal(number)
        daemon.wait(30)

    def inside(self, *words: str | Path) -> list[str]:
        """Return a command line that runs in the cluster's namespaces and in its folder."""
        assert self._namespace
        there = ["nsenter", f"--target={self._namespace.pid}", "--net", "--mount", "--wd"]
        return [*there, *map(str, words)]

    def _in_own(self, node: str) -> list[str | Path]:
        """Return the beginning of a command line that sees the node's folder as `own`."""
        script = 'mount --bind "$0" "$1"; shift; exec "$@"'
        return [*NEW_MOUNTS, "sh", "-ec", script, self.folders[node], self.own]

    def _as_user(self, user: int) -> list[str | Path]:
        home = other_users.home_of(self.folder / "users", user)
        ids = [f"--reuid={user}", f"--regid={user}", "--init-groups"]
        return ["setpriv", *ids, "env", f"--chdir={home}", f"HOME={home}"]

    def spawn(self, *words: str | Path) -> subprocess.Popen[bytes]:
        """Start a daemon in the namespace."""
        with (self.folder / "log/daemons").open("ab") as log:
            return subprocess.Popen(
                self.inside(*words),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=self.environment, start_new_session=True, cwd=self.folder,
            )  # fmt: skip

    def run(
        self,
        *words: str | Path,
        check: bool = True,
        user: int | None = None,
        node: str | None = None,
    ) -> str:
        """Run a command in the namespaces, on a node if one is named; return what it prints."""
        done = self.complete(*words, user=user, node=node)
        assert not check or done.returncode == 0, (words, done.stdout, done.stderr, self.logs())
        return done.stdout

    def complete(
        self, *words: str | Path, user: int | None = None, node: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespaces to its end."""
        as_user = self._as_user(user) if user else []
        command = self.inside(*(self._in_own(node) if node else []), *as_user, *words)
        return subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.environment,
            stdin=subprocess.DEVNULL, timeout=WAIT_S, cwd=self.folder,
        )  # fmt: skip

    def succeeds(self, *words: str) -> bool:
        """Return whether a command exits with 0."""
        return self.complete(*words).returncode == 0

    def are_idle(self) -> bool:
        """Return whether every node waits for jobs."""
        states = self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split()
        return len(states) == len(self.nodes) and set(states) == {"idle"}

    def node_state(self, node: str) -> str:
        """Return a node's state and the reason for it."""
        return self.run("sinfo", "-h", "-N", "-n", node, "-o", "%T %E").strip()

    def submit(self, *options: str, script: str = "sleep 1000", user: int | None = None) -> str:
        """Submit a batch job and return its id."""
        home = other_users.home_of(self.folder / "users", user) if user else self.folder
        words = ["sbatch", "--parsable", f"--output={home}/out-%j", *options]
        return self.run(*words, "--wrap", script, user=user).strip()

    def job(self, job: str) -> Mapping[str, str]:
        """Return the fields of a job as `scontrol` shows them; empty once it is forgotten."""
        text = self.run("scontrol", "-o", "show", "job", job, check=False)
        return dict(word.partition("=")[::2] for word in text.split() if "=" in word)

    def state(self, job: str) -> str:
        """Return a job's state; empty once it is forgotten."""
        return self.job(job).get("JobState", "")

    def until_state(self, job: str, *states: str) -> Mapping[str, str]:
        """Wait for a job to be in one of these states."""
        self.until(lambda: self.state(job) in states, f"job {job} is not {states}")
        return self.job(job)

    def until_idle(self) -> None:
        """Wait until every node waits for jobs, which a node that is drained never does."""
        self.until(self.are_idle, "a node is not idle")

    def until_requeued(self, job: str) -> None:
        """Wait until a job was sent back to the queue."""
        self.until(lambda: int(self.job(job).get("Restarts", "0")) > 0, f"{job} is not requeued")

    def until(self, holds: Callable[[], object], text: str, within_s: float = WAIT_S) -> None:
        """Wait for something to hold."""
        end = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"after {within_s:g} s: {text}\n{self.logs()}")
            time.sleep(0.1)

    def logs(self) -> str:
        """Return the ends of all logs."""
        parts = []
        for file in sorted((self.folder / "log").iterdir()):
            lines = file.read_text(errors="replace").splitlines()[-40:]
            parts.append(f"--- {file.name}\n" + "\n".join(lines))
        if (self.folder / "etc/slurm.conf").exists() and self._namespace:
            parts.append(self.complete("squeue", "-o", "%i %T %r %N %k").stdout)
        return "\n".join(parts)

    def job_cgroups(self) -> Iterator[Path]:
        """Return the cgroups below which this cluster's jobs live."""
        for node in self.nodes:
            yield from CGROUPS.glob(f"*/slurm_{node}")
            yield from CGROUPS.glob(f"system.slice/{node}_slurmstepd.scope")

    def processes(self, job: str) -> list[int]:
        """Return the processes in the cgroups of a job."""
        return [
            int(pid)
            for cgroup in self.job_cgroups()
            for file in cgroup.glob(f"**/job_{job}/**/cgroup.procs")
            for pid in file.read_text().split()
        ]

    def stop(self) -> None:
        """End every job, daemon and leftover of the cluster, and remove its cgroups."""
        with contextlib.suppress(subprocess.SubprocessError, AssertionError):
            if "slurmctld" in self._daemons:
                self.run("scancel", "--state=PENDING", check=False)
                self.run("scancel", "--signal=KILL", "--full", "--state=RUNNING", check=False)
        for name in [*self.nodes, "slurmctld", "munged"]:
            if name in self._daemons:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.kill(name, signal.SIGTERM if name == "munged" else signal.SIGKILL)
        for _ in range(50):
            if not (left := [*self.steps(), *self.members()]):
                break
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        for cgroup in list(self.job_cgroups()):
            below = sorted(cgroup.glob("**/"), key=lambda path: len(path.parts), reverse=True)
            for path in below:
                with contextlib.suppress(OSError):
                    path.rmdir()
        if self._namespace:
            self._namespace.kill()
            self._namespace.wait()
            if self._namespace.stdout:
                self._namespace.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def members(self) -> Iterator[int]:
        """Return the processes in the cgroups of this cluster's jobs."""
        for cgroup in self.job_cgroups():
            for file in cgroup.glob("**/cgroup.procs"):
                yield from map(int, file.read_text().split())

    def steps(self) -> Iterator[int]:
        """Return the slurmstepds of this cluster: they are in its network namespace."""
        assert self._namespace
        own = Path(f"/proc/{self._namespace.pid}/ns/net").readlink()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_step = (process / "comm").read_bytes().startswith(b"slurmstepd")
                if is_step and (process / "ns/net").readlink() == own:
                    yield int(process.name)


def gres_lines(folder: Path, devices: Sequence[str]) -> tuple[str, str]:
    """Return gres.conf and `Gres=` for devices with stand-in files below a folder."""
    lines = []
    for device in devices:
        make_device(folder / device)
        lines.append(f"Name=gpu Type={device} File={folder / device}")
    return "\n".join(lines), "Gres=" + ",".join(f"gpu:{device}:1" for device in devices)


def make_device(file: Path) -> None:
    """Make a stand-in of a device file, if there is none: Slurm wants a character device.

    No driver can have its number, and no other stand-in in the folder has it.
    """
    file.parent.mkdir(exist_ok=True)
    number = os.makedev(4095, len(list(file.parent.iterdir())))
    with contextlib.suppress(FileExistsError):
        os.mknod(file, stat.S_IFCHR | 0o666, number)
