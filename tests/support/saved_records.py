"""Kernels and claims by the thousand: records in the state folder of a node that is not up yet."""

from collections.abc import Mapping

from agentd.core.allocation.ledger import Allocation, Share
from agentd.core.claim.claim import Claim, NameHolder
from agentd.core.claim.record import encode as encode_claim
from agentd.core.devices import DeviceId
from agentd.core.kernel.record import encode
from agentd.core.kernel.states import Kernel, KernelState
from agentd.core.slots import SlotKind
from support.daemon import Daemon

ONE_BYTE = Allocation((Share(DeviceId("mem", "mem"), "mem", "mem", SlotKind.BYTES, 1),))


def save_kernels(daemon: Daemon, count: int, prefix: str = "k") -> None:
    """Save records of kernels that have ended."""
    folder = daemon.folder / "state" / "ended"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(count):
        name, at = f"{prefix}{number:04}", 1000.0 + number // 3
        state = KernelState.TERMINATED
        kernel = Kernel(name, "agent-1", state, "hash", at, daemon.runtime)
        (folder / f"{name}.json").write_text(encode(kernel, daemon.node))


def save_claims(daemon: Daemon, count: int, labels: Mapping[str, str] | None = None) -> None:
    """Save records of claims of one byte of memory, with the same labels."""
    folder = daemon.folder / "state" / "claims"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in range(count):
        name, at, holder = f"c{number:04}", 1000.0 + number // 3, NameHolder("n", True)
        claim = Claim(name, "agent-1", holder, "hash", at, "boot", {"mem": "1"}, ONE_BYTE,
                      labels=labels or {})  # fmt: skip
        (folder / f"{name}.json").write_text(encode_claim(claim, daemon.node))
