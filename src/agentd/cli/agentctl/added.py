"""Commands that other distributions add: entry points of the group `agentd.commands`.

Their metadata is read only for a command that agentctl does not have, for help, and for completion.
"""

from __future__ import annotations

import click

COMMAND_GROUP = "agentd.commands"


def added_commands() -> list[str]:
    """Return the names of the commands that are installed."""
    from importlib.metadata import entry_points

    return sorted({point.name for point in entry_points(group=COMMAND_GROUP)})


def added_command(name: str) -> click.Command | None:
    """Return a command that is installed; None if there is none of that name.

    Raises:
        ClickException: it cannot be loaded.
    """
    from importlib.metadata import entry_points

    points = [*entry_points(group=COMMAND_GROUP, name=name)]
    if not points:
        return None
    try:
        command = points[0].load()
    except (ImportError, AttributeError) as error:
        raise click.ClickException(f"command {name} ({points[0].value}): {error}") from None
    if not isinstance(command, click.Command):
        raise click.ClickException(f"command {name} ({points[0].value}): not a click command")
    return command
