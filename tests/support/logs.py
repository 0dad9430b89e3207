"""Reading the log of a runtime."""

from agentd.core.kernel.states import KernelRef
from agentd.services.protocols import LogQuery, Runtime

_ALL = LogQuery()


async def read_log(runtime: Runtime, ref: KernelRef, query: LogQuery = _ALL) -> tuple[int, bytes]:
    """The position of a log's first byte, and its bytes."""
    async with runtime.logs(ref, query) as opened:
        return opened.position, b"".join([chunk async for chunk in opened.chunks])
