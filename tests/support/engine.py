"""A Docker Engine of the test run's own, or a stub; a developer's engine is never touched."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

IMAGE = "agentd-test:1"
NEEDS = ("root", "docker")
STUB = Path(__file__).parents[2] / "benchmarks" / "stand_in.py"
STUB_TIMEOUT_S = 30


class Engine:
    """dockerd with folders of its own, live-restore on, and one small image.

    `programs` is where another engine than the installed one is unpacked; `cdi` lets it take
    names of the Container Device Interface, from specifications in `cdi_specs`. With
    `containerd_store` its images are containerd's.
    """

    def __init__(
        self,
        folder: Path,
        programs: Path | None = None,
        *,
        cdi: bool = False,
        live_restore: bool = True,
        own_containerd: bool = False,
        containerd_store: bool = False,
    ) -> None:
        self.folder = folder
        self.live_restore = live_restore
        self._own_containerd = own_containerd
        self._containerd: subprocess.Popen[bytes] | None = None
        self.cdi_specs = folder / "cdi"
        self._programs = programs
        self._config = {"features": {"cdi": True}, "cdi-spec-dirs": [str(self.cdi_specs)]}
        if not cdi:
            self._config = {}
        self._storage_driver = "overlay2"
        if containerd_store:
            self._config = {"features": {"containerd-snapshotter": True}}
            self._storage_driver = "overlayfs"
        self.socket = folder / "docker.sock"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.cdi_specs.mkdir(exist_ok=True)
        (self.folder / "none.json").write_text(json.dumps(self._config))
        env = dict(os.environ)
        if self._programs is not None:
            found = [self._programs / "usr/sbin", self._programs / "usr/bin"]
            env["PATH"] = ":".join([*map(str, found), env["PATH"]])
        (self.folder / "docker.pid").unlink(missing_ok=True)
        if self._own_containerd and self._containerd is None:
            self._start_containerd(env)
        with (self.folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    shutil.which("dockerd", path=env["PATH"]) or "dockerd",
                    f"--data-root={self.folder}/data",
                    f"--exec-root={self.folder}/exec",
                    f"--host=unix://{self.socket}",
                    f"--pidfile={self.folder}/docker.pid",
                    f"--config-file={self.folder}/none.json",
                    f"--storage-driver={self._storage_driver}",
                    "--iptables=false",
                    "--ip6tables=false",
                    "--bridge=none",
                    *(["--live-restore"] if self.live_restore else []),
                    *([f"--containerd={self._address}"] if self._own_containerd else []),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=env,
            )
        self._wait()

    @property
    def _address(self) -> Path:
        return self.folder / "containerd.sock"

    def _start_containerd(self, env: dict[str, str]) -> None:
        """Run containerd apart, so that it outlives a dockerd that is killed."""
        (self.folder / "containerd.toml").write_text(
            f'version = 2\nroot = "{self.folder}/c-root"\nstate = "{self.folder}/c-state"\n'
            f'disabled_plugins = ["io.containerd.grpc.v1.cri"]\n'
            f'[grpc]\naddress = "{self._address}"\n'
        )
        with (self.folder / "containerd.log").open("ab") as log:
            self._containerd = subprocess.Popen(
                ["containerd", f"--config={self.folder}/containerd.toml"],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=env,
            )
        deadline = time.monotonic() + 30
        while not self._address.exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _wait(self) -> None:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if self.call("GET", "/_ping", raw=True) == b"OK":
                    return
            except OSError:
                pass
            if self._process is not None and self._process.poll() is not None:
                break
            time.sleep(0.05)  # the engine says nowhere that it is ready
        tail = (self.folder / "dockerd.log").read_text()[-3000:]
        pytest.fail(f"dockerd did not start:\n{tail}")

    def stop(self, signal_number: int = 15) -> None:
        if self._process is not None:
            self._process.send_signal(signal_number)
            self._process.wait(30)
            self._process = None

    def end(self) -> None:
        """Stop for good, containerd too, and unmount the data, which dockerd leaves mounted."""
        self.stop()
        if self._containerd is not None:
            self._containerd.terminate()
            self._containerd.wait(30)
            self._containerd = None
        command = ["umount", "--lazy", self.folder / "data"]
        subprocess.run(command, stderr=subprocess.DEVNULL, check=False)

    def call(self, method: str, path: str, body: Any = None, *, raw: bool = False) -> Any:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.socket))
        data = body if isinstance(body, bytes) else (json.dumps(body).encode() if body else None)
        kind = "application/x-tar" if isinstance(body, bytes) else "application/json"
        connection.request(method, path, data, {"Content-Type": kind})
        content = connection.getresponse().read()
        connection.close()
        return content if raw else (json.loads(content) if content else None)

    def import_image(
        self, name: str = IMAGE, changes: str = "", programs: Mapping[str, str] | None = None
    ) -> None:
        repository, _, tag = name.partition(":")
        path = f"/images/create?fromSrc=-&repo={repository}&tag={tag}{changes}"
        self.call("POST", path, rootfs(programs), raw=True)

    def containers(self) -> list[dict[str, Any]]:
        return self.call("GET", "/containers/json?all=1")

    def clean(self) -> None:
        for container in self.containers():
            self.call("DELETE", f"/containers/{container['Id']}?force=1&v=1", raw=True)


def rootfs(programs: Mapping[str, str] | None = None) -> bytes:
    """A root folder of busybox, the links to its applets, and scripts by their path."""
    path = shutil.which("busybox") or ""
    applets = subprocess.run([path, "--list"], capture_output=True, text=True, check=True).stdout
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(os.path.realpath(path), "bin/busybox")
        for applet in applets.split():
            if applet != "busybox":
                link = tarfile.TarInfo(f"bin/{applet}")
                link.type, link.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(link)
        for name, script in (programs or {}).items():
            file = tarfile.TarInfo(name)
            file.mode, file.size = 0o755, len(script.encode())
            tar.addfile(file, BytesIO(script.encode()))
        for folder in ("tmp", "etc", "proc", "sys", "dev"):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777
            tar.addfile(entry)
    return buffer.getvalue()


@contextmanager
def stub_engine(socket: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run the engine of `benchmarks/stand_in.py`, which keeps containers in memory and counts."""
    process = subprocess.Popen([sys.executable, STUB, socket])
    try:
        end = time.monotonic() + STUB_TIMEOUT_S
        while not socket.exists():
            assert process.poll() is None, f"{STUB.name} ended with status {process.returncode}"
            assert time.monotonic() < end, f"{STUB.name} does not listen on {socket}"
            time.sleep(0.02)
        yield process
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def started_engine(**options: Any) -> Iterator[Engine]:
    """Run an engine in a folder of its own, with the image; the test leaves no containers."""
    folder = Path(tempfile.mkdtemp(prefix="agentd-engine-", dir="/tmp"))
    running = Engine(folder, **options)
    try:
        running.start()
        running.import_image()
        yield running
        running.clean()
    finally:
        running.end()
        shutil.rmtree(folder, ignore_errors=True)
