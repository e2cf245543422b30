"""The options of ``tool serve ray``, once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import field, fields
from pathlib import Path

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.on_ray import OnRay
from toolkit.configs.option import option, same_option, spelled
from toolkit.errors import UsageError
from toolkit.serve.http.limits import Limits
from toolkit.serve.options import ProxySettings, ServerSettings

STRATEGIES = ("prefix_cache_aware", "power_of_two")
MOST_REPLICAS = 4096
_RAY = {"rich_help_panel": "Replicas"}
# What each replica's application is told, too; what concerns connections, keys and pages is the front's.
_OF_REPLICAS = (
    "generation_config", "pooling", "tool_call_parser", "reasoning_parser", "parse_special", "vision_max_batch_size",
    "allowed_local_media_path", "allowed_media_domains", "allow_private_media", "media_io_kwargs",
    "limit_mm_per_prompt", "key_share", "key_requests", "key_tokens_per_minute", "lowest_priority", "adapter_dir",
    "prefix_cache_shared", "log_level", "log_format", "max_log_len",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RaySettings:
    """Names of options that Ray Serve has too are its own."""

    replicas: str = option("1", "N, or MIN:MAX, between which their number follows the queue.", **_RAY)
    target_ongoing_requests: float = option(
        16.0, "Requests that a replica is to have on average; more start another one.", min=0.1, **_RAY
    )
    max_ongoing_requests: int = option(
        64, "Requests that a replica has at most; others wait for a place before they are sent.", min=1, **_RAY
    )
    upscale_delay_s: float = option(10.0, "Seconds of a long queue after which replicas are added.", min=0, **_RAY)
    downscale_delay_s: float = option(300.0, "Seconds of a short one after which they are ended.", min=0, **_RAY)
    cpus: float = option(1.0, "Cores of each replica, as Ray counts them.", min=0, **_RAY)
    gpus: float = option(0.0, "GPUs of each replica.", min=0, **_RAY)
    strategy: str = option(
        STRATEGIES[0], "Which replica gets a request: prefix_cache_aware, or power_of_two (the emptier of two).", **_RAY
    )
    health_check_period_s: float = option(5.0, "Seconds between two looks at a replica.", min=0.1, **_RAY)
    health_check_timeout_s: float = option(
        10.0, "Seconds without an answer to one; after three in a row it is replaced.", min=0.1, **_RAY
    )
    ray_address: str | None = same_option(OnRay, "ray_address")
    write_config: Path | None = option(
        None, "Write a file for `serve deploy` there (YAML), and end; keys are left out of it.", **_RAY
    )
    server_name: str = same_option(ServerSettings, "server_name")
    server_port: int = same_option(ServerSettings, "server_port", default=8000)
    model_name: str | None = same_option(ServerSettings, "model_name")
    api_keys: Sequence[str] = same_option(ServerSettings, "api_keys")
    api_key_file: Path | None = same_option(ServerSettings, "api_key_file")
    key_share: float = same_option(ServerSettings, "key_share")
    key_requests: int | None = same_option(ServerSettings, "key_requests")
    key_tokens_per_minute: int | None = same_option(ServerSettings, "key_tokens_per_minute")
    lowest_priority: int = same_option(ServerSettings, "lowest_priority")
    prefix_cache_shared: str = same_option(ServerSettings, "prefix_cache_shared")
    allow_origins: Sequence[str] = same_option(ServerSettings, "allow_origins")
    grace_period: float = option(600.0, "Seconds that a replica which is to end has for what it answers.", min=0)
    generation_config: str = same_option(ServerSettings, "generation_config")
    pooling: str = same_option(ServerSettings, "pooling")
    tool_call_parser: str | None = same_option(ServerSettings, "tool_call_parser")
    reasoning_parser: str | None = same_option(ServerSettings, "reasoning_parser")
    parse_special: bool = same_option(ServerSettings, "parse_special")
    vision_max_batch_size: int = same_option(ServerSettings, "vision_max_batch_size")
    allowed_local_media_path: Path | None = same_option(ServerSettings, "allowed_local_media_path")
    allowed_media_domains: Sequence[str] | None = same_option(ServerSettings, "allowed_media_domains")
    allow_private_media: bool = same_option(ServerSettings, "allow_private_media")
    media_io_kwargs: str | None = same_option(ServerSettings, "media_io_kwargs")
    limit_mm_per_prompt: str | None = same_option(ServerSettings, "limit_mm_per_prompt")
    adapter_dir: Path | None = same_option(ServerSettings, "adapter_dir")
    no_page: bool = same_option(ProxySettings, "no_page")
    disable_fastapi_docs: bool = same_option(ProxySettings, "disable_fastapi_docs")
    disable_metrics: bool = same_option(ServerSettings, "disable_metrics")
    log_level: str = same_option(ProxySettings, "log_level")
    log_format: str = same_option(ServerSettings, "log_format")
    max_log_len: int | None = same_option(ServerSettings, "max_log_len")
    limits: Limits = field(default_factory=Limits)

    @property
    def bounds(self) -> tuple[int, int]:
        """Replicas: (at least, at most). Raises UsageError."""
        found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", self.replicas.strip())
        if found is None:
            raise UsageError(f"replicas: expected a number or MIN:MAX, such as 2 or 1:4, found {self.replicas!r:.40}")
        least = int(found[1])
        most = least if found[2] is None else int(found[2])
        if not 1 <= least <= most <= MOST_REPLICAS:
            raise UsageError(
                f"replicas: expected 1 <= MIN <= MAX <= {MOST_REPLICAS}, found a MIN of {least} and a MAX of {most}"
            )
        return least, most

    def check(self) -> None:
        """Raise UsageError for what does not go together."""
        _, most = self.bounds
        if self.strategy not in STRATEGIES:
            raise UsageError(f"strategy: expected {' or '.join(STRATEGIES)}, found {self.strategy!r:.40}")
        if most > 1 and self.target_ongoing_requests > self.max_ongoing_requests:
            raise UsageError(
                f"target_ongoing_requests: expected at most {spelled('max_ongoing_requests')}, which is "
                f"{self.max_ongoing_requests}, found {self.target_ongoing_requests:g}: no queue would ever be long"
            )
        self.of_replica("x").check()

    def of_replica(self, model_name: str | None) -> ServerSettings:
        """As a replica's application takes them. The front alone speaks to it, and has seen to keys."""
        given = {name: getattr(self, name) for name in _OF_REPLICAS}
        return ServerSettings(
            **given,
            model_name=model_name,
            trusted_proxy=("127.0.0.1",),
            limits=self.limits,
            no_page=True,
            disable_fastapi_docs=True,
        )


assert {*_OF_REPLICAS} <= {f.name for f in fields(RaySettings)}
