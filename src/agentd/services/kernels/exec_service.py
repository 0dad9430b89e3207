"""Exec: commands in running kernels, on every runtime."""

from __future__ import annotations

from collections.abc import Mapping

from agentd.concurrency import complete_shielded
from agentd.core.kernel.exec_spec import ExecSpec
from agentd.core.kernel.plan import overridden_variables, reserved_variables
from agentd.core.kernel.states import Kernel, KernelSpec, KernelState
from agentd.errors import AgentdError, InvalidRequest, KernelConflict, UnknownKernel
from agentd.services.protocols import Plugins, Runtime, Session
from agentd.services.state import NodeState


class ExecService:
    """Starts commands in the kernels of a node."""

    def __init__(self, state: NodeState, runtimes: Mapping[str, Runtime], plugins: Plugins) -> None:
        self._state = state
        self._runtimes = runtimes
        self._plugins = plugins

    async def start(self, kernel: Kernel, spec: ExecSpec) -> Session:
        """Start a command in `kernel`, never in a later kernel with its id.

        Raises:
            UnknownKernel: the kernel does not exist any more.
            KernelConflict: the kernel is not running.
            RequestError, Unavailable, RuntimeFailure: the command did not start.
        """
        self._require_running(kernel)
        if spec.env:
            await self._refuse_reserved(kernel, spec)
        session = await self._runtimes[kernel.runtime].start_exec(kernel, spec)
        try:
            self._require_running(kernel)
        except AgentdError:
            await complete_shielded(session.close())
            raise
        return session

    async def _refuse_reserved(self, kernel: Kernel, spec: ExecSpec) -> None:
        """Refuse variables that a create could not set either.

        Raises:
            InvalidRequest: agentd or a plugin sets them.
            PluginUnavailable: the plugin of the kernel's devices does not answer.
        """
        kernel_spec = KernelSpec(kernel.kernel_id, kernel.agent_id, spec.command, "")
        support = await self._runtimes[kernel.runtime].support(kernel_spec)
        edits = await self._plugins.container_edits(kernel.allocation, support.features)
        problems = reserved_variables(spec.env) + overridden_variables(spec.env, edits)
        if problems:
            raise InvalidRequest(problems)

    def find(self, kernel_id: str) -> Kernel:
        """Return a running kernel.

        Raises:
            UnknownKernel: the kernel does not exist.
            KernelConflict: the kernel is not running.
        """
        kernel = self._state.kernel(kernel_id)
        self._require_running(kernel)
        return kernel

    def _require_running(self, kernel: Kernel) -> None:
        now = self._state.kernel(kernel.kernel_id)
        if (now.agent_id, now.created_at) != (kernel.agent_id, kernel.created_at):
            raise UnknownKernel(kernel.kernel_id)
        self._state.require_runtime(now.runtime)
        if now.state is not KernelState.RUNNING:
            reason = f"kernel {now.kernel_id} is {now.state}, expected running"
            raise KernelConflict(reason)
