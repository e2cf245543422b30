"""The options of a server and of a proxy, once: flags of ``tool serve api_server`` and ``tool serve proxy``, arguments
of ``toolkit.serve()``, and what the application works by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import OR_NAME, PATH, option, same_option, spelled
from toolkit.errors import UsageError
from toolkit.serve.http.access.proxies import Proxies
from toolkit.serve.http.limits import Limits

KEYS = "TOOLKIT_API_KEYS"
NODE_KEYS = "TOOLKIT_NODE_KEYS"
HYBRID, DIST_SERVE = SERVING = ("Hybrid", "DistServe")  # LMDeploy's
MAX_GRACE_S = 3600
CLIENT_GRACE_S = 2.0  # after the requests were ended: time to write the last bytes
_SEVERAL = {"rich_help_panel": "Several models"}
CACHE_SHARES = ("all", "user")
_SHARES = {"rich_help_panel": "Fair shares"}
_IMAGES = {"rich_help_panel": "Images"}
_CONTROL = {"rich_help_panel": "What clients may do to the server"}
_FOR_ONE = (
    "model_name", "proxy_url", "node_url",  # proxy_key alone does nothing, and may stand in the environment
    "allow_terminate_by_client", "enable_abort_handling", "enable_sleep_mode", "batch_dir",
    "enable_weight_updates", "weight_updates_path", "adapter_dir", "trusted_proxy",
)  # fmt: skip
_FOR_SEVERAL = ("models_dir", "memory", "idle_timeout", "swap_patience")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """``adapters``: names of LoRA adapters, which requests use in place of the model's. ``api_keys``,
    ``api_key_file``: see keys.ApiKeys; ``generation_config``: see sampling.choose_defaults; ``pooling``: see
    pooling.choose; ``tool_call_parser``, ``reasoning_parser``: names, see parsing.Formats; ``otlp_traces_endpoint``:
    see traces.Traces."""

    server_name: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 = reachable from outside.")
    server_port: int = option(23333, "Port; 0 = any free one.")
    model_name: str | None = option(None, "Name that requests use. Default: the model's.")
    api_keys: Sequence[str] = option(
        (), "Key that requests must carry; repeat it, or separate keys by commas.", envvar=KEYS
    )
    api_key_file: Path | None = option(None, "File of keys, one a line; read again as it changes.", path=PATH)
    key_share: float = option(
        1.0, "Share of the places in the batch that one key may take at most.", min=0.01, **_SHARES
    )
    key_requests: int | None = option(
        None, "Requests of one key that are answered at once; more get a 429. Default: no limit.", min=1, **_SHARES
    )
    key_tokens_per_minute: int | None = option(
        None, "Tokens of prompts and answers that one key may use in a minute. Default: no limit.", min=1, **_SHARES
    )
    lowest_priority: int = option(
        0,
        "The lowest (most urgent) priority that requests may ask for. Default: clients only lower their own.",
        **_SHARES,
    )
    prefix_cache_shared: str = option(
        "all",
        "Who finds the beginning of a prompt in the cache that somebody has sent: all, or the same key alone (user).",
        allowed=CACHE_SHARES,
        **_SHARES,
    )
    trusted_proxy: Sequence[str] = option(
        (), "Address (or network) of a tool serve proxy, which says whose its requests are; repeatable.", **_SHARES
    )
    allow_origins: Sequence[str] = option((), "Web origin that may call (CORS), * for any; repeatable. Default: none.")
    max_concurrent_requests: int | None = option(
        None, "HTTP requests worked on at once; more wait. Default: no limit.", min=1
    )
    models_dir: Path | None = option(None, "Directory of more models and adapters.", **_SEVERAL)
    memory: str | None = option(None, "What loaded models may take together, such as 12GB.", **_SEVERAL)
    idle_timeout: float = option(
        0.0, "Seconds after which an unused model's process ends; 0 = never.", min=0, **_SEVERAL
    )
    swap_patience: float = option(
        30.0,
        "Seconds that requests which came while a model had to make room for another may still take; 0 = any.",
        min=0,
        **_SEVERAL,
    )
    batch_dir: Path | None = option(
        None,
        "Directory in which files, batches, stored responses and sessions outlive the server. Default: a "
        "temporary one.",
    )
    alias: Sequence[str] = option((), "OTHER=NAME: another name of a model; repeatable.", **_SEVERAL)
    proxy_url: str | None = option(None, "Proxy (tool serve proxy) to join.")
    node_url: str | None = option(None, "This server's address as the proxy reaches it. Default: found out.")
    proxy_key: str | None = option(None, "Key that the proxy's /nodes/* asks for.", envvar="TOOLKIT_PROXY_KEY")
    grace_period: float = option(10.0, "Seconds that running requests get to finish after SIGTERM.", min=0)
    generation_config: str = option(
        "auto",
        "Sampling that requests leave open: auto (the model's generation_config.json, else greedy), toolkit "
        "(greedy), or another such file or its directory.",
        path=OR_NAME,
    )
    pooling: str = option(
        "auto",
        "Which hidden state is a text's embedding: cls (of its first token), last (of its last one), mean (of all), or "
        "auto (as the model's sentence-transformers folder says; else cls of an encoder, last of others).",
    )
    tool_call_parser: str | None = option(
        None, "How the model writes calls of tools, such as hermes. Default: by its chat template."
    )
    reasoning_parser: str | None = option(
        None, "How it marks thoughts, such as qwen3; none: leave them in the text. Default: by its template."
    )
    parse_special: bool = option(
        False, "Special tokens that messages spell (<|im_end|>) become those tokens, as with most servers."
    )
    vision_max_batch_size: int = option(1, "Images that are encoded at once, at most.", min=1)
    allowed_local_media_path: Path | None = option(
        None, "Folder whose files requests may name as images or videos. Default: none may be.", path=PATH, **_IMAGES
    )
    allowed_media_domains: Sequence[str] | None = option(
        None, "Hosts that images and videos are fetched from. Default: all that are public.", **_IMAGES
    )
    allow_private_media: bool = option(
        False, "Addresses that are not public too, of hosts that --allowed-media-domains names.", **_IMAGES
    )
    media_io_kwargs: str | None = option(
        None, 'How videos are read, as JSON: \'{"video": {"num_frames": 16, "fps": 1}}\'. Default: as the model has it.'
    )
    limit_mm_per_prompt: str | None = option(
        None, 'Images and videos of a request, as JSON: \'{"image": 4, "video": 1}\'. Default: --max-images.', **_IMAGES
    )
    ssl: bool = option(False, "HTTPS, by the files in SSL_KEYFILE and SSL_CERTFILE.")
    ssl_certfile: Path | None = option(None, "HTTPS: this server's certificate, in PEM, with those that vouch for it.")
    ssl_keyfile: Path | None = option(None, "The certificate's key. Default: in the same file.")
    no_page: bool = option(False, "No page to chat at /.")
    disable_fastapi_docs: bool = option(False, "No documentation of the API at /docs and /openapi.json.")
    disable_metrics: bool = option(False, "No /metrics.")
    allow_terminate_by_client: bool = option(False, "Clients may end the server by /terminate.", **_CONTROL)
    enable_abort_handling: bool = option(False, "Clients may end requests by /abort_request.", **_CONTROL)
    enable_sleep_mode: bool = option(False, "Clients may free the model's memory by /sleep, and /wakeup.", **_CONTROL)
    enable_weight_updates: bool = option(False, "Clients may replace the weights by /update_weights.", **_CONTROL)
    weight_updates_path: Path | None = option(
        None, "Folder below which /update_weights may name files. Default: none.", **_CONTROL
    )
    adapter_dir: Path | None = option(
        None,
        "LoRA adapters that come and go while it runs; /v1/load_lora_adapter may name those in it.",
        path=PATH,
        **_CONTROL,
    )
    log_level: str = option("warning", "critical, error, warning, info (requests too) or debug.")
    log_format: str = option("text", "text, or json: one object a line.")
    otlp_traces_endpoint: str | None = option(None, "OpenTelemetry collector that gets traces (OTLP over HTTP).")
    max_log_len: int | None = option(None, "Characters of a prompt in the log. Default: all.", min=0)
    adapters: Sequence[str] = ()
    limits: Limits = field(default_factory=Limits)

    def check(self, several: bool = False) -> None:
        """Raise UsageError for what a server of one model, or of ``several``, cannot be told."""
        for name in _FOR_ONE if several else _FOR_SEVERAL:
            if getattr(self, name) != getattr(type(self), name):
                raise UsageError(
                    f"{spelled(name)}: only for a server of {'one model' if several else 'several models'}"
                )
        self._check_media()
        if self.prefix_cache_shared not in CACHE_SHARES:
            found = f"found {self.prefix_cache_shared!r:.40}"
            raise UsageError(f"{spelled('prefix_cache_shared')}: expected {' or '.join(CACHE_SHARES)}, {found}")
        if self.weight_updates_path is not None and not self.enable_weight_updates:
            raise UsageError("--weight-updates-path: only with --enable-weight-updates; name it too")
        if self.adapter_dir is not None and not self.adapter_dir.is_dir():
            raise UsageError(
                f"{spelled('adapter_dir')} {self.adapter_dir}: no such directory; make it, or name another"
            )
        Proxies(self.trusted_proxy)
        if not 0.01 <= self.key_share <= 1:
            raise UsageError(f"{spelled('key_share')}: expected 0.01 to 1, found {self.key_share:g}")
        if not -100 <= self.lowest_priority <= 100:
            raise UsageError(f"{spelled('lowest_priority')}: expected -100 to 100, found {self.lowest_priority}")
        if self.node_url is not None and self.proxy_url is None:
            raise UsageError("--node-url: only with --proxy-url, the proxy that is to know this address; name it too")

    def _check_media(self) -> None:
        if self.allow_private_media and self.allowed_media_domains is None:
            raise UsageError(
                f"{spelled('allow_private_media')}: name the hosts by {spelled('allowed_media_domains')} too; without, "
                "clients could have the server ask any machine of its network"
            )
        if self.limit_mm_per_prompt is not None:
            from toolkit.vision.eyes import LIMIT, media_limits

            images = self.limits.max_images
            for kind, found in media_limits(self.limit_mm_per_prompt).items():
                if found > images:
                    raise UsageError(f"{LIMIT}: expected {kind} of at most {images} (--max-images), found {found}")
        if self.media_io_kwargs is not None:
            from toolkit.vision.sampling import media_sampling

            name, most = spelled("media_io_kwargs"), self.limits.max_video_frames
            count = media_sampling(self.media_io_kwargs, name=name).num_frames
            if count is not None and count > most:
                raise UsageError(f"{name}: expected num_frames of at most {most} (--max-video-frames), found {count}")


@dataclass(frozen=True, kw_only=True)
class ProxySettings:
    """``node``: URLs of those to start with. ``api_keys``: what clients need, none = open; ``node_keys``: what
    /nodes/* needs, none = as clients, who change nothing there unless ``allow_nodes_by_client``."""

    server_name: str = same_option(ServerSettings, "server_name")
    server_port: int = same_option(ServerSettings, "server_port", default=8000)
    strategy: str = option(
        "min_expected_latency",
        "Which node gets a request: random, min_expected_latency, min_observed_latency or prefix_cache_aware.",
    )
    serving_strategy: str = option(
        "Hybrid", "DistServe: nodes of --role prefill compute prompts, those of --role decode write the answers."
    )
    prefill_min_bytes: int = option(1024, "With DistServe, requests of fewer bytes are the decode node's alone.", min=0)
    node: Sequence[str] = option((), "Address of a server to start with; repeatable.")
    state_file: Path | None = option(None, "JSON file in which nodes are kept over a restart. Default: none.")
    heartbeat: float = option(5.0, "Seconds between two looks at a node.", min=0.1)
    node_timeout: float = option(
        1800.0, "Seconds without a byte of an answer after which a node has failed; 0 = never.", min=0
    )
    api_keys: Sequence[str] = same_option(ServerSettings, "api_keys")
    api_key_file: Path | None = same_option(ServerSettings, "api_key_file")
    node_keys: Sequence[str] = option(
        (), "Key that /nodes/* asks for, and without which it changes nothing.", envvar=NODE_KEYS
    )
    allow_nodes_by_client: bool = option(
        False, "Without --node-keys, let whoever may ask the proxy add, remove and end nodes."
    )
    node_key: str | None = option(
        None, "Key that the operator's nodes ask for. Default: what the client has sent.", envvar="TOOLKIT_NODE_KEY"
    )
    allow_origins: Sequence[str] = same_option(ServerSettings, "allow_origins")
    grace_period: float = same_option(ServerSettings, "grace_period")
    ssl: bool = same_option(ServerSettings, "ssl")
    ssl_certfile: Path | None = same_option(ServerSettings, "ssl_certfile")
    ssl_keyfile: Path | None = same_option(ServerSettings, "ssl_keyfile")
    no_page: bool = same_option(ServerSettings, "no_page")
    disable_fastapi_docs: bool = same_option(ServerSettings, "disable_fastapi_docs")
    log_level: str = option("warning", "critical, error, warning, info or debug.")
    log_format: str = same_option(ServerSettings, "log_format")
    limits: Limits = field(default_factory=Limits)

    def check(self) -> None:
        """Raise UsageError for what a proxy cannot be told."""
        if self.serving_strategy not in SERVING:
            raise UsageError(
                f"{spelled('serving_strategy')}: expected {' or '.join(SERVING)}, found {self.serving_strategy!r:.40}"
            )


def split_keys(told: str, entries: Sequence[str]) -> list[str]:
    """Keys as an option has them, several in one by commas. Raises UsageError for an empty one; ``told``: where it
    stands."""
    keys = [key.strip() for entry in entries for key in entry.split(",")]
    if not all(keys):
        raise UsageError(f"{told}: expected non-empty keys, found an empty one")
    return keys
