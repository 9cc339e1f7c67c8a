"""Writes the reference of the protocol into docs/api.md, from the definition's own comments."""

import re
from collections.abc import Iterator
from pathlib import Path

DEFINITION = Path(__file__).resolve().parent / "proto" / "pykv" / "v1" / "engine.proto"
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "api.md"
BEGIN = "<!-- from here on by `make proto` -->\n"
BLOCK = re.compile(r"^((?://[^\n]*\n)*)(service|message|enum) (\w+) \{(.*?)\}", re.MULTILINE | re.DOTALL)
METHOD = re.compile(r"rpc (\w+)\((\w+)\) returns \((stream )?(\w+)\);")
FIELD = re.compile(r"((?:repeated |optional )?(?:map<[^>]+>|\w+)) (\w+) = (\d+);")
VALUE = re.compile(r"(\w+) = (\d+);")


def reference(definition: str) -> str:
    """The whole reference as Markdown: each service, message and enumeration with its own comments."""
    # A oneof has braces of its own; its fields are fields of the message.
    flat = re.sub(r"oneof (\w+) \{(.*?)\}", _flattened, definition, flags=re.DOTALL)
    parts = [_section(*match.groups()) for match in BLOCK.finditer(flat)]
    return "\n".join(parts)


def _flattened(match: re.Match[str]) -> str:
    lines = match[2].strip("\n").splitlines()
    return "\n".join(
        line.replace(";", f"; // one of {match[1]}") if FIELD.search(line) else line for line in lines
    )


def _section(comment: str, kind: str, name: str, body: str) -> str:
    heading = {"service": "Service", "message": "Message", "enum": "Enumeration"}[kind]
    text = _prose(comment.splitlines())
    rows = list(_rows(kind, body))
    columns = {
        "service": ("method", "takes", "gives", "what it does"),
        "message": ("field", "type", "number", "meaning"),
        "enum": ("value", "number", "meaning"),
    }[kind]
    lines = [f"### {heading} `{name}`", ""]
    lines += [text, ""] if text else []
    if rows:
        lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
        lines += ["| " + " | ".join(row) + " |" for row in rows]
    else:
        lines += ["It has no fields."]
    return "\n".join(lines) + "\n"


def _rows(kind: str, body: str) -> Iterator[tuple[str, ...]]:
    """One row a field, with the comment that stands right above it."""
    comment: list[str] = []
    for line in map(str.strip, body.splitlines()):
        if line.startswith("//"):
            comment.append(line)
        elif line:
            note = line.partition("; // ")[2]
            meaning = _prose(comment) + (f" (One of `{note.removeprefix('one of ')}`.)" if note else "")
            yield _row(kind, line, meaning.strip())
            comment = []


def _row(kind: str, line: str, meaning: str) -> tuple[str, ...]:
    if kind == "service":
        name, request, stream, reply = METHOD.search(line).groups()  # type: ignore[union-attr]
        return f"`{name}`", f"`{request}`", f"{stream or ''}`{reply}`", meaning
    if kind == "enum":
        name, number = VALUE.search(line).groups()  # type: ignore[union-attr]
        return f"`{name}`", number, meaning
    type_name, name, number = FIELD.search(line).groups()  # type: ignore[union-attr]
    return f"`{name}`", f"`{type_name}`", number, meaning


def _prose(comment: list[str]) -> str:
    return " ".join(line.removeprefix("//").strip() for line in comment)


def write() -> None:
    """Writes the reference below its mark in the document."""
    head = DOCUMENT.read_text().partition(BEGIN)[0]
    DOCUMENT.write_text(head + BEGIN + "\n" + reference(DEFINITION.read_text()))
