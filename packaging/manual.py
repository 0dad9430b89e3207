"""Make the man pages from the commands and the settings: `manual.py [--fleet] FOLDER VERSION`."""

import gzip
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from pydantic import BaseModel

from agentd.cli.agentctl.main import agentctl
from agentd.cli.agentd.main import agentd
from agentd.config.default_file import default_text
from agentd.config.settings import Settings
from agentd.program.exit_status import MEANINGS
from agentd_fleet.cli import agentd_fleet


def exit_status(program: str) -> str:
    """Return roff for the exit statuses of a program and of its commands."""
    rows = []
    for commands, status, text in MEANINGS:
        mine = [name for name in commands if name.partition(" ")[0] == program]
        lead = f"{', '.join(mine)}: " if mine else ""
        if mine or not commands:
            number = "other" if status is None else status.value
            rows.append(f".TP\n.B {number}\n{escaped(lead + text)}")
    return "\n".join(rows)


def escaped(text: str) -> str:
    """Return text in which roff finds no request and no escape."""
    lines = (line.replace("\\", "\\e").replace("-", "\\-") for line in text.splitlines())
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line for line in lines)


def paragraphs(text: str) -> Iterator[str]:
    r"""Yield roff for a docstring; `\b` begins a paragraph that is kept as it is (click)."""
    for part in re.split(r"\n\s*\n", text.strip()):
        if part.lstrip().startswith("\b"):
            yield f".nf\n{escaped(part.replace(chr(8), '').strip(chr(10)))}\n.fi"
        else:
            yield f".PP\n{escaped(' '.join(part.split()))}"


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield a command and all below it, by the words that call them."""
    yield name, command
    if isinstance(command, click.Group):
        for below, child in sorted(command.commands.items()):
            if not child.hidden:
                yield from commands(child, f"{name} {below}")


def command_page(name: str, command: click.Command, version: str) -> str:
    """Return a page of section 1 with all commands below one."""
    short = (command.help or "").strip().splitlines()[0].rstrip(".")
    parts = [
        f'.TH {name.upper()} 1 "" "agentd {version}"',
        f".SH NAME\n{escaped(name)} \\- {escaped(short)}",
        f".SH SYNOPSIS\n.B {escaped(name)}\n[OPTIONS] COMMAND [ARGS]",
        ".SH COMMANDS",
    ]
    for words, one in commands(command, name):
        context = click.Context(one, info_name=words)
        usage = " ".join(piece for piece in one.collect_usage_pieces(context))
        parts.append(f".SS {escaped(words)} {escaped(usage)}")
        parts += paragraphs(one.help or "")
        for parameter in one.params:
            if record := parameter.get_help_record(context):
                parts.append(f".TP\n.B {escaped(record[0])}\n{escaped(record[1])}")
    parts.append(f".SH EXIT STATUS\n{exit_status(name)}")
    parts.append(".SH SEE ALSO\n.BR agent.toml (5)")
    return "\n".join(parts) + "\n"


def settings_page(settings: type[BaseModel], default: str, version: str) -> str:
    """Return the page of the configuration: what each key means, and the commented default."""
    parts = [
        f'.TH AGENT.TOML 5 "" "agentd {version}"',
        ".SH NAME\nagent.toml \\- the configuration of agentd",
        ".SH DESCRIPTION",
        "TOML, read from the file that \\-\\-config names, $AGENTD_CONFIG, or",
        "/etc/agentd/agent.toml; variables such as AGENTD__RESOURCE__ALLOCATION_MODE go over it.",
        "An unknown key is an error.",
        *(line for path, model in tables((), settings) for line in table(path, model)),
        f".SH DEFAULT\n.nf\n{escaped(default)}.fi",
        ".SH SEE ALSO\n.BR agentd (1),\n.BR agentctl (1)",
    ]
    return "\n".join(parts) + "\n"


def tables(path: tuple[str, ...], model: type[BaseModel]) -> Iterator[tuple[str, type[BaseModel]]]:
    """Yield every table of a configuration, with its name."""
    if path:
        yield ".".join(path), model
    for name, field in model.model_fields.items():
        if isinstance(field.default, BaseModel):
            yield from tables((*path, name.replace("_", "-")), type(field.default))


def table(path: str, model: type[BaseModel]) -> Iterator[str]:
    """Yield roff for the keys of one table."""
    yield f".SH [{escaped(path)}]"
    for name, field in model.model_fields.items():
        if field.description:
            yield f".TP\n.B {escaped(name.replace('_', '-'))}\n{escaped(field.description)}"


def write(folder: Path, section: int, name: str, page: str) -> None:
    """Write one page, compressed as Debian has them."""
    file = folder / f"man{section}" / f"{name}.{section}.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(page.encode(), mtime=0))


def main() -> None:
    """Write the pages of one package."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--fleet"]
    folder, version = Path(arguments[0]), arguments[1]
    if "--fleet" in sys.argv:
        write(folder, 1, "agentd-fleet", command_page("agentd-fleet", agentd_fleet, version))
        return
    write(folder, 1, "agentd", command_page("agentd", agentd, version))
    write(folder, 1, "agentctl", command_page("agentctl", agentctl, version))
    write(folder, 5, "agent.toml", settings_page(Settings, default_text(), version))


if __name__ == "__main__":
    main()
