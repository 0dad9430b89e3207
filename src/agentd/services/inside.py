"""Commands inside kernels, whatever runs these."""

from __future__ import annotations

from collections.abc import Mapping

from agentd.core.kernel import KernelState
from agentd.core.session import ExecSpec
from agentd.errors import KernelConflict
from agentd.services.interfaces import Runtime, Session
from agentd.services.state import NodeState


class Insides:
    """Runs commands inside the kernels of a node."""

    def __init__(self, state: NodeState, runtimes: Mapping[str, Runtime]) -> None:
        self._state = state
        self._runtimes = runtimes

    async def begin(self, kernel_id: str, spec: ExecSpec) -> Session:
        """Run a command inside a kernel.

        Raises:
            UnknownKernel: there is no such kernel.
            KernelConflict: it does not run.
            RequestError, Unavailable, RuntimeFailure: the command did not start.
        """
        self.require(kernel_id)
        kernel = self._state.get(kernel_id)
        return await self._runtimes[kernel.runtime].run_inside(kernel, spec)

    def require(self, kernel_id: str) -> None:
        """Refuse a kernel that does not run."""
        kernel = self._state.get(kernel_id)
        self._state.require_runtime(kernel.runtime)
        if kernel.state is not KernelState.RUNNING:
            raise KernelConflict(f"kernel {kernel_id} is {kernel.state}: nothing runs inside it")
