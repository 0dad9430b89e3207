"""A virtual machine that is a compute node: Debian 12 under QEMU, without a network.

    python tests/node/machine.py boot          make the image if need be, boot, install the package
    python tests/node/machine.py run COMMAND   run a command in it, as root
    python tests/node/machine.py off           end it

The image is made once for what goes in (`PACKAGES`), and kept in a cache; each machine writes to a
copy of its own. What is tested comes on a second disk, read-only, as /payload: the packages, the
tests, and what the tests import. Commands go over a virtio-serial port, so they go on working
across reboots.
"""

import contextlib
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
SIMULATED = REPOSITORY / "plugins" / "sim"
PACKAGES = (
    "systemd", "systemd-sysv", "systemd-oomd", "dbus", "dbus-user-session", "libpam-systemd",
    "apparmor", "python3", "docker.io", "runc", "containerd", "busybox-static", "iproute2",
    "procps", "kmod", "util-linux", "ca-certificates", "linux-image-cloud-amd64",
    "initramfs-tools", "sudo", "man-db", "bash-completion", "gcc", "libc6-dev",
)  # fmt: skip
TESTED_WITH = (
    "hypothesis>=6.100",
    "pytest>=8.3",
    "pytest-asyncio>=1.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
)
BOOT_S = 400
CACHE = Path(os.environ.get("AGENTD_NODE_CACHE", Path.home() / ".cache" / "agentd-node"))


class MachineError(Exception):
    """The machine does not do as it should; the message has what it said."""


@dataclass
class Done:
    """What a command in the machine said."""

    status: int
    output: str


class Machine:
    """One virtual machine, in a folder of its own."""

    def __init__(self, folder: Path, image: Path, payload: Path) -> None:
        self.folder, self.image, self.payload = folder, image, payload
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, *, memory_mib: int = 3072, append: str = "") -> None:
        """Switch it on, with the disk as it is, and wait until it takes commands."""
        disk = self.folder / "disk.qcow2"
        if not disk.exists():
            backing = ["-b", str(self.image / "disk.img"), "-F", "raw"]
            _run("qemu-img", "create", "-q", "-f", "qcow2", *backing, str(disk))
        (self.folder / "control.sock").unlink(missing_ok=True)
        kernel = (
            f"root=/dev/vda rw console=ttyS0 quiet systemd.show_status=0 mitigations=off {append}"
        )
        command = [
            "qemu-system-x86_64", "-accel", os.environ.get("AGENTD_NODE_ACCEL", "tcg,thread=multi"),
            "-cpu", "max", "-smp", "2", "-m", str(memory_mib), "-display", "none", "-net", "none",
            "-kernel", str(self.image / "vmlinuz"), "-initrd", str(self.image / "initrd.img"),
            "-append", kernel,
            # Not cache=unsafe: what the guest has synced outlives a power cut, as the image does.
            "-drive", f"file={disk},if=virtio,format=qcow2,cache=writeback",
            "-drive", f"file={self.payload},if=virtio,format=raw,readonly=on",
            "-device", "virtio-serial",
            "-chardev", f"socket,id=control,path={self.folder}/control.sock,server=on,wait=off",
            "-device", "virtserialport,chardev=control,name=control",
            "-device", "virtio-rng-pci",
            "-serial", f"file:{self.folder}/console.log", "-pidfile", f"{self.folder}/qemu.pid",
        ]  # fmt: skip
        with (self.folder / "qemu.log").open("wb") as log:
            started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not (self.folder / "control.sock").exists():
            if started.poll() is not None:
                raise MachineError(f"QEMU: {(self.folder / 'qemu.log').read_text()}")
            time.sleep(0.1)
        self.until_up()

    def until_up(self) -> None:
        """Wait until it takes commands, and all that its boot begins has begun."""
        end = time.monotonic() + BOOT_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError, MachineError):
                self.must("true", 20)  # what is said before anybody listens may be lost
                done = self.run("systemctl is-system-running --wait || true", timeout_s=BOOT_S)
                if done.output.strip() in ("running", "degraded"):
                    return
            time.sleep(0.5)
        raise MachineError(f"it does not answer; see {self.folder}/console.log")

    def run(self, command: str, timeout_s: float = 120) -> Done:
        """Run a command as root, and return its status and output."""
        order = {"id": str(uuid.uuid4()), "command": command, "timeout": timeout_s}
        with socket.socket(socket.AF_UNIX) as port:
            port.settimeout(timeout_s + 30)
            port.connect(str(self.folder / "control.sock"))
            port.sendall((json.dumps(order) + "\n").encode())
            unread = b""
            while chunk := port.recv(65536):
                *lines, unread = (unread + chunk).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):
                        answer = json.loads(line)
                        if answer.get("id") == order["id"]:
                            return Done(answer["status"], answer["output"])
        raise MachineError("it was switched off meanwhile")

    def must(self, command: str, timeout_s: float = 120) -> str:
        """Run a command that has to succeed; return what it printed."""
        done = self.run(command, timeout_s)
        if done.status:
            raise MachineError(f"{command}: status {done.status}\n{done.output[-8000:]}")
        return done.output

    def reboot(self) -> None:
        """Reboot it as an operator would."""
        before = self.must("cat /proc/sys/kernel/random/boot_id")
        self.run("systemd-run --on-active=0.5 systemctl reboot")
        end = time.monotonic() + BOOT_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError, MachineError):
                if self.run("cat /proc/sys/kernel/random/boot_id", 20).output != before:
                    return self.until_up()
            time.sleep(0.5)
        raise MachineError("it did not come back")

    def power_off(self) -> float:
        """Have it power itself off; return how many seconds that took."""
        begun = time.monotonic()
        with self._process() as process:
            self.run("systemd-run --on-active=0.1 systemctl poweroff")
            _until_ended(process)
        return time.monotonic() - begun

    def pull_plug(self) -> None:
        """End it at once, as a power cut would; one that is off stays so."""
        with contextlib.suppress(ProcessLookupError, FileNotFoundError), self._process() as process:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            _until_ended(process)
            (self.folder / "qemu.pid").unlink()

    @contextlib.contextmanager
    def _process(self) -> Iterator[int]:
        """Give the running machine's process, as a descriptor (pidfd_open(2))."""
        process = os.pidfd_open(int((self.folder / "qemu.pid").read_text()))
        try:
            yield process
        finally:
            os.close(process)


