"""What is printed for a person."""

from __future__ import annotations

import click

from agentd.core.printable import printable


def say(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text, without what a terminal would obey."""
    click.echo(printable(text), err=err, nl=nl)
