"""The arguments of the Python API: checked, and spread over the prompts."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from toolkit.configs.checks import shown
from toolkit.configs.engine import VisionConfig
from toolkit.configs.speculative import SpeculativeConfig
from toolkit.errors import UsageError
from toolkit.messages import GenerationConfig
from toolkit.pipeline.session import Session

LOG_LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG")
RENAMED = {  # arguments of older releases -> what to write now
    "request_output_len": "gen_config=GenerationConfig(max_new_tokens=…)",
    **{
        name: f"gen_config=GenerationConfig({name}=…)"
        for name in ("top_k", "top_p", "temperature", "repetition_penalty", "ignore_eos", "max_new_tokens")
    },
    "model_name": "chat_template_config=ChatTemplateConfig(model_name=…)",
    "tp": "backend_config=TurbomindEngineConfig(tp=…)",
}


def configs(gen_config: GenerationConfig | list[GenerationConfig], count: int) -> list[GenerationConfig]:
    """One config a prompt. Raises UsageError where the numbers differ."""
    configs = [gen_config] * count if isinstance(gen_config, GenerationConfig) else gen_config
    if not isinstance(configs, list) or not all(isinstance(c, GenerationConfig) for c in configs):
        raise UsageError(f"gen_config: expected a GenerationConfig or a list of them, found {shown(gen_config, 60)}")
    if len(configs) != count:
        raise UsageError(f"gen_config: expected one, or {count} (as many as prompts), found {len(configs)}")
    for config in configs:
        config.validate()
    return configs


def choices(config: GenerationConfig) -> list[GenerationConfig]:
    """n single configs; choice i has the seed ``random_seed + i``."""
    if config.n == 1:
        return [config]
    seed = config.random_seed
    return [
        dataclasses.replace(config, n=1, random_seed=None if seed is None else (seed + i) % (1 << 64))
        for i in range(config.n)
    ]


def sessions(sessions: Session | list[Session] | None, count: int) -> list[Session] | None:
    """One session a prompt, None where none is given. Raises UsageError where the numbers differ."""
    if sessions is None:
        return None
    many = [sessions] if isinstance(sessions, Session) else sessions
    if not isinstance(many, list) or len(many) != count or not all(isinstance(s, Session) for s in many):
        raise UsageError(f"sessions: expected {count}, one a prompt, found {shown(sessions, 60)}")
    return many


def id_rows(input_ids: Any, vocab_size: int) -> list[list[int]]:
    """One or several sequences of at least two token ids below ``vocab_size``. Raises UsageError for anything else."""
    rows = input_ids if isinstance(input_ids, list) and input_ids and isinstance(input_ids[0], list) else [input_ids]
    for i, ids in enumerate(rows):
        good = isinstance(ids, list) and len(ids) > 1 and all(type(t) is int and 0 <= t < vocab_size for t in ids)
        if not good:
            raise UsageError(
                f"input_ids[{i}]: expected at least two token ids in [0, {vocab_size}), found {shown(ids, 60)}"
            )
    return rows


def template_options(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a call's further arguments say to the chat template. Raises UsageError for others."""
    given = kwargs.pop("chat_template_kwargs", None) or {}
    if not isinstance(given, dict) or not {"self", "messages"}.isdisjoint(given):
        raise UsageError(
            f"chat_template_kwargs: expected a dict without 'self' and 'messages', found {shown(given, 60)}"
        )
    options = dict(given)
    if (tools := kwargs.pop("tools", None)) is not None:
        options["tools"] = tools
    refuse_unknown("the call", kwargs)
    return options


def refuse_unknown(where: str, kwargs: dict[str, Any]) -> None:
    """Raise UsageError for the first argument that nothing has taken; an older name gets a hint at the new one."""
    for name in kwargs:
        hint = f"; write {RENAMED[name]}" if name in RENAMED else ""
        raise UsageError(f"{name}: {where} knows no such argument{hint}")


def check(speculative_config: Any, gen_config: Any, max_log_len: Any, vision: Any) -> None:
    """Raise UsageError for an argument of ``Pipeline`` that means nothing."""
    if not isinstance(speculative_config, (SpeculativeConfig, type(None))):
        found = type(speculative_config).__name__
        raise UsageError(f"speculative_config: expected a SpeculativeConfig, found {found}")
    if gen_config is not None and not isinstance(gen_config, GenerationConfig):
        raise UsageError(f"gen_config: expected a GenerationConfig, found {type(gen_config).__name__}")
    if max_log_len is not None and (not isinstance(max_log_len, int) or max_log_len < 0):
        raise UsageError(f"max_log_len: expected a number of characters, found {shown(max_log_len)}")
    if not isinstance(vision, VisionConfig):
        raise UsageError(f"vision_config: expected a VisionConfig, found {type(vision).__name__}")


def set_log_level(logger: logging.Logger, level: str) -> None:
    """Also where nobody has set up logging. Raises UsageError."""
    if level not in LOG_LEVELS:
        raise UsageError(f"log_level: expected one of {', '.join(LOG_LEVELS)}, found {shown(level)}")
    logger.setLevel(level)
    if not logger.handlers and not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
