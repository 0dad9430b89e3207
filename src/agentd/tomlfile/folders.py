"""Whether a folder can be created and written, determined without changing the disk."""

from __future__ import annotations

import errno
import os
import stat
from functools import partial
from pathlib import Path

from agentd.concurrency import call_in_time
from agentd.tomlfile.regular_files import kind_of


def write_problem(folder: Path) -> OSError | None:
    """Return why a folder, or its nearest existing parent, cannot be written; None if it can.

    One whose file system does not answer is a TimeoutError.
    """
    try:
        return call_in_time(str(folder), partial(_find_problem, folder))
    except OSError as error:
        return OSError(error.errno, f"{folder} cannot be inspected: {error.strerror}")


def _find_problem(folder: Path) -> OSError | None:
    nearest = folder
    while not os.path.lexists(nearest) and nearest != nearest.parent:
        nearest = nearest.parent
    try:
        mode = nearest.stat().st_mode
    except OSError as error:
        return OSError(error.errno, f"{nearest} cannot be inspected: {error.strerror}")
    if not stat.S_ISDIR(mode):
        return OSError(errno.ENOTDIR, f"{nearest} is {kind_of(mode)}, expected a directory")
    if os.statvfs(nearest).f_flag & os.ST_RDONLY:
        return OSError(errno.EROFS, f"{nearest} is on a read-only file system")
    if not os.access(nearest, os.W_OK | os.X_OK, effective_ids=True):
        return OSError(errno.EACCES, f"{nearest} cannot be written: permission denied")
    return None
