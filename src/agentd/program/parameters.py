"""Parameters of the commands of all programs: an empty word is an error, never a default.

A shell makes one of a variable that is not set: `agentctl rm $(agentctl ls -q --agent "$TEAM")`. A
parameter that may be empty has the type `click.UNPROCESSED`, or an empty default.
"""

from __future__ import annotations

from typing import Any

import click

EMPTY = "expected a value, got an empty word"


def text(value: str) -> str:
    """Return a text of at least one character."""
    if not value:
        raise click.BadParameter(EMPTY)
    return value


class FilePath(click.Path):
    """The path of a file."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the path, as the type that was asked for."""
        return super().convert(value or self.fail(EMPTY, param, ctx), param, ctx)


class CommandGroup(click.Group):
    """A group of commands whose text parameters refuse an empty word."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        _refuse_empty(self)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Register a command, and the groups below it."""
        super().add_command(cmd, name)
        _refuse_empty(cmd)


CommandGroup.group_class = CommandGroup


def _refuse_empty(command: click.Command) -> None:
    for parameter in command.params:
        if parameter.type is click.STRING and parameter.default != "":
            parameter.type = click.types.FuncParamType(text)
    if isinstance(command, click.Group):
        for below in command.commands.values():
            _refuse_empty(below)