def _until_ended(process: int) -> None:
    """Wait until all of a process's threads are gone, and with the last one what it has locked."""
    if not select.select([process], [], [], BOOT_S)[0]:
        raise MachineError("it does not end")


def image() -> Path:
    """Return the folder with a bootable disk of Debian 12, made if it is not there."""
    parts = [*PACKAGES, *((HERE / name).read_text() for name in ("build-image", "guest.py"))]
    folder = CACHE / f"image-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        _run(str(HERE / "build-image"), str(folder), ",".join(PACKAGES))
        (folder / "ready").touch()
    return folder


def payload() -> Path:
    """Return a disk image with the packages, the tests, and what they import, made anew."""
    folder = CACHE / "payload"
    content = folder / "content"
    shutil.rmtree(content, ignore_errors=True)
    content.mkdir(parents=True)
    _run(str(REPOSITORY / "packaging" / "build-deb"), str(content))
    pip = [sys.executable, "-m", "pip"]
    _run(*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(content), f"{SIMULATED}")
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "tests", content / "tests", ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", content)
    libraries = folder / "libraries"
    if not libraries.exists():
        _run(*pip, "install", "--quiet", "--target", str(libraries), *TESTED_WITH)
    shutil.copytree(libraries, content / "libraries", ignore=ignored)
    disk = folder / "payload.img"
    disk.unlink(missing_ok=True)
    _run("truncate", "-s", "256M", str(disk))
    _run("mkfs.ext4", "-q", "-F", "-d", str(content), str(disk))
    return disk


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"{' '.join(command[:3])} …: {(done.stdout + done.stderr)[-4000:]}")


def ready_machine(folder: Path) -> Machine:
    """Return a machine that has booted, with the package installed and not configured."""
    machine = Machine(folder, image(), payload())
    machine.start()
    machine.must("mkdir -p /payload && mount -o ro /dev/vdb /payload")
    machine.must("echo '/dev/vdb /payload ext4 ro 0 0' >>/etc/fstab")
    machine.must("dpkg -i /payload/agentd_*.deb", timeout_s=300)
    return machine


def running_machine(folder: Path) -> Machine:
    """Return a machine that was booted before, in this folder."""
    return Machine(folder, image(), CACHE / "payload" / "payload.img")


def main() -> None:
    """Do what the command line says, to the machine in $AGENTD_NODE_FOLDER."""
    folder = Path(os.environ.get("AGENTD_NODE_FOLDER", CACHE / "machine"))
    word, *rest = sys.argv[1:] or ["boot"]
    if word == "boot":
        ready_machine(folder)
        return
    machine = running_machine(folder)
    if word == "off":
        machine.pull_plug()
        return
    done = machine.run(" ".join(rest), timeout_s=600)
    sys.stdout.write(done.output)
    sys.exit(done.status)


if __name__ == "__main__":
    main()
