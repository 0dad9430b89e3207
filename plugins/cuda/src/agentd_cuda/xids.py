"""Xids: faults of GPUs that the driver reports as events.

https://docs.nvidia.com/deploy/xid-errors/
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from collections.abc import Collection
from contextlib import suppress
from typing import Any

import msgspec
import pynvml

from agentd_cuda import nvml

APPLICATION_XIDS = (13, 31, 43, 45, 68, 94, 109)
"""Xids that a job causes and the GPU survives, as in NVIDIA's k8s-device-plugin.

And 94, a contained memory error: NVIDIA's Xid catalog says to restart the application.
"""
_WAIT_MS = 200
"""Longest wait for an event: `nvmlShutdown` blocks until it is over (seen with driver 580)."""
_MAX_BURST = 100_000
"""Most Xids of one wait: a job that ends can cause thousands that do not count."""
_MAX_PAUSE_S = 32.0
_NO_INSTANCE = 0xFFFFFFFF


class Xid(msgspec.Struct, frozen=True):
    """An Xid of a GPU, or of one of its instances (None: of all), and when it was seen."""

    uuid: str
    number: int
    gpu_instance: int | None
    compute_instance: int | None
    seen_s: float

    def concerns(self, part: nvml.MigPart) -> bool:
        """Return whether a part of the GPU has the instance; a part that tells none has any."""
        pairs = (
            (self.gpu_instance, part.gpu_instance),
            (self.compute_instance, part.compute_instance),
        )
        return all(None in pair or pair[0] == pair[1] for pair in pairs)


class XidWatch:
    """An event set with all GPUs that can be registered, for one thread.

    After a failed wait it is replaced, so that a lost GPU does not keep the Xids of the others.
    """

    def __init__(self, ignored: Collection[int]) -> None:
        self._ignored = ignored
        self.problem = ""
        """Why no GPU is watched."""
        self.refusals: dict[int, str] = {}
        """Why a GPU is not watched, by index."""
        self.seen: deque[Xid] = deque()
        self.is_due = True
        """Whether GPUs that are not registered are tried again."""
        self._event_set: Any = None
        self._uuid_by_address: dict[int | None, str] = {}
        self._failures = 0

    def wait(self, timeout_s: float) -> bool:
        """Wait for an Xid; return whether there is one, or whether other GPUs are watched now."""
        before = (self.problem, self.refusals)
        is_new = False
        try:
            self._prepare()
            wait_ms = min(_WAIT_MS, int(timeout_s * 1000))
            for _ in range(_MAX_BURST):
                is_new = self._add(pynvml.nvmlEventSetWait(self._event_set, wait_ms))
                if is_new:
                    break
        except pynvml.NVMLError_Timeout:
            pass
        except pynvml.NVMLError as error:
            self._restart(str(error), timeout_s)
            return (self.problem, self.refusals) != before
        self._failures, self.problem = 0, ""
        return is_new or (self.problem, self.refusals) != before

    def _add(self, event: Any) -> bool:
        """Add an event to those seen; return whether it counts."""
        uuid, number = self._uuid_by_address.get(_address(event.device)), int(event.eventData)
        if uuid is None or number in self._ignored:
            return False
        instances = event.gpuInstanceId, event.computeInstanceId
        gpu_instance, compute_instance = (None if n == _NO_INSTANCE else int(n) for n in instances)
        self.seen.append(Xid(uuid, number, gpu_instance, compute_instance, time.monotonic()))
        return True

    def _prepare(self) -> None:
        """Create the event set, and register the GPUs that are not registered."""
        if self._event_set is None:
            self._event_set = pynvml.nvmlEventSetCreate()
        if self.is_due:
            self.is_due = False
            _, self.refusals = nvml.call_each(self._register)

    def _register(self, handle: Any) -> None:
        if (uuid := pynvml.nvmlDeviceGetUUID(handle)) in self._uuid_by_address.values():
            return
        xids = pynvml.nvmlEventTypeXidCriticalError
        if not pynvml.nvmlDeviceGetSupportedEventTypes(handle) & xids:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        pynvml.nvmlDeviceRegisterEvents(handle, xids, self._event_set)
        self._uuid_by_address[_address(handle)] = uuid

    def _restart(self, words: str, timeout_s: float) -> None:
        """Replace the event set; pause longer with each set in a row that fails."""
        if self._event_set is not None:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlEventSetFree(self._event_set)
        self._event_set, self._uuid_by_address, self.is_due = None, {}, True
        if self._failures:
            self.problem = words
            time.sleep(min(timeout_s, 2.0 ** (self._failures - 1), _MAX_PAUSE_S))
        self._failures = min(self._failures + 1, 16)
        with suppress(pynvml.NVMLError):
            self._prepare()


def _address(handle: Any) -> int | None:
    """Return the address of a GPU's handle, which identifies it even if the GPU is lost."""
    return ctypes.cast(handle, ctypes.c_void_p).value
