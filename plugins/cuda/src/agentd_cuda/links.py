"""Groups of GPUs that are close to each other: joined by NVLink, else under one host bridge."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import Any

import pynvml

from agentd.plugin_api import log_once
from agentd_cuda import nvml


def close_groups(handles: Mapping[str, Any]) -> list[set[str]]:
    """Return the groups of GPUs, by UUID; a GPU that is close to no other is a group alone.

    Host bridges count only if the node has no NVLink at all.
    """
    groups = _connected_groups(handles, _has_nvlink)
    if len(groups) == len(handles):
        groups = _connected_groups(handles, _has_common_bridge)
    return groups


def _connected_groups(
    handles: Mapping[str, Any], are_joined: Callable[[Any, Any], bool]
) -> list[set[str]]:
    """Return the connected components; a pair that NVML does not know is not joined."""
    group_of = {uuid: {uuid} for uuid in handles}
    for first, second in combinations(handles, 2):
        if group_of[first] is group_of[second]:
            continue
        try:
            is_pair = are_joined(handles[first], handles[second])
        except pynvml.NVMLError as error:
            log_once(f"whether GPUs {first} and {second} are linked is unknown: {error}")
            continue
        if is_pair:
            group_of[first] |= group_of[second]
            group_of |= dict.fromkeys(group_of[second], group_of[first])
    return list({id(group): group for group in group_of.values()}.values())


def _has_nvlink(first: Any, second: Any) -> bool:
    """Return whether NVLink joins two GPUs, directly or through an NVSwitch."""
    index = pynvml.NVML_P2P_CAPS_INDEX_NVLINK
    status = nvml.call_optional(pynvml.nvmlDeviceGetP2PStatus, first, second, index)
    return bool(status == pynvml.NVML_P2P_STATUS_OK)


def _has_common_bridge(first: Any, second: Any) -> bool:
    level = nvml.call_optional(pynvml.nvmlDeviceGetTopologyCommonAncestor, first, second)
    return level is not None and int(level) <= pynvml.NVML_TOPOLOGY_HOSTBRIDGE
