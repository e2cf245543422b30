"""The options of LMDeploy 0.6.5 to 0.18, and what becomes of each here: the one table of them.

``OPTIONS`` has the names of its engine configs' fields; on the command line they have dashes. ``PLACES`` says where
LMDeploy has them. From these come the flags that are taken without being shown (``commands/options.py``), the checks
of the configs' fields, notices, the names that a wrong one is held against, and the tables of docs/lmdeploy.md
(``python scripts/site/lmdeploy_tables.py``).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any, Literal

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.checks import shown
from toolkit.configs.option import spelled
from toolkit.errors import UsageError

Kinds = tuple[type, ...]


@dataclass(frozen=True)
class Theirs:
    """``fate``: "works"; "notice": nothing that a user asks for gets lost when it is stepped over, and one line says
    why; "refused": it asks for something that is not there, and takes its ``default`` alone. ``why``: that line, or
    what to do instead, or how it works here where that differs. ``values``: what it may be, as types or one by one."""

    fate: Literal["works", "notice", "refused"]
    why: str = ""
    default: Any = None
    values: Kinds | tuple[Any, ...] = ()

    def check(self, name: str, value: Any) -> None:
        """Raise UsageError, which names the option ``name``, for a value that it does not take."""
        if type(value) is type(self.default) and value == self.default:
            return
        if self.fate == "refused":
            wanted = "; leave it out" if self.default is None else f", expected {self.default!r}"
            raise UsageError(f"{name}: found {shown(value)}{wanted}: {self.why}")
        kinds = tuple(v for v in self.values if isinstance(v, type))
        if kinds and not (isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))):
            wanted = " or ".join(_KINDS[kind] for kind in kinds)
            raise UsageError(f"{name}: expected {wanted}, found {shown(value)}")
        if self.values and not kinds and not any(type(value) is type(v) and value == v for v in self.values):
            raise UsageError(f"{name}: expected one of {', '.join(map(str, self.values))}, found {shown(value)}")

    def typed(self, name: str, text: Any) -> Any:
        """What a command line's ``text`` stands for. Raises UsageError as ``check`` does, by the ``name`` typed."""
        value = text
        if isinstance(text, str):
            if text == str(self.default):
                return self.default
            whole = text.removeprefix("-").isdecimal() and len(text) < 20
            if whole and (int in self.values or type(self.default) is int):
                value = int(text)
            elif list in self.values and all(part.isdecimal() for part in text.split(",")):
                value = [int(part) for part in text.split(",") if len(part) < 20]
        self.check(name, value)
        return value


_KINDS = {int: "a whole number", bool: "True or False", list: "a list", str: "a text", dict: "a dict"}


def _works(why: str = "") -> Theirs:
    return Theirs("works", why)


def _notice(why: str, default: Any, *values: Any) -> Theirs:
    return Theirs("notice", why, default, values or (type(default),))


def _refused(why: str, default: Any = None) -> Theirs:
    return Theirs("refused", why, default)


