"""What LMDeploy's own routes answer, for /openapi.json alone (``toolkit.serve.http.openapi.answers``)."""

from __future__ import annotations

from typing import Any, Literal

from toolkit.serve.http.openapi.answer import Answer


class Generated(Answer):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]


class CrossEntropy(Answer):
    ppl: float


class InteractiveAnswer(Answer):
    text: str
    tokens: int
    input_tokens: int
    history_tokens: int
    finish_reason: str | None


class EngineInfo(Answer):
    """``address``: where blocks are lent, "" = in this machine's memory alone; ``endpoint_info``: what another engine
    is to be told by p2p_connect; ``in_common``: what both must have alike."""

    engine_id: str
    role: Literal["Prefill", "Decode"]
    address: str
    tls: bool
    in_common: dict[str, str]
    tp_size: int
    pp_size: int
    dp_size: int
    ep_size: int
    dp_rank: int
    block_size: int
    num_gpu_blocks: int
    num_cpu_blocks: int
    endpoint_info: str


class Initialized(Answer):
    """As LMDeploy has it; 1 is success."""

    status: int
    engine_endpoint_info: dict[str, str]
    kvtransfer_endpoint_info: list[dict[str, Any]]


class Connected(Answer):
    """``status``: 1 where the blocks of that engine can be used here, 2 where not; ``message``: why."""

    status: int
    message: str


class Freed(Answer):
    freed: int
