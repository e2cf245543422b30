"""``tool pull``: fetch a model."""

from __future__ import annotations

from typing import Annotated

import typer


def run(
    model: Annotated[str, typer.Argument(help="Hub id (owner/name), demo, or a local directory or .gguf file.")],
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit on the hub.")] = None,
    download_dir: Annotated[str | None, typer.Option(help="Where downloads go. Default: the hub's own cache.")] = None,
) -> None:
    """Fetch MODEL and print where it lies: the path alone on standard output, progress on standard error.

    A second call is instant. Example: tool pull demo
    """
    from toolkit.artifacts.source import resolve_model

    print(resolve_model(model, revision=revision, download_dir=download_dir).absolute())
