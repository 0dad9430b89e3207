"""A file for each device, locked by the workloads that use the device.

A workload locks the files of its devices without waiting, and holds them until its last process
has ended. So a device with two holders is seen from inside, at the moment at which it happens.
"""

import os
from pathlib import Path

COLLISION = 99
"""The exit status of a workload that met another holder."""
PYTHON = os.path.realpath("/usr/bin/python3")
"""The host's own, which kernels and jobs of any user can execute."""
WORKLOAD = """#!{python} -IS
import fcntl, os, sys
locks, seconds, devices, left_behind_s = sys.argv[1:]
for device in devices.split(",") if devices else ():
    file = os.open(f"{{locks}}/{{device}}", os.O_RDONLY)
    os.set_inheritable(file, True)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open(f"{{locks}}/collisions", "a") as collisions:
            collisions.write(f"{{os.getpid()}} met another holder of {{device}}\\n")
        sys.exit({collision})
if left_behind_s and os.fork() == 0:
    os.setsid()
    seconds = left_behind_s
os.execvp("sleep", ["sleep", seconds])
"""
"""One process from its start to its end: a child would hold the locks after the workload was
killed."""


class DeviceLocks:
    """The files of one node's devices, and the command that locks them."""

    def __init__(self, folder: Path, devices: int) -> None:
        self.folder = folder / "locks"
        self.folder.mkdir()
        self.folder.chmod(0o777)
        for name in (*(f"cuda{number}" for number in range(devices)), "collisions"):
            (self.folder / name).touch()
            (self.folder / name).chmod(0o666)
        self.program = folder / "workload"
        self.program.write_text(WORKLOAD.format(python=PYTHON, collision=COLLISION))
        self.program.chmod(0o755)

    def command(self, seconds: float, left_behind_s: float = 0) -> list[str]:
        """Return a command that holds the devices of its environment for some seconds.

        With `left_behind_s` a child of it holds them as well, for so long.
        """
        left = f"{left_behind_s:.2f}" if left_behind_s else "''"
        words = f'exec {self.program} {self.folder} {seconds:.2f} "$CUDA_VISIBLE_DEVICES" {left}'
        return ["sh", "-c", words]

    @property
    def collisions(self) -> list[str]:
        """The devices that had two holders."""
        return (self.folder / "collisions").read_text().splitlines()
