"""The usage of kernels as wire types."""

from __future__ import annotations

from agentd.rpc.rendering import wire_time
from agentd.services.statistics import DeviceUse, KernelUse
from agentd.views import DeviceUseView, KernelUseView


def usage_view(use: KernelUse) -> KernelUseView:
    """Return the usage of a kernel."""
    usage = use.usage
    return {
        "kernel_id": use.kernel_id,
        "agent_id": use.agent_id,
        "state": use.state.value,
        "at": wire_time(use.at) or "",
        "cpu_seconds": usage.cpu_seconds,
        "cpu_throttled_seconds": usage.cpu_throttled_seconds,
        "memory_bytes": usage.memory_bytes,
        "memory_peak_bytes": usage.memory_peak_bytes,
        "memory_limit_bytes": usage.memory_limit_bytes,
        "io_read_bytes": usage.io_read_bytes,
        "io_write_bytes": usage.io_write_bytes,
        "processes": usage.processes,
        "network_rx_bytes": usage.network_rx_bytes,
        "network_tx_bytes": usage.network_tx_bytes,
        "devices": [_device_use_view(device) for device in use.devices],
    }


def _device_use_view(use: DeviceUse) -> DeviceUseView:
    return {
        "device_name": use.device_name,
        "id": use.id,
        "share": format(use.share, "f"),
        "utilization": use.utilization,
        "memory_used_bytes": use.memory_used_bytes,
        "used_by_kernel_bytes": use.used_by_kernel_bytes,
        "power_watts": use.power_watts,
    }
