"""LMDeploy's options that have no counterpart here: those that are taken without effect, and those that are not built.

Names are those of its engine configs; on the command line they have dashes.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from toolkit.configs.checks import shown

# Nothing that a user asks for gets lost when these are stepped over: name -> why. One notice tells it.
IGNORED = {
    "cache_checkpoint_interval": "no cached state needs checkpoints",
    "cache_chunk_size": "blocks of the KV cache are handed out one by one",
    "cache_generation": "answers are cached as prompts are",
    "cache_prompt": "whole blocks of every prompt are cached",
    "cache_prompt_boundary_skip": "whole blocks of every prompt are cached",
    "communicator": "a model runs on one device",
    "cudagraph_capture_batch_sizes": "the runner chooses what it captures",
    "distributed_executor_backend": "a model runs on one device",
    "eager_mode": "the pytorch backend captures no graphs",
    "enable_eplb": "experts lie on one device",
    "enable_microbatch": "a model runs on one device",
    "enable_return_routed_experts": "each request that says return_routed_experts is told",
    "enable_mp_engine": "a server's engine has a process of its own anyway",
    "kernel_block_size": "kernels work on blocks of the cache's own size",
    "max_prefill_iters": "a step's tokens are bounded by max_prefill_token_num",
    "migration_backend": "caches do not leave the engine",
    "moe_a2a_backend": "experts lie on one device",
    "mp_engine_backend": "a server's engine has a process of its own anyway",
    "num_cpu_blocks": "a request that gives way is computed again, not swapped out",
    "num_tokens_per_iter": "a step's tokens are bounded by max_prefill_token_num",
    "piecewise_cudagraph_max_tokens": "the runner chooses what it captures",
    "prefill_interval": "every step mixes prompts and answers",
    "prefix_cache_decode_state_interval": "no cached state needs checkpoints",
    "prefix_cache_state_budget": "no cached state needs checkpoints",
    "thread_safe": "an engine may be used from any thread",
    "trust_remote_code": "code that comes with a model is never run",
}
# These ask for something that is not there: they take their default alone. Name -> what is so instead.
NOT_BUILT = {
    "cp": "a model runs on one device so far",
    "devices": "choose one by device='cuda:N'",
    "dp": "a model runs on one device so far",
    "dp_rank": "a model runs on one device so far",
    "ep": "a model runs on one device so far",
    "gemm_input_dtype": "activations have the dtype that the weights call for",
    "kv_transfer_config": "caches do not leave the engine yet",
    "nnodes": "a model runs on one machine so far",
    "node_rank": "a model runs on one machine so far",
    "role": "prefill and decode are not served apart yet",
}


def notice(name: str, spelled: str) -> str:
    """What is said once of an ignored option; ``spelled``: as the user wrote it."""
    return f"{spelled}: taken, but without effect here: {IGNORED[name]}"


def notices(config: Any) -> list[str]:
    """Those for the fields of ``config`` (a dataclass) that are not at their defaults."""
    given = [(f.name, getattr(config, f.name)) for f in fields(config) if f.name in IGNORED]
    defaults = {f.name: f.default for f in fields(config)}
    return [notice(name, f"{name}={shown(value)}") for name, value in given if value != defaults[name]]
