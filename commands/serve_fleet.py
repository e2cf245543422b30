"""``tool serve api_server A B``: several models on one port."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from toolkit.commands.output import stderr

if TYPE_CHECKING:
    from toolkit.engine_configs import EngineConfig
    from toolkit.serve.run import Address


def serve_several(
    holdings: dict[str, Any],
    memory: str | None,
    address: Address,
    config: EngineConfig,
    chat_template: str | None,
    settings: dict[str, object],
    log_level: str,
    log_format: str,
) -> None:
    """``holdings``: of run.Holdings, the budget apart, which ``memory`` spells."""
    from toolkit.option import read_size
    from toolkit.serve.fleet import run

    budget = None if memory is None else read_size("--memory", memory)
    console = stderr()

    def ready(url: str, names: list[str]) -> None:
        console.print(f"models, loaded when they are asked for: {', '.join(names)}", markup=False, soft_wrap=True)
        console.print(f"HINT:    The server is ready at {url}", markup=False, soft_wrap=True)

    run.serve(
        run.Holdings(**holdings, budget=budget),
        address,
        engine_config=config,
        chat_template=chat_template,
        settings=settings,
        log_level=log_level,
        log_format=log_format,
        ready=ready,
    )
