"""Groups of commands: a name may be written with dashes, and a near miss is answered with the name that was meant."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from toolkit.commands.app.aliases import command_meant
from toolkit.commands.app.help_page import import_renderer
from toolkit.configs.checks import did_you_mean


class Group(TyperGroup):
    """A group whose commands are named with underscores, and found under dashes too."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        import_renderer()
        super().format_help(ctx, formatter)

    def get_command(self, ctx: Any, cmd_name: str) -> TyperCommand | None:
        return super().get_command(ctx, cmd_name.replace("-", "_"))  # type: ignore[return-value]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        if not {"-h", "--help"}.isdisjoint(args):  # of a command in it
            import_renderer()
        try:
            return super().resolve_command(ctx, args)
        except TyperException as error:
            name = args[0].replace("-", "_")
            known = self.list_commands(ctx)
            told = command_meant(name, known) if ctx.parent is None else did_you_mean(name, known)
            if ctx.info_name == "serve" and (not told or name == "demo"):  # as in `vllm serve MODEL`, `ollama serve`
                told = f"; a model is served by: tool serve api_server {args[0]}"
            error.message = f"No such command: {args[0]}{told}"
            raise


def new_app(cls: type[TyperGroup] = Group, **more: Any) -> typer.Typer:
    """An application, or a group of its commands, as all here are."""
    return typer.Typer(cls=cls, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, **more)
