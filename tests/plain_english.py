"""The words that text for people does not use, in pages and in source code."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

FORBIDDEN = re.compile(
    r"\b(seats?|the books|kept back|neighbours?|unheld|keepers?|checkup|whoever|anew|of which)\b"
    r"|(?<!there )\bis no (?!longer\b)",
    re.IGNORECASE,
)
FORBIDDEN_FIRST = re.compile(r"(What|How|Tell|Have|Let|Who)\b(?!-)")
_CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
_LOG_EVENT = re.compile(r"[a-z]+(_[a-z]+)*\.[a-z]+(_[a-z]+)*")


def source_breaches(path: Path) -> list[str]:
    """Return the phrases of a module that break the rules, outside of backticks."""
    text = path.read_text()
    found = [
        f"{path.name}:{line}: {phrase[0]!r}"
        for line, prose in [*_docstrings(text), *_comments(path), *_strings(text)]
        if (phrase := FORBIDDEN.search(" ".join(_CODE.sub("", prose).replace("_", " ").split())))
    ]
    return found + [
        f"{path.name}:{line}: begins with {prose.split()[0]!r}"
        for line, prose in _docstrings(text)
        if FORBIDDEN_FIRST.match(prose)
    ]


def _docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Yield docstrings, those of attributes included."""
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(prose))):
                yield node.lineno, prose


def _comments(path: Path) -> Iterator[tuple[int, str]]:
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


def _strings(text: str) -> Iterator[tuple[int, str]]:
    """Yield string literals that are prose or the name of a log event, without docstrings."""
    tree = ast.parse(text)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(value)) if id(node) not in docstrings:
                if " " in value or _LOG_EVENT.fullmatch(value):
                    yield node.lineno, value
