"""`agentd-slurm doctor`: check slurm.conf, the map of devices and agentd.

Slurm's commands are run as hooks run them, so a hook that would not find one is seen here.
"""

from __future__ import annotations

from collections.abc import Iterator

from agentd.errors import AgentdError
from agentd_slurm import controller
from agentd_slurm.commands.job_environment import known_node
from agentd_slurm.controller import SlurmFailed
from agentd_slurm.decisions.doctor import (
    SlurmCheck,
    check_gres,
    check_job,
    check_map,
    check_settings,
    shared_types,
)
from agentd_slurm.gres_map import UnusableMap, map_path, read_map
from agentd_slurm.jobs import UnreadableAnswer
from agentd_slurm.node_client import NodeClient, socket_path
from agentd_slurm.settings import InvalidSettings, read_settings

DOCTOR_ERRORS = (AgentdError, SlurmFailed, UnreadableAnswer, UnusableMap, InvalidSettings, OSError)


def checks(node: str | None) -> Iterator[SlurmCheck]:
    """Yield everything that was checked; a part that cannot be read fails."""
    parts = (
        ("slurmctld", _check_settings),
        ("Gres", _check_gres),
        ("agentd", _check_agentd),
        ("jobs", _check_jobs),
    )
    for name, check in parts:
        try:
            yield from check(node or known_node() or controller.own_node())
        except DOCTOR_ERRORS as error:
            yield SlurmCheck(name, passed=False, detail=str(error))


def _check_settings(node: str) -> Iterator[SlurmCheck]:
    yield from check_settings(controller.read_configuration(), node, controller.read_node(node))


def _check_gres(node: str) -> Iterator[SlurmCheck]:
    yield check_gres(read_map(map_path()), controller.read_node(node).gres)


def _check_agentd(node: str) -> Iterator[SlurmCheck]:
    gres_map, devices = read_map(map_path()), NodeClient(socket_path()).devices()
    yield check_map(gres_map, devices)
    if types := shared_types(gres_map, devices):
        settings = read_settings().placeholder
        try:
            controller.start_placeholder(node, types[0], "doctor", settings, is_test=True)
        except SlurmFailed as error:
            detail = f"{error}; see [placeholder] in /etc/agentd/slurm.toml"
            yield SlurmCheck("placeholder", passed=False, detail=detail)
        else:
            yield SlurmCheck("placeholder", passed=True, detail="Slurm would start one")


def _check_jobs(node: str) -> Iterator[SlurmCheck]:
    """Take the look of a prolog at one job of the node, or of any other id."""
    rows = controller.list_jobs(node)
    job = controller.get_job(rows[0].job_id if rows else 1)
    yield check_job(job, node, read_map(map_path()))
