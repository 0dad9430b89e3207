"""Users of a test's mount namespace, who can run this Python wherever it is installed.

They are not in the host's /etc/passwd. A folder that only root may enter, such as /root, is hidden
in the namespace by an empty one, with this Python and the sources at their old places in it.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

ADA, EVE = 4711, 4712
NAMES = {ADA: "ada", EVE: "eve"}
GROUP = "users"
"""The group that all of them are in."""


def home_of(folder: Path, user: int) -> Path:
    """Return the home of a user; one of the host's has none."""
    return folder / "home" / NAMES[user] if user in NAMES else folder


def mounts(folder: Path) -> Iterator[str]:
    """Yield the shell commands of a new mount namespace; its files are below a folder."""
    for name in ("home", "hidden"):
        (folder / name).mkdir()
    for user in NAMES:
        home_of(folder, user).mkdir()
        os.chown(home_of(folder, user), user, user)
    for name, text in (("passwd", _passwd(folder)), ("group", _group())):
        (folder / name).write_text(text)
        yield shlex.join(["mount", "--bind", str(folder / name), f"/etc/{name}"])
    hidden = shlex.quote(str(folder / "hidden"))
    for private, below in _private_folders().items():
        old = shlex.quote(str(private))
        yield f"mount --rbind {old} {hidden}"
        yield f"mount -t tmpfs -o mode=755 tmpfs {old}"
        for path in sorted(below):
            there = shlex.quote(str(path))
            yield f"mkdir -p {there}"
            yield f"mount --rbind {hidden}/{shlex.quote(str(path.relative_to(private)))} {there}"
        yield f"umount --lazy {hidden}"


def _passwd(folder: Path) -> str:
    rows = (
        f"{name}:x:{user}:{user}::{home_of(folder, user)}:/bin/sh\n" for user, name in NAMES.items()
    )
    return Path("/etc/passwd").read_text() + "".join(rows)


def _group() -> str:
    members = ",".join(NAMES.values())
    rows = []
    for line in Path("/etc/group").read_text().splitlines():
        more = ("" if line.endswith(":") else ",") + members
        rows.append(f"{line}{more}" if line.startswith(f"{GROUP}:") else line)
    rows += [f"{name}:x:{user}:" for user, name in NAMES.items()]
    return "\n".join(rows) + "\n"


def _private_folders() -> dict[Path, set[Path]]:
    """Return the folders that other users cannot enter, and what they need below each."""
    needed = {Path(sys.prefix), Path(sys.base_prefix), Path(sys.executable).resolve().parents[1]}
    needed |= {Path(entry) for entry in sys.path if Path(entry).is_dir()}
    found: dict[Path, set[Path]] = {}
    for path in map(Path.absolute, needed):
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                found.setdefault(parent, set()).add(path)
                break
    return found
