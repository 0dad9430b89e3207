"""Completion of names in a shell, from the live daemon; without an answer there are none."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import click
from click.shell_completion import CompletionItem

from agentd.cli.agentctl.options import client_of
from agentd.client import Client
from agentd.errors import AgentdError

TIMEOUT_S = 1.0
Completer = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def _completer(read_names: Callable[[Client], Iterable[str]]) -> Completer:
    def complete(
        context: click.Context, parameter: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        del parameter
        is_of_fleet = context.command_path.split()[1:2] == ["fleet"]
        try:
            client = client_of(context.find_root(), is_of_fleet=is_of_fleet, timeout_s=TIMEOUT_S)
            names = read_names(client)
            return [CompletionItem(name) for name in names if name.startswith(incomplete)]
        except (AgentdError, click.ClickException):
            return []

    return complete


kernels = _completer(lambda node: (kernel["kernel_id"] for kernel in node.kernels()))
claims = _completer(lambda node: (claim["claim_id"] for claim in node.claims()))
agents = _completer(lambda node: (agent["agent_id"] for agent in node.agents()))
devices = _completer(lambda node: (device["id"] for device in node.devices()))
plugins = _completer(lambda node: (plugin["name"] for plugin in node.plugins()))
runtimes = _completer(lambda node: (runtime["name"] for runtime in node.runtimes()))
