"""``tool serve proxy``: several servers behind one address."""

from __future__ import annotations

from dataclasses import replace

from toolkit.commands.options import with_flags, with_lmdeploy_flags
from toolkit.commands.output import say
from toolkit.serve.http.limits import Limits
from toolkit.serve.options import KEYS, NODE_KEYS, ProxySettings, split_keys


@with_lmdeploy_flags("serve proxy")
@with_flags("limits", Limits)
@with_flags("settings", ProxySettings)
def run(limits: Limits, settings: ProxySettings) -> None:
    """Spread requests over several servers. They join by --node, or with --node-keys by --proxy-url.

    Example: tool serve proxy --server-port 8000 --strategy prefix_cache_aware
    """
    from toolkit.serve.proxy import run

    keys = split_keys(f"--api-keys (or {KEYS})", settings.api_keys)
    node_keys = split_keys(f"--node-keys (or {NODE_KEYS})", settings.node_keys)
    run.serve(
        replace(settings, api_keys=keys, node_keys=node_keys, limits=limits),
        lambda url: say(f"HINT:    The proxy is ready at {url}"),
    )
