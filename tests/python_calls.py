"""The number of function calls of some work: a measure of cost without noise."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def calls_of(work: Callable[[], object]) -> int:
    """Return how many Python and C functions some work calls, those of finalizers left out."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