_ONE = "a model is split by tp, pp, dp and ep alone"
_SPLIT = "attention, MLPs and experts are all split by tp"
_CACHE = "engines share blocks of the cache by kv_cache_dir"
_CHECKPOINTS = "states are kept at block borders by themselves, and evicted like blocks"
_WHOLE = "whole blocks of every prompt are cached"
_EXPERTS = "rows go to experts by all-to-all over NCCL or gloo"
_MOVED = "blocks go over by shared memory or TCP, as --migration-backend of the servers says"
_STEPS = "a step's tokens are bounded by max_prefill_token_num"
_GRAPHS = "the runner chooses what it captures"
_CORS = "browsers of --allow-origins may send any method and header, without cookies"
_SAME = (  # of commands, as there
    "backend server_port proxy_url max_concurrent_requests log_level ssl model_name max_log_len disable_fastapi_docs "
    "allow_terminate_by_client enable_abort_handling allowed_media_domains disable_metrics tool_call_parser "
    "reasoning_parser vision_max_batch_size share api_key chat_template search_scale work_dir calib_dataset "
    "calib_samples calib_seqlen batch_size w_bits w_sym w_group_size quant_dtype dst_path"
)
OPTIONS: dict[str, Theirs] = {
    # engine configs
    "dtype": _works("float32 too"),
    "model_format": _works("w8a8, gguf, meta_llama and engine too; checked against what the model holds"),
    "tp": _works("ranks on CPUs or GPUs (docs/distributed.md); `convert` writes a file a rank"),
    "dp": _works("copies of `tp` ranks each, under one scheduler (docs/distributed.md)"),
    "ep": _works("tp x dp, or 1"),
    **{name: _works("as tp and ep have it") for name in ("attn_tp_size", "mlp_tp_size", "moe_tp_size")},
    "nnodes": _works("machines of ranks, which start the same command (docs/distributed.md)"),
    "node_rank": _works(),
    "dist_init_addr": _works("of the first machine, or MASTER_ADDR and MASTER_PORT"),
    "distributed_executor_backend": _works("mp: processes, of one machine or several; ray: actors; uni: no ranks"),
    "devices": _works("a GPU for each rank on this machine; pytorch takes them too"),
    "session_len": _works(),
    "max_batch_size": _works(),
    "cache_max_entry_count": _works("on a CPU 0.8, the default, means 0.25; 1, an integer, is one block"),
    "cache_block_seq_len": _works(),
    "block_size": _works("on the command line --cache-block-seq-len"),
    "enable_prefix_caching": _works("on unless turned off"),
    "quant_policy": _works("0, 4, 8, 16, 17, 44 and auto, or none, int4, int8, fp8, fp8_e5m2; not 42"),
    "rope_scaling_factor": _works("--dynamic-rope says by which length requests turn"),
    "use_logn_attn": _works(),
    "download_dir": _works(),
    "revision": _works(),
    "max_prefill_token_num": _works(),
    "async_": _works(),
    "hf_overrides": _works(),
    "language_model_only": _works(),
    "disable_vision_encoder": _works(),
    "enable_metrics": _works(),
    "num_gpu_blocks": _works("also where there is no GPU"),
    "adapters": _works("for either backend"),
    "device_type": _works("on the command line --device"),
    "eager_mode": _works("for either backend; a CPU captures no graphs anyway"),
    "empty_init": _works("for either backend; weights come by update_weights"),
    "custom_module_map": _works("files that hold a family (docs/add-a-model.md), or a dict of names and such files"),
    "enable_mp_engine": _works("for pipeline(); a server's engine has a process of its own anyway"),
    "dllm_block_length": _works(),
    "dllm_unmasking_strategy": _works(),
    "dllm_denoising_steps": _works(),
    "dllm_confidence_threshold": _works(),
    "cache_chunk_size": _notice("memory is set aside at the start, and blocks are handed out one by one", -1),
    "cache_checkpoint_interval": _notice(_CHECKPOINTS, 4096),
    "cache_generation": _notice("answers are cached as prompts are", "auto", "auto", "all", "none"),
    "cache_prompt": _notice(_WHOLE, "auto", "auto", "all"),
    "cache_prompt_boundary_skip": _notice(_WHOLE, 1),
    "communicator": _notice("ranks speak by NCCL on GPUs, by gloo on CPUs", "nccl", "nccl", "native", "cuda-ipc"),
    "cudagraph_capture_batch_sizes": _notice(_GRAPHS, None, list),
    "enable_eplb": _works("whole experts move between ranks by the load that is seen; no copies of them"),
    "enable_return_routed_experts": _notice("each request that says return_routed_experts is told", False),
    "enable_microbatch": _notice(_ONE, False),
    "enable_transfer_obj_ref": _notice("results come as arrays, through no object store", False),
    "kernel_block_size": _notice("kernels work on blocks of the cache's own size", -1),
    "logprobs_mode": _notice(
        "logprobs are given to whoever asks for them; logits by output_logits", None, "raw_logits", "raw_logprobs"
    ),
    "max_prefill_iters": _notice(_STEPS, 1),
    "migration_backend": _works("auto, shm and tcp; DLSlime and Mooncake are refused where a role is given"),
    "moe_a2a_backend": _notice(_EXPERTS, "auto", "auto", "default", "deepep"),
    "mp_engine_backend": _notice("a process is started without a framework", "mp", "mp", "ray"),
    "num_cpu_blocks": _notice("a request that gives way is computed again, not swapped out", 0),
    "num_tokens_per_iter": _notice(_STEPS, 0),
    "piecewise_cudagraph_max_tokens": _notice(_GRAPHS, None, int),
    "prefill_interval": _notice("every step mixes prompts and answers", 16),
    "prefix_cache_decode_state_interval": _notice(_CHECKPOINTS, 0),
    "prefix_cache_state_budget": _notice(_CHECKPOINTS, 0),
    "thread_safe": _notice("an engine may be used from any thread", False),
    "trust_remote_code": _notice("code that comes with a model is never run", False),
    "cp": _refused(_ONE, 1),
    "device_num": _refused(_ONE),
    "dp_rank": _refused(_ONE, 0),
    "gemm_input_dtype": _refused("activations have the dtype that the weights call for"),
    "kv_transfer_config": _refused(_CACHE),
    "role": _works("for either backend (docs/how-to/several-machines.md)"),
    **{name: _refused(_SPLIT) for name in ("attn_cp_size", "attn_dp_size", "mlp_dp_size", "outer_dp_size")},
    # flags of commands alone
    "allow_credentials": _notice(_CORS, False),
    "allow_methods": _notice(_CORS, "*", str),
    "allow_headers": _notice(_CORS, "*", str),
    "speculative_algorithm": _works("lookup (ngram), draft_model, eagle3, eagle, dflash, mtp"),
    "speculative_draft_model": _works(
        "a smaller model of the same vocabulary, or a head (EAGLE, EAGLE-3, DFlash, Gemma 4's assistants)"
    ),
    "speculative_num_draft_tokens": _works("at most; 16 unless told otherwise"),
    "speculative_dflash_block_size": _works("the draft's own unless told otherwise"),
    "serving_strategy": _works(),
    "dummy_prefill": _refused("prompts are always computed", False),
    "migration_protocol": _notice(_MOVED, "RDMA", "RDMA", "NVLINK"),
    "link_type": _notice(_MOVED, "RoCE", "RoCE", "IB"),
    "disable_gdr": _notice(_MOVED, False),
    "disable_cache_status": _notice("nodes are kept in --state-file, if that is given", False),
    "server_name": _works("127.0.0.1 unless told otherwise"),
    "allow_origins": _works("none unless named; repeat the flag for several"),
    "api_keys": _works("repeat the flag for several, or separate them by commas"),
    "generation_config": _works("toolkit in place of lmdeploy"),
    "strategy": _works("prefix_cache_aware too"),
    "routing_strategy": _works("--strategy"),
    "device": _works("auto, cpu, cuda, cuda:N, and what else torch has; ascend, camb and maca are npu, mlu and cuda"),
    **dict.fromkeys(_SAME.split(), _works()),
    "session_id": _notice("a conversation is kept by the client", 1, int),
    "tokenizer_path": _refused("an artifact takes the model's own tokenizer"),
    "group_size": _notice("read from the model", 0, int),
    "dump_file": _works("--json; JSON alone"),
}
# Those that are otherwise in one command.
_ALONE: dict[tuple[str, str], Theirs] = {
    ("convert", "chat_template"): _notice(
        "the model's own goes along; the commands that run it take another", None, str
    ),
    ("lite calibrate", "search_scale"): _notice("auto_awq alone searches scales", False),
    ("lite smooth_quant", "search_scale"): _notice("auto_awq alone searches scales", False),
    ("serve gradio", "max_log_len"): _notice("prompts are not logged", None, int),
    ("serve api_server", "enable_metrics"): _notice("they are on unless --disable-metrics turns them off", False),
}
# Where LMDeploy has them. Of commands the flags.
_ENGINE = (
    "dtype tp session_len cache_max_entry_count enable_prefix_caching quant_policy model_format rope_scaling_factor "
    "revision download_dir communicator"
)
_CHAT = (
    f"{_ENGINE} backend adapters device eager_mode chat_template dllm_block_length cp speculative_algorithm "
    "speculative_draft_model speculative_num_draft_tokens speculative_dflash_block_size async_ trust_remote_code "
    "prefix_cache_state_budget prefix_cache_decode_state_interval language_model_only ep moe_a2a_backend hf_overrides"
)
_LITE = "work_dir calib_dataset calib_samples calib_seqlen batch_size dtype revision download_dir trust_remote_code"
_SERVER = "server_name server_port api_keys ssl log_level"
PLACES: dict[str, tuple[str, ...]] = {
    place: tuple(names.split())
    for place, names in {
        "TurbomindEngineConfig": (
            "dtype model_format tp session_len max_batch_size cache_max_entry_count cache_chunk_size "
            "cache_block_seq_len enable_prefix_caching quant_policy rope_scaling_factor use_logn_attn download_dir "
            "revision max_prefill_token_num num_tokens_per_iter max_prefill_iters communicator dp device_num "
            "attn_tp_size attn_dp_size mlp_tp_size mlp_dp_size outer_dp_size devices empty_init hf_overrides "
            "enable_metrics cp attn_cp_size nnodes node_rank dist_init_addr async_ disable_vision_encoder ep "
            "cache_checkpoint_interval cache_prompt cache_prompt_boundary_skip cache_generation language_model_only "
            "gemm_input_dtype moe_a2a_backend"
        ),
        "PytorchEngineConfig": (
            "dtype tp session_len max_batch_size cache_max_entry_count prefill_interval block_size num_cpu_blocks "
            "num_gpu_blocks adapters max_prefill_token_num thread_safe enable_prefix_caching device_type eager_mode "
            "custom_module_map download_dir revision quant_policy distributed_executor_backend dp dp_rank ep "
            "enable_microbatch empty_init enable_eplb model_format role migration_backend enable_mp_engine "
            "enable_metrics hf_overrides disable_vision_encoder mp_engine_backend logprobs_mode dllm_block_length "
            "dllm_unmasking_strategy dllm_denoising_steps dllm_confidence_threshold attn_tp_size mlp_tp_size "
            "moe_tp_size enable_return_routed_experts enable_transfer_obj_ref kernel_block_size "
            "cudagraph_capture_batch_sizes prefix_cache_state_budget prefix_cache_decode_state_interval "
            "language_model_only kv_transfer_config piecewise_cudagraph_max_tokens"
        ),
        "chat": _CHAT,
        "serve api_server": (
            f"{_SERVER} allow_origins proxy_url max_concurrent_requests model_name max_log_len disable_fastapi_docs "
            "allow_terminate_by_client enable_abort_handling allowed_media_domains disable_metrics tool_call_parser "
            "reasoning_parser generation_config vision_max_batch_size "
            f"{_CHAT} max_batch_size cache_block_seq_len max_prefill_token_num num_tokens_per_iter max_prefill_iters "
            "allow_credentials allow_methods allow_headers dp dp_rank enable_microbatch enable_eplb role "
            "migration_backend node_rank nnodes disable_vision_encoder enable_metrics logprobs_mode "
            "dllm_unmasking_strategy dllm_denoising_steps dllm_confidence_threshold enable_return_routed_experts "
            "distributed_executor_backend dist_init_addr kernel_block_size cudagraph_capture_batch_sizes empty_init "
            "num_gpu_blocks kv_transfer_config piecewise_cudagraph_max_tokens"
        ),
        "serve gradio": (
            f"{_ENGINE} backend server_name server_port share device eager_mode chat_template max_batch_size "
            "cache_block_seq_len max_prefill_token_num "
            "max_log_len"
        ),
        "serve proxy": (
            f"{_SERVER} strategy routing_strategy disable_cache_status serving_strategy migration_protocol "
            "link_type disable_gdr dummy_prefill"
        ),
        "serve api_client": "api_key session_id",
        "lite auto_awq": f"{_LITE} search_scale device w_bits w_sym w_group_size",
        "lite auto_gptq": f"{_LITE} w_bits w_group_size",
        "lite calibrate": f"{_LITE} search_scale",
        "lite smooth_quant": f"{_LITE} search_scale device quant_dtype",
        "convert": "model_format tp dst_path revision download_dir tokenizer_path group_size chat_template dtype",
        "check_env": "dump_file",
    }.items()
}
CONFIGS = ("TurbomindEngineConfig", "PytorchEngineConfig")
# Fields of PytorchEngineConfig -> how their flags are called, and TurbomindEngineConfig's own.
FLAGS = {"device_type": "device", "block_size": "cache_block_seq_len"}
_OF_ENGINES = {name: OPTIONS[name] for place in (*CONFIGS, "chat") for name in PLACES[place]}


