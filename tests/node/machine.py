"""A virtual machine that is a compute node: Debian 12 under QEMU, without a network.

It starts from a disk of `images.py`, or from a snapshot of a machine that has run; each machine
writes to a copy of its own. What is tested is on a second disk, read-only, at /payload. Commands
and requests go over a virtio-serial port, so they go on working across reboots.
"""

import contextlib
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BOOT_S = 400
PROBE_S, GRACE_S = 5, 10
"""Seconds that the guest has for a probe, and beyond a command's own time for any answer."""
ARGUMENTS = (
    "-accel", os.environ.get("AGENTD_NODE_ACCEL", "tcg,thread=multi"), "-cpu", "max,-erms",
    "-smp", "1", "-m", "3072", "-display", "none", "-net", "none", "-device", "virtio-serial",
    "-device", "virtserialport,chardev=control,name=control", "-device", "virtio-rng-pci",
)  # fmt: skip
"""Without ERMS Linux and glibc do not copy byte by byte, which QEMU would interpret."""
KERNEL = "root=/dev/vda rw console=ttyS0 quiet systemd.show_status=0 mitigations=off"


class MachineError(Exception):
    """The machine does not do as it should; the message has what it said."""


@dataclass
class Done:
    """The output of a command in the virtual machine."""

    status: int
    output: str


class Machine:
    """One virtual machine, in a folder of its own."""

    def __init__(self, folder: Path, image: Path, payload: Path) -> None:
        self.folder, self.image, self.payload = folder, image, payload
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, snapshot: Path | None = None) -> None:
        """Switch it on, with the disk as it is, and wait until it takes commands.

        With a snapshot a new machine goes on where the one that was saved stopped.
        """
        disk = self.folder / "disk.qcow2"
        if not disk.exists():
            frozen = snapshot / "disk.qcow2" if snapshot else self.image / "disk.img"
            backing = ["-b", str(frozen), "-F", frozen.suffix[1:].replace("img", "raw")]
            run("qemu-img", "create", "-q", "-f", "qcow2", *backing, str(disk))
        (self.folder / "control.sock").unlink(missing_ok=True)
        command = [
            "qemu-system-x86_64", *ARGUMENTS,
            "-kernel", str(self.image / "vmlinuz"), "-initrd", str(self.image / "initrd.img"),
            "-append", KERNEL,
            # Not cache=unsafe: what the guest has synced outlives a power cut, as the image does.
            "-drive", f"file={disk},if=virtio,format=qcow2,cache=writeback",
            "-drive", f"file={self.payload},if=virtio,format=raw,readonly=on",
            "-chardev", f"socket,id=control,path={self.folder}/control.sock,server=on,wait=off",
            "-qmp", f"unix:{self.folder}/monitor.sock,server=on,wait=off",
            "-serial", f"file:{self.folder}/console.log", "-pidfile", f"{self.folder}/qemu.pid",
        ]  # fmt: skip
        if snapshot:
            command += ["-incoming", f"exec:cat {shlex.quote(str(snapshot / 'memory'))}"]
        with (self.folder / "qemu.log").open("wb") as log:
            started = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not (self.folder / "control.sock").exists():
            if started.poll() is not None:
                raise MachineError(f"QEMU: {(self.folder / 'qemu.log').read_text()}")
            time.sleep(0.1)
        self.until_up()
        if snapshot:
            self.must(f"date --set=@{time.time():.0f}")

    def save(self, to: Path) -> None:
        """Stop it; write its memory and its disk to a folder, and end it."""
        self.must("umount /payload && sync")
        with contextlib.closing(_Monitor(self.folder / "monitor.sock")) as monitor:
            monitor.do("migrate-set-parameters", **{"max-bandwidth": 1 << 40})
            monitor.do("migrate", uri=f"exec:cat >{shlex.quote(str(to / 'memory'))}")
            while (state := monitor.do("query-migrate")["status"]) != "completed":
                if state in ("failed", "cancelled"):
                    raise MachineError(f"the memory was not written: {state}")
                time.sleep(0.1)
        self.pull_plug()
        (self.folder / "disk.qcow2").rename(to / "disk.qcow2")

    def mount_payload(self) -> None:
        """Mount the second disk at /payload, now and after reboots."""
        line = "/dev/vdb /payload ext4 ro 0 0"
        self.must(f"grep -q /payload /etc/fstab || echo '{line}' >>/etc/fstab")
        self.must("mkdir -p /payload && systemctl daemon-reload && mount /payload")

    def until_up(self) -> None:
        """Wait until it takes commands, and all that its boot begins has begun."""
        end = time.monotonic() + BOOT_S
        while time.monotonic() < end:
            with contextlib.suppress(OSError, MachineError):
                # One that is sent before anybody listens may be lost, so none waits for the boot.
                done = self.run("systemctl is-system-running", PROBE_S)
                if done.output.strip() in ("running", "degraded"):
                    return
            time.sleep(0.5)
        raise MachineError(f"it does not answer; see {self.folder}/console.log")

    def run(self, command: str, timeout_s: float = 120) -> Done:
        """Run a command as root, and return its status and output."""
        answer = self._call({"command": command, "timeout": timeout_s}, timeout_s)
        return Done(answer["status"], answer["output"])

    def request(self, method: str, path: str, body: str, timeout_s: float) -> tuple[int, str]:
        """Make a request on the daemon's main socket; return the status and the content.

        The status is 0 where no daemon answers, and the content says why.
        """
        request = {"method": method, "path": path, "body": body}
        answer = self._call({**request, "timeout": timeout_s}, timeout_s)
        return answer["status"], answer["output"]

    def _call(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send the guest something to do, and return its answer."""
        order["id"] = str(uuid.uuid4())
        with socket.socket(socket.AF_UNIX) as port:
            port.settimeout(timeout_s + GRACE_S)
            port.connect(str(self.folder / "control.sock"))
            port.sendall((json.dumps(order) + "\n").encode())
            unread = b""
            while chunk := port.recv(65536):
                *lines, unread = (unread + chunk).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):
                        answer: dict[str, Any] = json.loads(line)
                        if answer.get("id") == order["id"]:
                            return answer
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
                if self.run("cat /proc/sys/kernel/random/boot_id", PROBE_S).output != before:
                    return self.until_up()
            time.sleep(0.5)
        raise MachineError("it did not come back")

    def power_off(self) -> float:
        """Power the machine off from inside; return the seconds that took."""
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


class _Monitor:
    """QEMU's own commands (QMP) for one machine."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(path))
        self._lines = self._socket.makefile("r")
        self.do("qmp_capabilities")

    def do(self, command: str, **arguments: Any) -> Any:
        """Run a command; return what it returns."""
        self._socket.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
        for line in self._lines:
            answer = json.loads(line)
            if "error" in answer:
                raise MachineError(f"{command}: {answer['error']}")
            if "return" in answer:
                return answer["return"]
        raise MachineError(f"{command}: QEMU has ended")

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()
        self._socket.close()


def _until_ended(process: int) -> None:
    """Wait until all of a process's threads are gone, and with the last one what it has locked."""
    if not select.select([process], [], [], BOOT_S)[0]:
        raise MachineError("it does not end")


def run(*command: str) -> None:
    """Run a command of the host that has to succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MachineError(f"{' '.join(command[:3])} …: {(done.stdout + done.stderr)[-4000:]}")
