"""A folder of a file system that gives no answer: FUSE, whose server reads nothing.

The kernel asks over /dev/fuse (Documentation/filesystems/fuse.rst); closing that ends all waits.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LIBC = ctypes.CDLL(None, use_errno=True)
_DETACH = 2


@contextmanager
def unanswering(folder: Path) -> Iterator[None]:
    """Mount such a file system on a folder, and end it."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    try:
        options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
        if _LIBC.mount(b"unanswering", bytes(folder), b"fuse", 0, options):
            raise OSError(ctypes.get_errno(), f"mount on {folder}")
        try:
            yield
        finally:
            _LIBC.umount2(bytes(folder), _DETACH)
    finally:
        os.close(device)