def stepped_over(place: str) -> dict[str, Theirs]:
    """The options of a command that it takes for LMDeploy's users alone; ``place`` "": of all that run a model."""
    found = {name: of(place, name) for name in PLACES[place]} if place else _OF_ENGINES
    return {name: option for name, option in found.items() if option.fate != "works"}


def of(place: str, name: str) -> Theirs:
    """An option of LMDeploy's command or config ``place``."""
    return _ALONE.get((place, name), OPTIONS[name])


def notice(option: Theirs, spelled: str) -> str:
    """What is said once of an ignored option; ``spelled``: as the user wrote it."""
    return f"{spelled}: taken, but without effect here: {option.why}"


def notices(config: Any) -> list[str]:
    """Those for the fields of ``config`` (a dataclass) that are not at their defaults."""
    given = [(f.name, getattr(config, f.name)) for f in fields(config) if _fate(f.name) == "notice"]
    defaults = {f.name: f.default for f in fields(config)}
    return [notice(OPTIONS[name], f"{name}={shown(value)}") for name, value in given if value != defaults[name]]


def check_fields(config: Any) -> None:
    """Raise UsageError for a field of LMDeploy's that is stepped over or refused, and has a value that it may not."""
    for f in fields(config):
        if _fate(f.name) in ("notice", "refused"):
            OPTIONS[f.name].check(f.name, getattr(config, f.name))


def _fate(name: str) -> str:
    return OPTIONS[name].fate if name in OPTIONS else ""


def flag_of(typed: str) -> str | None:
    """The flag that is meant by a field's name typed as one, where it is called otherwise."""
    name = FLAGS.get(typed.lstrip("-").replace("-", "_"))
    return None if name is None else spelled(name)


def known_as(name: str, own: Collection[str]) -> str:
    """Of a field ``name`` that a config with the fields ``own`` has not: what it is called there, or who has it."""
    twins = {**FLAGS, **{there: here for here, there in FLAGS.items()}, "async": "async_"}
    if twins.get(name) in own:
        return f"did you mean {twins[name]}?"
    holder = next((config for config in CONFIGS if name in PLACES[config]), None)
    return "" if holder is None else f"it is a field of {holder}"
