"""Hooks of mkdocs: pages that are made from other files of the checkout, and links between them.

README.md, CONTRIBUTING.md and benchmarks/README.md are pages of the site, too. A link to a file that isn't a page
becomes the file's name. The page of the gRPC API is made from the comments in `protos/`, the page of Python from
docstrings.
"""

from __future__ import annotations

import importlib
import posixpath
import re
import subprocess
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2 as pb
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
BORROWED = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md", "benchmarks.md": "benchmarks/README.md"}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are no files in `docs/`."""
    pages = {page: (ROOT / source).read_text() for page, source in BORROWED.items()}
    pages |= {"reference/python.md": python_page(), "reference/grpc.md": grpc_page()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, files: Files, **_: Any) -> str:
    """Turn links that count from the checkout into links between pages of the site."""
    here = page.file.src_uri
    source = BORROWED.get(here, f"docs/{here}")

    def relinked(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        if "://" in target or here.startswith("reference/"):
            return link[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        name = next((made for made, borrowed in BORROWED.items() if borrowed == path), path.removeprefix("docs/"))
        if files.get_file_from_path(name) is None:
            return text if text.strip("`") == path else f"{text} (`{path}`)"
        return f"[{text}]({posixpath.relpath(name, posixpath.dirname(here) or '.')}{anchor})"

    return _LINK.sub(relinked, markdown)


def python_page() -> str:
    """The names of `callboard.__all__`, by the module that defines them."""
    package = importlib.import_module("callboard")
    rows = ["# Python\n", "Everything below is imported from `callboard`: `from callboard import Client`.\n"]
    classes = {name: value for name in package.__all__ if isinstance(value := getattr(package, name), type)}
    errors = {name for name, value in classes.items() if issubclass(value, Exception)}
    kinds = {
        "Clients and handles": [n for n, v in classes.items() if n not in errors and ".client" in v.__module__],
        "Specs and values": [n for n, v in classes.items() if n not in errors and ".client" not in v.__module__],
        "Errors": sorted(errors),
    }
    for title, names in kinds.items():
        rows.append(f"\n## {title}\n")
        rows += [f"\n::: {classes[name].__module__}.{name}\n" for name in names]
    return "\n".join(rows)


def grpc_page() -> str:
    """Services and messages of `protos/`, with their comments."""
    image = subprocess.run(
        [ROOT / ".venv" / "bin" / "buf", "build", ROOT, "--output", "-"], capture_output=True, check=True, timeout=60
    ).stdout
    rows = ["# gRPC\n", "The API of every language: package `callboard.v1`, files in `protos/callboard/v1`.\n"]
    own = [file for file in pb.FileDescriptorSet.FromString(image).file if file.package == "callboard.v1"]
    for file in own:
        notes = {tuple(place.path): place.leading_comments.strip() for place in file.source_code_info.location}
        for number, service in enumerate(file.service):
            rows += [
                f"\n## {service.name}\n",
                notes.get((6, number), "") + "\n",
                "| method | takes | returns | |",
                "|---|---|---|---|",
            ]
            for index, method in enumerate(service.method):
                takes = _link(method.input_type, method.client_streaming)
                returns = _link(method.output_type, method.server_streaming)
                rows.append(
                    f"| `{method.name}` | {takes} | {returns} | {_cell(notes.get((6, number, 2, index), ''))} |"
                )
    rows.append("\n## Messages\n")
    for file in own:
        notes = {
            tuple(place.path): (place.leading_comments.strip() or place.trailing_comments.strip())
            for place in file.source_code_info.location
        }
        for number, message in enumerate(file.message_type):
            rows += _message(message, (4, number), notes, "")
        for number, enum in enumerate(file.enum_type):
            rows += _enum(enum, (5, number), notes)
    return "\n".join(rows)


def _message(
    message: pb.DescriptorProto, path: tuple[int, ...], notes: dict[tuple[int, ...], str], within: str
) -> list[str]:
    name = f"{within}{message.name}"
    rows = [f"\n### {name} {{: #{name.lower().replace('.', '-')} }}\n", notes.get(path, "") + "\n"]
    maps = {f".callboard.v1.{name}.{inner.name}": inner for inner in message.nested_type if inner.options.map_entry}
    if message.field:
        rows += ["| field | number | type | |", "|---|---|---|---|"]
    for index, field in enumerate(message.field):
        entry = maps.get(field.type_name)
        kind = f"map of {_type(entry.field[0])} to {_type(entry.field[1])}" if entry else _type(field)
        many = "list of " if field.label == field.LABEL_REPEATED and not entry else ""
        rows.append(f"| `{field.name}` | {field.number} | {many}{kind} | {_cell(notes.get((*path, 2, index), ''))} |")
    for index, inner in enumerate(message.nested_type):
        if not inner.options.map_entry:
            rows += _message(inner, (*path, 3, index), notes, f"{name}.")
    for index, enum in enumerate(message.enum_type):
        rows += _enum(enum, (*path, 4, index), notes, f"{name}.")
    return rows


def _enum(
    enum: pb.EnumDescriptorProto, path: tuple[int, ...], notes: dict[tuple[int, ...], str], within: str = ""
) -> list[str]:
    name = f"{within}{enum.name}"
    rows = [f"\n### {name} {{: #{name.lower().replace('.', '-')} }}\n", notes.get(path, "") + "\n"]
    rows += ["| value | number | |", "|---|---|---|"]
    for index, value in enumerate(enum.value):
        rows.append(f"| `{value.name}` | {value.number} | {_cell(notes.get((*path, 2, index), ''))} |")
    return rows


def _type(field: pb.FieldDescriptorProto) -> str:
    if field.type_name:
        return _link(field.type_name)
    return pb.FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _link(type_name: str, streaming: bool = False) -> str:
    own = type_name.removeprefix(".callboard.v1.")
    shown = f"`{own.removeprefix('.')}`" if own.startswith(".") else f"[{own}](#{own.lower().replace('.', '-')})"
    return f"stream of {shown}" if streaming else shown


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
