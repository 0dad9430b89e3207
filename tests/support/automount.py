"""An automount as autofs and systemd make it: nothing is mounted until somebody opens it.

https://www.kernel.org/doc/html/latest/filesystems/autofs.html. Run as a program it is the
automounter, in a process group of its own: what this group opens triggers nothing.
"""

import ctypes
import fcntl
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_READY, _FAIL = 0x9360, 0x9361
_PACKET_BYTES = 304
"""Size of `autofs_v5_packet_union`, as a multiple of eight."""


@contextmanager
def automount(path: Path) -> Iterator[None]:
    """Make a folder an automount: each trigger mounts a tmpfs with one file, `content`."""
    command = [sys.executable, __file__, str(path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", "no autofs on this host"
        yield
    finally:
        process.terminate()
        process.wait(10)
        assert process.stdout is not None
        process.stdout.close()
        while subprocess.run(["umount", "--lazy", path], stderr=-3, check=False).returncode == 0:
            pass


def expire(path: Path) -> None:
    """Unmount what a trigger mounted, as an automounter does after an idle time."""
    subprocess.run(["umount", path], check=True)


def is_triggered(path: Path) -> bool:
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return any(line.split()[1:3] == [str(path), "tmpfs"] for line in lines)


def _serve(path: str) -> None:
    reader, writer = os.pipe()
    options = f"fd={writer},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
    if ctypes.CDLL(None).mount(b"test", path.encode(), b"autofs", 0, options.encode()) != 0:
        sys.exit("autofs cannot be mounted")
    os.close(writer)
    root = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    print("ready", flush=True)
    while packet := os.read(reader, _PACKET_BYTES):
        _, _, token = struct.unpack_from("iiI", packet)
        mounted = subprocess.run(["mount", "-t", "tmpfs", "none", path], check=False)
        Path(path, "content").write_text("hello\n")
        fcntl.ioctl(root, _READY if mounted.returncode == 0 else _FAIL, token)


if __name__ == "__main__":
    _serve(sys.argv[1])
