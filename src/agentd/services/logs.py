"""What a kernel printed, from the runtime that has it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from agentd.core.kernel import KernelState
from agentd.errors import UnknownKernel
from agentd.services.interfaces import LogQuery
from agentd.services.kernels import KernelService


def logs_of(service: KernelService, kernel_id: str, query: LogQuery) -> AsyncIterator[bytes]:
    """Yield what a kernel printed.

    Raises:
        UnknownKernel: there is none, it has not started, or it is lost.
    """
    kernel = service.table.get(kernel_id)
    if kernel.handle is None:
        raise UnknownKernel(f"kernel {kernel_id} has not started and has no logs")
    if kernel.state is KernelState.LOST:
        raise UnknownKernel(f"kernel {kernel_id} is lost, and its logs with it")
    return service.runtimes[kernel.runtime].logs(kernel_id, kernel.handle, query)
