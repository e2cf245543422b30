"""Options of a batch, once: flags of ``tool batch``, arguments of ``Pipeline.batch``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import option, same_option
from toolkit.serve.http.limits import Limits
from toolkit.serve.openai.batches.urls import CHAT, PROMPTED
from toolkit.serve.options import ServerSettings


@dataclass(frozen=True, kw_only=True)
class Filling:
    """``defaults``: fields of every request that does not give them, where its endpoint has such a field."""

    prompt: str | None = option(
        None,
        'Prompt made of each row\'s columns, such as "Translate: {text}". The input is then rows: CSV, Parquet or '
        "JSON lines.",
    )
    system: str | None = option(None, "With --prompt: the system text, likewise of columns.")
    endpoint: str = option(CHAT, f"With --prompt: where rows go: {', '.join(PROMPTED)}.")
    id_column: str | None = option(
        None,
        "With --prompt: the column that names a row (custom_id). Default: custom_id where there is one, else row-N.",
    )
    json_schema: str | None = option(None, "JSON schema that answers are held to, or a file that holds it.")
    extra_body: dict[str, Any] | None = option(
        None, 'Other fields of every request that does not give them, as JSON: \'{"reasoning_effort": "low"}\'.'
    )
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """What of a server's options there is without a server."""

    model_name: str | None = option(None, "Name that the lines' requests use. Default: the model's.")
    generation_config: str = same_option(ServerSettings, "generation_config")
    pooling: str = same_option(ServerSettings, "pooling")
    tool_call_parser: str | None = same_option(ServerSettings, "tool_call_parser")
    reasoning_parser: str | None = same_option(ServerSettings, "reasoning_parser")
    vision_max_batch_size: int = same_option(ServerSettings, "vision_max_batch_size")
    allowed_local_media_path: Path | None = same_option(ServerSettings, "allowed_local_media_path")
    allowed_media_domains: Sequence[str] | None = same_option(ServerSettings, "allowed_media_domains")
    media_io_kwargs: str | None = same_option(ServerSettings, "media_io_kwargs")
    limit_mm_per_prompt: str | None = same_option(ServerSettings, "limit_mm_per_prompt")

    def server(self, limits: Limits) -> ServerSettings:
        """As a server's application takes them."""
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        return ServerSettings(**given, limits=limits, no_page=True, disable_fastapi_docs=True, disable_metrics=True)
