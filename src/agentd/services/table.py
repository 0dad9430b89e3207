"""The kernels of the node and the ledger, always in step.

The one place where either changes. A kernel that is not ended is charged with its whole
allocation; one that ended, or is dropped, with nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from agentd.core.allocation import Ledger
from agentd.core.kernel import Kernel
from agentd.core.ports import HostPort, host_ports
from agentd.errors import UnknownKernel

Changed: TypeAlias = Callable[[Kernel | None, Kernel | None], None]
"""Hears of every change: the kernel before and after, None where there is none."""


class KernelTable:
    """Kernels by id, and what they hold."""

    def __init__(self, changed: Changed) -> None:
        self._changed = changed
        self._kernels: dict[str, Kernel] = {}
        self._ledger = Ledger()
        self._claims: dict[HostPort, tuple[str, ...]] = {}

    @property
    def ledger(self) -> Ledger:
        return self._ledger

    @property
    def ports(self) -> Mapping[HostPort, str]:
        """The node's ports that kernels hold, and which kernel.

        Of two that claim one (after a start by hand) the first does.
        """
        return {port: claims[0] for port, claims in self._claims.items()}

    @property
    def kernels(self) -> Mapping[str, Kernel]:
        return MappingProxyType(self._kernels)

    def __iter__(self) -> Iterator[Kernel]:
        return iter(self._kernels.values())

    def get(self, kernel_id: str) -> Kernel:
        """Return a kernel.

        Raises:
            UnknownKernel: there is none of that id.
        """
        if kernel_id not in self._kernels:
            raise UnknownKernel(f"no kernel {kernel_id} on this node")
        return self._kernels[kernel_id]

    def is_second(self, kernel_id: str, runtime: str) -> bool:
        """Tell whether what a runtime calls so bears the name of another runtime's kernel."""
        known = self._kernels.get(kernel_id)
        return known is not None and known.runtime != runtime and known.handle is not None

    def put(self, kernel: Kernel) -> None:
        """Take a kernel as it is now, and charge or release what it holds."""
        before = self._kernels.get(kernel.kernel_id)
        self._kernels[kernel.kernel_id] = kernel
        holding = self._ledger.holdings.get(kernel.kernel_id)
        if not kernel.holds:
            self._ledger = self._ledger.without(kernel.kernel_id)
        elif holding is None or holding.allocation != kernel.allocation:
            self._ledger = self._ledger.with_held(
                kernel.kernel_id, kernel.agent_id, kernel.allocation
            )
        self._give_back_ports(before)
        for port in host_ports(kernel) if kernel.holds else ():
            self._claims[port] = (*self._claims.get(port, ()), kernel.kernel_id)
        self._changed(before, kernel)

    def drop(self, kernel_id: str) -> None:
        """Forget a kernel; what it held is free. Dropping twice changes nothing."""
        before = self._kernels.pop(kernel_id, None)
        self._ledger = self._ledger.without(kernel_id)
        self._give_back_ports(before)
        if before is not None:
            self._changed(before, None)

    def _give_back_ports(self, kernel: Kernel | None) -> None:
        if kernel is None:
            return
        for port in host_ports(kernel):
            others = tuple(k for k in self._claims.pop(port, ()) if k != kernel.kernel_id)
            if others:
                self._claims[port] = others
