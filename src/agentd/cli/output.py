"""Standard output of the commands: text for people, JSON, YAML or bare names for programs.

A command prints in one format, which `-o` chooses. Text is freed of control characters; JSON and
YAML escape them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from agentd.core.printable import printable
from agentd.program.exit_status import ExitStatus

_F = TypeVar("_F", bound=Callable[..., Any])
_FORMAT = "agentd.output"
FORMATS = ("json", "yaml", "wide", "name")
DATA_FORMATS = ("json", "yaml")
"""Formats that print a whole answer, and errors too."""


def print_text(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Print text without control characters; above a live table if there is one."""
    stream = sys.stderr if err else sys.stdout  # click would pass by rich's
    stream.write(printable(text) + ("\n" if nl else ""))  # in one: threads print, too
    stream.flush()


def os_error_text(error: OSError) -> str:
    """Return the text of an error, with the file that it is about."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


class CommandError(click.ClickException):
    """An error of a command: one line with the fact, and one indented line for each remedy."""

    exit_code = ExitStatus.FAILED

    def __init__(self, fact: str, remedies: Iterable[str] = ()) -> None:
        super().__init__(fact)
        self._remedies = tuple(remedies)
        context = click.get_current_context(silent=True)
        self._program = (context and context.find_root().info_name) or "agentctl"
        self._form: str | None = context.meta.get(_FORMAT) if context else None

    def show(self, file: Any = None) -> None:
        del file
        print_text(f"{self._program}: {' '.join(self.message.split())}", err=True)
        for remedy in self._remedies:
            print_text(f"  {remedy}", err=True)


def choose_format(context: click.Context, form: str) -> None:
    """Choose a format; JSON or YAML that was chosen before stays."""
    if context.meta.get(_FORMAT) not in DATA_FORMATS:
        context.meta[_FORMAT] = form


def output_option(command: _F) -> _F:
    """Add `-o json|yaml|wide|name`, and `--json` for `-o json`."""

    def on_option(context: click.Context, _: click.Parameter, value: str | bool | None) -> None:
        if value:
            choose_format(context, "json" if value is True else str(value))

    json_option = click.option(
        "--json", is_flag=True, callback=on_option, expose_value=False, help="The same as -o json."
    )
    output_choice = click.option(
        "-o",
        "--output",
        type=click.Choice(FORMATS),
        callback=on_option,
        expose_value=False,
        help="JSON, YAML, a table with all columns, or bare names.",
    )
    return json_option(output_choice(command))


def client_command(command: Callable[..., None]) -> Callable[..., None]:
    """Pass the client of `agentctl` as the first argument, and add the options for the output."""
    return output_option(click.pass_obj(command))


def output_format() -> str | None:
    """Return the format that the running command was asked for; None is a table."""
    output_form: str | None = click.get_current_context().meta.get(_FORMAT)
    return output_form


def is_data() -> bool:
    """Return whether the running command prints JSON or YAML."""
    return output_format() in DATA_FORMATS


def is_table() -> bool:
    """Return whether the running command prints for people."""
    return output_format() in (None, "wide")


def encode(content: Any, form: str | None, *, indent: int | None = 1) -> str:
    """Return content as JSON or YAML, without the last line end."""
    if form != "yaml":
        return json.dumps(content, indent=indent, default=str)
    import yaml

    plain_content = json.loads(json.dumps(content, default=str))
    dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # libyaml's is ten times as fast
    text: str = yaml.dump(plain_content, Dumper=dumper, sort_keys=False, width=100)
    return text.removesuffix("\n")


def print_data(content: Any, names: Iterable[object]) -> bool:
    """Print an answer as data or as bare names if `-o` asks for it; return whether it did."""
    form = output_format()
    if form in DATA_FORMATS:
        click.echo(encode(content, form))
    elif form == "name":
        for name in names:
            print_text(str(name))
    return not is_table()


def print_answer(
    content: Any,
    columns: Sequence[str],
    row: Callable[[Any], Mapping[str, Any]] | None = None,
    *,
    wide: Sequence[str] = (),
) -> None:
    """Print an answer in the format that `-o` asks for.

    `row` makes the cells of an entry. A name is the cell in the first column. `wide` are the
    further columns of `-o wide`.
    """
    entries = content if isinstance(content, list) else [content]
    rows = [row(entry) for entry in entries] if row is not None else entries
    if print_data(content, (cells[columns[0]] for cells in rows)):
        return
    from agentd.cli.tables import print_rows

    print_rows(rows, [*columns, *(wide if output_format() == "wide" else ())])
