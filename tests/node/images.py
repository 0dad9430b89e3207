"""Disks and snapshots that the virtual machines of the node tests start from.

    image      Debian 12 with what a node needs, by the packages that go in
    packages   agentd's packages, by the sources that they are built from
    payload    the packages, the tests and what the tests import: a second disk, read-only
    booted     a machine that has booted, by image
    snapshot   the same with the package installed, by packages

Each is made once, kept in a cache and found by a hash of its ingredients. Making one removes its
predecessors, except those that another process still uses.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from node.machine import ARGUMENTS, Machine, run

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
CACHE = Path(os.environ.get("AGENTD_NODE_CACHE", Path.home() / ".cache" / "agentd-node"))
PACKAGES = (
    "systemd", "systemd-sysv", "systemd-oomd", "dbus", "dbus-user-session", "libpam-systemd",
    "apparmor", "python3", "docker.io", "runc", "containerd", "busybox-static", "iproute2",
    "procps", "kmod", "util-linux", "ca-certificates", "linux-image-cloud-amd64",
    "initramfs-tools", "sudo", "man-db", "bash-completion", "gcc", "libc6-dev",
)  # fmt: skip
BUILT_FROM = (
    "LICENSE", "configs", "fleet", "packaging", "plugins", "pyproject.toml", "src", "systemd",
)  # fmt: skip
TESTED_WITH = (
    "hypothesis>=6.100",
    "pytest>=8.3",
    "pytest-asyncio>=1.0",
    "pytest-timeout>=2.3",
    "pytest-xdist>=3.6",
)
PAYLOAD_SIZE = "256M"
"""One size for all payloads: a snapshot keeps that of the disk that it saw."""
IGNORED = ("__pycache__", "*.egg-info", "build")


@functools.cache
def image() -> Path:
    """Return the folder with a bootable disk of Debian 12, its kernel and its initrd."""
    scripts = [(HERE / name).read_text() for name in ("build-image", "guest.py")]
    return _made(
        "image",
        [*PACKAGES, *scripts],
        lambda folder: run(str(HERE / "build-image"), str(folder), ",".join(PACKAGES)),
    )


@functools.cache
def packages() -> Path:
    """Return the folder with the packages of this checkout."""

    def make(folder: Path) -> None:
        run(str(REPOSITORY / "packaging" / "build-deb"), str(folder))
        simulated = str(REPOSITORY / "plugins" / "sim")
        _pip("wheel", "--no-deps", "--wheel-dir", str(folder), simulated)
        _newer(next(folder.glob("agentd_*.deb")), folder / "newer")

    sources = [*(REPOSITORY / name for name in BUILT_FROM), Path(__file__)]
    return _made("packages", _contents(sources), make)


def _newer(package: Path, folder: Path) -> None:
    """Put the same package with a higher version into a folder."""
    content = folder / "content"
    folder.mkdir()
    run("dpkg-deb", "-R", str(package), str(content))
    control = content / "DEBIAN" / "control"
    newer = re.sub("^Version: .*", r"\g<0>+newer", control.read_text(), flags=re.MULTILINE)
    control.write_text(newer)
    run("dpkg-deb", "-Znone", "--root-owner-group", "-b", str(content), str(folder / package.name))
    shutil.rmtree(content)


@functools.cache
def payload() -> Path:
    """Return a disk with the packages, the tests, and what the tests import."""
    sources = [REPOSITORY / "tests", REPOSITORY / "pyproject.toml"]

    def make(folder: Path) -> None:
        content = folder / "content"
        shutil.copytree(packages(), content)
        ignored = shutil.ignore_patterns(*IGNORED)
        shutil.copytree(sources[0], content / "tests", ignore=ignored)
        shutil.copy(sources[1], content)
        shutil.copytree(_libraries(), content / "libraries", ignore=ignored)
        run("truncate", "-s", PAYLOAD_SIZE, str(folder / "disk.img"))
        run("mkfs.ext4", "-q", "-F", "-d", str(content), str(folder / "disk.img"))
        shutil.rmtree(content)

    return _made("payload", [packages().name, *_contents(sources)], make) / "disk.img"


def machine(folder: Path) -> Machine:
    """Return a machine in this folder, started before or not."""
    return Machine(folder, image(), payload())


def start_installed(new: Machine) -> None:
    """Start a new machine that has the package installed, and nothing configured."""
    new.start(snapshot=_snapshot())
    new.mount_payload()


@contextlib.contextmanager
def _to_save(folder: Path, snapshot: Path | None = None) -> Iterator[Machine]:
    """Start a machine; save its disk and its memory to the folder afterwards, and end it."""
    new = machine(folder / "machine")
    try:
        new.start(snapshot)
        new.mount_payload()
        yield new
        new.save(folder)
    finally:
        new.pull_plug()
        shutil.rmtree(new.folder)


def _snapshot() -> Path:
    """Return the folder with the disk and the memory of a machine with the package installed."""
    before = _booted()

    def make(folder: Path) -> None:
        with _to_save(folder, before) as booted:
            booted.must("dpkg -i /payload/agentd_*.deb", timeout_s=300)
            booted.must("agentd run --help && man agentd >/dev/null")  # their files are read

    return _made("snapshot", [before.name, packages().name], make)


def _booted() -> Path:
    """Return the folder with the disk and the memory of a machine that has booted."""

    def make(folder: Path) -> None:
        with _to_save(folder) as new:
            new.must("rm -f /var/lib/man-db/auto-update")  # an index at each install takes seconds

    qemu = subprocess.run(
        ["qemu-system-x86_64", "--version"], capture_output=True, text=True, check=True
    )
    machine_code = (HERE / "machine.py").read_text()
    return _made("booted", [image().name, qemu.stdout, *ARGUMENTS, machine_code], make)


def _libraries() -> Path:
    return _made(
        "libraries",
        TESTED_WITH,
        lambda folder: _pip("install", "--target", str(folder), *TESTED_WITH),
    )


def _pip(*arguments: str) -> None:
    run(sys.executable, "-m", "pip", *arguments, "--quiet")


def _contents(paths: Iterable[Path]) -> list[str]:
    """Return names and hashes of the files below some paths."""
    found = []
    for path in paths:
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.relative_to(REPOSITORY)
            ignored = any(fnmatch(part, pattern) for part in name.parts for pattern in IGNORED)
            if file.is_file() and not ignored:
                found.append(f"{name} {hashlib.sha256(file.read_bytes()).hexdigest()}")
    return found


def _made(kind: str, ingredients: Iterable[str], make: Callable[[Path], None]) -> Path:
    """Return the folder of a kind with these ingredients, made if it is not in the cache.

    This process uses it from now on.
    """
    key = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
    folder = CACHE / f"{kind}-{key}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{kind}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            for old in CACHE.glob(f"{kind}-*"):
                _remove_unused(old)
            unfinished = CACHE / f"{kind}-unfinished"
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
        fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # until this process ends
    return folder


def _remove_unused(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(descriptor)
