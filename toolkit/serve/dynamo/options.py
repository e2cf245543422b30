"""The options of ``tool serve dynamo``, once. Names of options that Dynamo's own workers have are theirs."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import option, same_option
from toolkit.serve.options import ServerSettings

DISCOVERY = ("kubernetes", "etcd", "file", "mem")
_DYNAMO = {"rich_help_panel": "Dynamo"}


@dataclass(frozen=True, kw_only=True)
class DynamoSettings:
    namespace: str = option("dynamo", "Of workers and front ends that belong together.", **_DYNAMO)
    component: str = option("backend", "Of workers that a front end shares requests out among.", **_DYNAMO)
    endpoint: str = option("generate", "The worker's, within its component.", **_DYNAMO)
    discovery_backend: str = option(
        "etcd", f"How front ends find it: {', '.join(DISCOVERY)}. file: a folder ($DYN_FILE_KV).",
        allowed=DISCOVERY, **_DYNAMO,
    )  # fmt: skip
    request_plane: str = option("tcp", "How requests come: tcp or nats.", allowed=("tcp", "nats"), **_DYNAMO)
    event_plane: str | None = option(
        None,
        "How it tells which blocks are cached: zmq or nats. Default: Dynamo's.",
        allowed=("zmq", "nats"),
        **_DYNAMO,
    )
    endpoint_types: str = option("chat,completions", "APIs that front ends offer for it.", **_DYNAMO)
    dyn_tool_call_parser: str | None = option(None, "Dynamo's parser of tool calls.", **_DYNAMO)
    dyn_reasoning_parser: str | None = option(None, "Dynamo's parser of thoughts.", **_DYNAMO)
    no_kv_events: bool = option(False, "Do not tell which blocks are cached.", **_DYNAMO)
    model_name: str | None = same_option(ServerSettings, "model_name")
