"""`agentd-slurm doctor`: check slurm.conf, the map of devices and agentd."""

from __future__ import annotations

from collections.abc import Iterator

from agentd.errors import AgentdError
from agentd_slurm import controller
from agentd_slurm.controller import SlurmFailed
from agentd_slurm.decisions.doctor import SlurmCheck, check_gres, check_map, check_settings
from agentd_slurm.gres_map import UnusableMap, map_path, read_map
from agentd_slurm.node_client import NodeClient, socket_path


def checks(node: str | None) -> Iterator[SlurmCheck]:
    """Yield everything that was checked; a part that cannot be read fails."""
    try:
        yield from check_settings(controller.read_configuration())
    except SlurmFailed as error:
        yield SlurmCheck("slurmctld", passed=False, detail=str(error))
        return
    try:
        gres_map = read_map(map_path())
    except UnusableMap as error:
        yield SlurmCheck("map", passed=False, detail=str(error))
        return
    try:
        yield check_gres(gres_map, controller.read_node(node or controller.own_node()).gres)
    except SlurmFailed as error:
        yield SlurmCheck("Gres", passed=False, detail=str(error))
    try:
        yield check_map(gres_map, NodeClient(socket_path()).devices())
    except AgentdError as error:
        yield SlurmCheck("agentd", passed=False, detail=str(error))
