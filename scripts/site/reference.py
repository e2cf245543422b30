"""Reference pages made from the code when the site is built: mkdocs calls ``on_files``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import toolkit
from toolkit.commands.main import COMMANDS, app


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {"cli": cli, "python": python, "http": http, "metrics": metrics}
    for name, page in pages.items():
        files.append(File.generated(config, f"reference/{name}.md", content="\n".join(page())))
    return files


# -- command line -----------------------------------------------------------------------------------------------------


def cli() -> Iterator[str]:
    yield "# Command line\n\n`tool COMMAND --help` shows the same. Flags may be written with dashes or underscores.\n"
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="tool")
    for name in COMMANDS:
        _, command, _ = root.resolve_command(context, [name])
        yield from _command(command, f"tool {name}")


def _command(command: Any, path: str) -> Iterator[str]:
    inner = getattr(command, "commands", None)
    if inner:
        for name, child in inner.items():
            yield from _command(child, f"{path} {name}")
        return
    yield f"## {path}\n"
    yield _plain(command.help or "") + "\n"
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    usage = " ".join([path, *(p.metavar or p.name.upper() for p in arguments), "[OPTIONS]"])
    yield f"```\n{usage}\n```\n"
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    if options:
        yield "| option | default | |\n|---|---|---|"
    for option in options:
        names = ", ".join(f"`{n}`" for n in (*option.opts, *option.secondary_opts))
        default = "" if option.default in (None, (), [], False) or callable(option.default) else f"`{option.default}`"
        yield f"| {names} | {default} | {_cell(_plain(option.help or ''))} |"
    yield ""


def _plain(text: str) -> str:
    """Help without Rich's markup."""
    return re.sub(r"\[/?[a-z ]+\]", "", inspect.cleandoc(text))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


# -- Python -----------------------------------------------------------------------------------------------------------


def python() -> Iterator[str]:
    yield "# Python\n\n`from toolkit import …`; importing loads nothing heavy.\n"
    for name in sorted(n for n in toolkit.__all__ if not n.startswith("__")):
        value = getattr(toolkit, name)
        where = "toolkit.serve.background.serve" if inspect.ismodule(value) else f"{value.__module__}.{name}"
        yield f"::: {where}\n"
        if dataclasses.is_dataclass(value):
            yield "| field | type | default |\n|---|---|---|"
            for field in dataclasses.fields(value):
                default = "" if field.default is dataclasses.MISSING else f"`{field.default!r}`"
                yield f"| `{field.name}` | `{_cell(str(field.type))}` | {default} |"
            yield ""


# -- HTTP -------------------------------------------------------------------------------------------------------------


def http() -> Iterator[str]:
    from toolkit.serve.app import ROUTES

    yield "# HTTP\n\nEvery route, and what its body may hold. [The server](../server.md) says what the fields do.\n"
    yield "| route | | body |\n|---|---|---|"
    for routes in ROUTES:
        for route in routes.router.routes:
            if route.include_in_schema:
                body = _body(route.openapi_extra or {})
                link = f"[`{body}`](#{body.lower()})" if body else ""
                yield f"| `{' '.join(route.methods)} {route.path}` | {_cell(route.summary or '')} | {link} |"
    yield ""
    for model in (model for routes in ROUTES for model in routes.BODIES):
        yield f"## {model.__name__}\n\n| field | type | default | |\n|---|---|---|---|"
        for name, field in model.model_json_schema()["properties"].items():
            default = field.get("default")
            told = "" if default is None else f"`{default}`"
            yield f"| `{name}` | {_cell(_type(field))} | {told} | {_cell(field.get('description', ''))} |"
        yield ""


def _body(extra: dict[str, Any]) -> str:
    """The name of a route's body."""
    content = extra.get("requestBody", {}).get("content", {}).get("application/json", {})
    return str(content.get("schema", {}).get("$ref", "")).rpartition("/")[2]


def _type(field: dict[str, Any]) -> str:
    if "$ref" in field:
        return str(field["$ref"]).rsplit("/", 1)[-1]
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(f) for f in field["anyOf"] if f.get("type") != "null"))
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"list of {_type(field.get('items', {}))}"
    bounds = [f"{sign} {field[key]}" for key, sign in _BOUNDS.items() if key in field]
    return f"{kind} ({', '.join(bounds)})" if bounds else kind


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}


# -- metrics ----------------------------------------------------------------------------------------------------------


def metrics() -> Iterator[str]:
    from toolkit.serve.watch.metrics import ServerMetrics

    yield "# Metrics\n\n`GET /metrics`, in Prometheus' text format.\n\n| metric | kind | |\n|---|---|---|"
    for metric in ServerMetrics(dict).registry.collect():
        name = metric.name + ("_total" if metric.type == "counter" else "")
        yield f"| `{name}` | {metric.type} | {_cell(metric.documentation)} |"
