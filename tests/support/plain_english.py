"""The words that text for people does not use, in pages and in source code."""

import ast
import io
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
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = _docstrings(nodes)
    found = [
        f"{path.name}:{line}: {phrase!r}"
        for line, prose in [*docstrings, *_comments(text), *_strings(nodes)]
        if (phrase := _forbidden(prose))
    ]
    return found + [
        f"{path.name}:{line}: begins with {prose.split()[0]!r}"
        for line, prose in docstrings
        if FORBIDDEN_FIRST.match(prose)
    ]


def _forbidden(prose: str) -> str | None:
    phrase = FORBIDDEN.search(" ".join(_CODE.sub("", prose).replace("_", " ").split()))
    return phrase and phrase[0]


def _docstrings(nodes: list[ast.AST]) -> list[tuple[int, str]]:
    """Return docstrings, those of attributes included."""
    return [
        (node.lineno, node.value.value)
        for node in nodes
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]


def _comments(text: str) -> Iterator[tuple[int, str]]:
    """Yield comments; none of a module without a breach behind any `#`, which saves seconds."""
    if not any(_forbidden(line.partition("#")[2]) for line in text.splitlines() if "#" in line):
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def _strings(nodes: list[ast.AST]) -> Iterator[tuple[int, str]]:
    """Yield string literals that are prose or the name of a log event, without docstrings."""
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Constant(value=str(value)) if id(node) not in docstrings:
                if " " in value or _LOG_EVENT.fullmatch(value):
                    yield node.lineno, value
