"""The engine's options, a record a backend. LMDeploy's names, fields and defaults; importing this imports no torch."""

from __future__ import annotations

from typing import Any

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.checks import allowed, named, number, shown, switches
from toolkit.configs.limits import Bounds
from toolkit.configs.lmdeploy import check_fields, known_as
from toolkit.configs.moving import check_moving
from toolkit.configs.option import OR_NAME, PATH, option, read_size, same_option
from toolkit.configs.speculative import MODES, MOST_ASKED, SHARES, Speculation, check_speculative, speculation_of
from toolkit.configs.unmasking import UNMASKING, Unmasking, check_dllm
from toolkit.errors import UsageError

DTYPES = ("auto", "float16", "bfloat16", "float32")
MODEL_FORMATS = ("hf", "meta_llama", "awq", "gptq", "auto-round", "compressed-tensors", "modelopt", "bitsandbytes",
                 "mlx", "fp8", "mxfp4", "w8a8", "trellis", "gguf", "engine")  # fmt: skip
LOAD_FORMATS = ("auto", "int8", "int4", "dummy")
AUTO = "auto"
MOST_SINKS = 128  # first tokens that a layer keeps beside its window, at most
POLICY_NAMES = {"none": 0, "int4": 4, "int8": 8, "fp8": 16, "fp8_e5m2": 17}  # LMDeploy's
EXECUTORS = ("uni", "mp", "ray")
RANKS = Bounds(1, 1024, "int32")  # how many of them, or of copies and machines, there may be


def _check_engine(config: EngineConfig, block: str) -> None:
    allowed(config)
    config.quant_policy = _policy(config.quant_policy)
    number("kv_loss", config.kv_loss, 0, 1000)
    count = config.cache_max_entry_count
    if isinstance(count, int) and not isinstance(count, bool):
        number("cache_max_entry_count", count, 1, 1 << 40, whole=True)
    else:
        number("cache_max_entry_count", count, 0, 1, open_low=True)
    if config.block_size & (config.block_size - 1):
        raise UsageError(f"{block}: expected a power of two, found {config.block_size}")
    switches(config, "enable_prefix_caching", "enable_metrics", "disable_vision_encoder", "language_model_only")
    switches(config, "eager_mode", "empty_init", "batch_invariant")
    _check_adapters(config.adapters)
    _check_kept(config)
    check_moving(config)
    if config.kv_window is None and config.kv_sinks != CommonEngineConfig.kv_sinks:
        raise UsageError(f"kv_sinks: found {config.kv_sinks} without kv_window; give that too")
    if config.memory_share is not None:
        number("memory_share", config.memory_share, 1, 1 << 60, whole=True)
    if config.adapter_memory is not None:
        read_size("adapter_memory", config.adapter_memory)
    check_dllm(config)
    check_speculative(config)
    check_fields(config)


def _listed(devices: Any, device: str, ranks: int) -> str:
    """The device of a model whose GPUs LMDeploy's list ``devices`` names, one for each of the ``ranks`` of a machine.
    Raises UsageError where they are no numbers, or not ``device``."""
    if not isinstance(devices, list) or not devices or any(type(x) is not int or x < 0 for x in devices):
        raise UsageError(f"devices: found {shown(devices)}, expected numbers of GPUs, as [0, 1]")
    if ranks == 1 and len(devices) > 1:
        raise UsageError(f"devices: found {shown(devices)}, expected one number, for there is one rank")
    found = "cuda" if ranks > 1 else f"cuda:{devices[0]}"
    if device not in ("auto", "cuda", found):
        raise UsageError(f"devices: found {shown(devices)}, expected what device says, {device}, or none")
    return found


def _check_kept(config: EngineConfig) -> None:
    for name in ("kv_cache_dir", "kv_cache_key"):
        if (path := getattr(config, name)) is not None and not (isinstance(path, str) and path.strip()):
            raise UsageError(f"{name}: expected a path, found {shown(path)}")
    if not isinstance(config.kv_cache_disk, str):
        raise UsageError(f"kv_cache_disk: expected a size such as '20GiB', found {shown(config.kv_cache_disk)}")
    read_size("kv_cache_disk", config.kv_cache_disk)
    if config.kv_cache_dir is None:
        if config.kv_cache_key is not None:
            raise UsageError("kv_cache_key: nothing is kept without kv_cache_dir; name a folder, or leave it out")
    elif not config.enable_prefix_caching:
        raise UsageError("kv_cache_dir: keeps what the prefix cache has; enable_prefix_caching, or leave it out")


def _policy(given: Any) -> int | str:
    """A quant_policy in whatever way it is written. Raises UsageError."""
    found = POLICY_NAMES.get(given, given) if isinstance(given, str) else given
    if isinstance(found, str) and found.isdecimal():
        found = int(found)
    if found != AUTO and found not in (0, 4, 8, 16, 17, 44):
        raise UsageError(
            "quant_policy: expected 0, 4 or 8 (bits of the KV cache), 44 (4 bits, those of keys too), 16 or 17 "
            f"(float8_e4m3fn, float8_e5m2), or auto, found {shown(given)}"
        )
    return found


def _check_adapters(adapters: Any) -> None:
    if adapters is None:
        return
    if not isinstance(adapters, dict) or not adapters:
        raise UsageError(f"adapters: expected a dict of names and paths, found {shown(adapters)}")
    for name, path in adapters.items():
        if not isinstance(name, str) or not name.strip() or not isinstance(path, str) or not path:
            raise UsageError(f"adapters: expected names and paths, found {shown(name)}: {shown(path)}")


@dataclass
class CommonEngineConfig:
    """What both backends take.

    ``quant_policy`` "auto": of each layer the fewest bits that the model bears, as measured
    (docs/figures/few-bits.md).

    ``cache_max_entry_count``: an integer is a number of blocks, whatever its size. ``load_format`` "dummy" reads
    config.json alone. ``adapters``: names of LoRA adapters and where they are, a directory or hub id in PEFT's
    format or a .gguf file each. ``language_model_only``: LMDeploy's newer name of
    ``disable_vision_encoder``. ``eager_mode``: for debugging; a CPU captures no graphs anyway. ``empty_init``: the
    model needs a config.json and a tokenizer alone, and answers nothing before ``update_weights``.
    ``enable_metrics``: whether a server of this engine offers /metrics. ``memory_share``: bytes that weights,
    activations, logits and KV cache are to fit together, where the model can do with so few; a server of several
    models sets it.
    """

    dtype: str = option(
        "auto", "Activations: auto, float16, bfloat16, float32 (least swayed by the batch).", allowed=DTYPES
    )
    tp: int = option(1, "Ranks to split a model over, of this CPU's cores or with a GPU each.", allowed=RANKS)
    pp: int = option(1, "Ranks to lay its layers out over, one behind the other (pytorch only).", allowed=RANKS)
    nnodes: int = option(1, "Machines that the ranks are on.", allowed=RANKS)
    node_rank: int = option(0, "Which of them this is; the first one serves.", allowed=Bounds(0, 1023, "int32"))
    dist_init_addr: str | None = option(None, "HOST:PORT at which the first one waits for the others.")
    master_addr: str | None = option(None, "HOST of --dist-init-addr, as torchrun has it.", hidden=True)
    master_port: int | None = option(None, "PORT of it.", allowed=Bounds(1, 65535, "int32"), hidden=True)
    distributed_executor_backend: str | None = option(
        None,
        "What ranks are: mp (processes), ray (actors, pytorch only) or uni (there are none). Default: mp.",
        allowed=EXECUTORS,
        hidden=True,
    )
    session_len: int | None = option(
        None, "Longest context, in tokens. Default: the model's, if it fits.", allowed=Bounds(1, 1 << 30, "int32")
    )
    max_batch_size: int | None = option(
        None, "Most requests in one step. Default: by device and memory.", allowed=Bounds(1, 1 << 20, "int32")
    )
    cache_max_entry_count: float | int = option(
        0.8, "Share of free memory for the KV cache (up to 1; on a CPU 0.8 means 0.25), or its blocks (from 2)."
    )
    enable_prefix_caching: bool = option(True, "Reuse the KV cache of equal prefixes. Default, but in profile.")
    quant_policy: int | str = option(
        0, "KV cache: 0 (as --dtype), 8 bits, 4 (keys 6), 44 (4, keys too), 16 or 17 (float8 e4m3, e5m2), or auto."
    )
    kv_loss: float = option(0.5, "With --quant-policy auto: rise of the perplexity that is allowed, in %.")
    model_format: str | None = option(
        None, "hf, meta_llama, awq, gptq, w8a8, gguf, engine. Default: read from the model.", allowed=MODEL_FORMATS
    )
    load_format: str = option(
        "auto",
        "auto; int8, int4: rounded while read, without calibration; dummy: random, to measure with.",
        allowed=LOAD_FORMATS,
    )
    max_prefill_token_num: int = option(
        8192, "Most tokens in one step; longer prompts go in chunks.", allowed=Bounds(1, 1 << 30, "int32")
    )
    target_step_ms: float | None = option(
        None,
        "Time of a step, ms: prompts go in chunks that fit it while others decode. 0: no limit. "
        "Default: on a CPU twice a step without prompts, at most 150; on a GPU 0; batch, pipeline(): 2000.",
        allowed=Bounds(0, 1e6),
    )
    kv_cache_dir: str | None = option(
        None, "Keep the KV cache of prompts and answers in this folder too: it outlives a restart.", path=PATH
    )
    kv_cache_disk: str = option("20GiB", "What it may take there, all models together.")
    kv_cache_seconds: float = option(
        604800.0, "Seconds after which what nobody used is deleted there.", allowed=Bounds(1, 1e10)
    )
    kv_cache_key: str | None = option(None, "A file of 32 random bytes: what is kept is encrypted with it.", path=PATH)
    role: str = option(
        "Hybrid", "hybrid; prefill: computes prompts for others; decode: goes on with what those have computed."
    )
    migration_backend: str = option("auto", "How: shm (memory of this machine), tcp, or auto.")
    kv_transfer_address: str | None = option(None, "HOST:PORT at which a prefill server lends; port 0 is any free one.")
    kv_transfer_key: str | None = option(
        None, "A file of 32 random bytes that prefill and decode servers share.", path=PATH
    )
    kv_transfer_cert: str | None = option(None, "Certificate and key (PEM) of the address, for TLS.", path=PATH)
    kv_transfer_memory: str = option("1GiB", "What is lent may take in memory.")
    dynamic_rope: str = option(
        "session",
        "Dynamic NTK turns requests beyond the trained length by the session's (session) or their own (request: "
        "exact, but the prefix cache serves equal lengths alone).",
        allowed=("session", "request"),
    )
    kv_window: int | None = option(
        None,
        "For endless texts: keep keys and values of so many last tokens alone, and of the first (turbomind on a CPU).",
        allowed=Bounds(1, 1 << 30, "int32"),
    )
    kv_sinks: int = option(
        4, "With --kv-window: how many first tokens are kept.", allowed=Bounds(0, MOST_SINKS, "int32")
    )
    adapters: dict[str, str] | None = option(
        None, "NAME=PATH of LoRA adapters (directory, .gguf file or hub id); several may follow.", path=OR_NAME
    )
    adapter_memory: str | None = option(
        None, "Memory for adapters (2GB): others are read again when they are used. Default: all stay (on a CPU)."
    )
    revision: str | None = option(None, "Branch, tag or commit on the hub.")
    download_dir: str | None = option(None, "Where downloads go.", path=PATH)
    threads: int | None = option(None, "CPU threads. Default: all.", allowed=Bounds(0, 4096, "int32"))
    hf_overrides: dict[str, Any] | None = option(None, "JSON object that goes over the model's config.json.")
    dllm_block_length: int | None = option(None, "Tokens guessed together (SDAR). Default: the model's.")
    dllm_unmasking_strategy: str = option(Unmasking.strategy, f"Which guesses stay: {', '.join(UNMASKING)}.")
    dllm_denoising_steps: int | None = option(None, "Passes over a block at most. Default: one a token.")
    dllm_confidence_threshold: float = option(Unmasking.threshold, "From which the first keeps a guess, 0 to 1.")
    speculative: str | None = option(
        None,
        "auto: guess tokens and verify them, where that is faster; off. Default: auto, in profile off.",
        allowed=MODES,
    )
    speculative_algorithm: str | None = option(
        None,
        "How: lookup (or ngram), draft_model, eagle3, eagle, dflash, mtp. Default: lookup, mtp if the model has it.",
    )
    speculative_num_draft_tokens: int | None = option(
        None, "Tokens of a guess at most. Default: 16.", allowed=Bounds(1, MOST_ASKED, "int32"), hidden=True
    )
    speculative_dflash_block_size: int | None = option(
        None,
        "Tokens of a DFlash draft's block. Default: the draft's.",
        allowed=Bounds(2, MOST_ASKED, "int32"),
        hidden=True,
    )
    speculative_draft_model: str | None = option(
        None,
        "A smaller model of the same vocabulary that guesses, or a head (EAGLE, EAGLE-3, DFlash, Gemma 4's).",
        path=OR_NAME,
        metavar="MODEL",
    )
    speculative_shared: str = option(
        "user", "Whose answers are looked up too: of the same key (user), of all, none (off).", allowed=SHARES
    )
    disable_vision_encoder: bool = option(False, "Leave out what the model sees with: texts alone.")
    language_model_only: bool = option(False, "The same.", hidden=True)
    batch_invariant: bool = option(
        False,
        "On a GPU too no answer depends on what else is computed, at a cost of speed. On CPUs it never does.",
        "--batch-invariant",
    )
    eager_mode: bool = option(False, "On a GPU capture no graphs.", "--eager-mode", hidden=True)
    enable_metrics: bool = True
    memory_share: int | None = None
    dp: int = option(1, "Copies that requests are shared out over, each of --tp ranks (pytorch only).", allowed=RANKS)
    ep: int = option(1, "Ranks (tp x dp) that whole experts are shared out over (pytorch only).", allowed=RANKS)
    enable_eplb: bool = option(False, "With --ep: move experts to where they are chosen less (pytorch only).")
    empty_init: bool = option(False, "Read no weights: they come by /update_weights (Pipeline.update_weights).")
    attn_tp_size: int | None = option(None, "LMDeploy's: what --tp says.", hidden=True)
    mlp_tp_size: int | None = option(None, "LMDeploy's: what --tp says.", hidden=True)

    @property
    def first_adapter(self) -> str | None:
        """Name of the one that a command uses which asks the model itself, such as ``chat`` and ``eval``."""
        return next(iter(self.adapters or {}), None)

    @property
    def blind(self) -> bool:
        """Whether a model that sees is loaded without what it sees with."""
        return self.disable_vision_encoder or self.language_model_only

    @property
    def speculation(self) -> Speculation | None:
        return speculation_of(self)

    @property
    def unmasking(self) -> Unmasking:
        return Unmasking(self.dllm_unmasking_strategy, self.dllm_denoising_steps, self.dllm_confidence_threshold)


@named(known_as)
@dataclass
class TurbomindEngineConfig(CommonEngineConfig):
    """Options of the ``turbomind`` backend, the fast path: the ``native`` runner.

    ``async_`` 1: where the runner can. LMDeploy has ``adapters`` for ``pytorch`` alone. ``devices``: numbers of GPUs,
    one for each rank on this machine.
    """

    cache_block_seq_len: int = option(64, "Tokens in a KV block.", allowed=Bounds(16, 1024, "int32"))
    rope_scaling_factor: float = option(
        0.0, "Dynamic NTK scaling of positions (turbomind only).", allowed=Bounds(0, 1e4), show_default=False
    )
    device: str = option("auto", "auto, cpu, cuda, cuda:N, or another by torch's name, such as xpu.")
    async_: int = option(
        1,
        "0: schedule a step when the one before has ended, not while it runs (turbomind only).",
        "--async",
        allowed=Bounds(0, 1, "int32"),
        show_default=False,
    )
    use_logn_attn: bool = option(False, "Queries grow by log n beyond the model's length (turbomind only).")
    cp: int = 1
    cache_chunk_size: int = -1
    num_tokens_per_iter: int = 0
    max_prefill_iters: int = 1
    devices: list[int] | None = None
    communicator: str = "nccl"
    gemm_input_dtype: str | None = None
    cache_checkpoint_interval: int = 4096
    cache_prompt: str = "auto"
    cache_prompt_boundary_skip: int = 1
    cache_generation: str = "auto"
    moe_a2a_backend: str = "auto"
    device_num: int | None = None
    attn_dp_size: int | None = None
    attn_cp_size: int | None = None
    mlp_dp_size: int | None = None
    outer_dp_size: int | None = None

    def __post_init__(self) -> None:
        if self.devices is not None:
            self.device = _listed(self.devices, self.device, self.tp * self.pp * self.dp)
        _check_engine(self, "cache_block_seq_len")
        switches(self, "use_logn_attn")

    @property
    def block_size(self) -> int:
        return self.cache_block_seq_len


@named(known_as)
@dataclass
class PytorchEngineConfig(CommonEngineConfig):
    """Options of the ``pytorch`` backend: the ``tensor`` runner, any spec on any device torch has.

    ``num_gpu_blocks``: KV blocks, 0 = planned from memory. ``custom_module_map``: Python files that hold a model family
    each (docs/add-a-model.md), a path, several, or by the names of architectures; they are run. ``enable_mp_engine``:
    ``pipeline()`` runs the engine in a process of its own. ``devices``: as of turbomind, which LMDeploy has it for.
    """

    block_size: int = same_option(TurbomindEngineConfig, "cache_block_seq_len")
    num_gpu_blocks: int = 0
    device_type: str = same_option(TurbomindEngineConfig, "device")
    devices: list[int] | None = None
    custom_module_map: str | list[str] | dict[str, str] | None = None
    dp_rank: int = 0
    prefill_interval: int = 16
    num_cpu_blocks: int = 0
    thread_safe: bool = False
    enable_microbatch: bool = False
    enable_mp_engine: bool = False
    enable_return_routed_experts: bool = False
    mp_engine_backend: str = "mp"
    kernel_block_size: int = -1
    cudagraph_capture_batch_sizes: list[int] | None = None
    piecewise_cudagraph_max_tokens: int | None = None
    prefix_cache_state_budget: int = 0
    prefix_cache_decode_state_interval: int = 0
    kv_transfer_config: Any = None
    moe_tp_size: int | None = None
    logprobs_mode: str | None = None
    enable_transfer_obj_ref: bool = False

    def __post_init__(self) -> None:
        if self.devices is not None:
            self.device_type = _listed(self.devices, self.device_type, self.tp * self.pp * self.dp)
        _check_engine(self, "block_size")
        switches(self, "enable_mp_engine")
        number("num_gpu_blocks", self.num_gpu_blocks, 0, 1 << 40, whole=True)
        if not all(isinstance(path, str) and path.endswith(".py") for path in self.family_files):
            raise UsageError(
                f"custom_module_map: found {shown(self.custom_module_map)}, expected a Python file (.py) that holds a "
                "FAMILY, several, or a dict of names and such files; classes of torch are not taken, a family is data "
                "(docs/add-a-model.md)"
            )

    @property
    def family_files(self) -> list[str]:
        """Python files that hold a model family each."""
        own = self.custom_module_map
        if own is None or isinstance(own, str):
            return [] if own is None else [own]
        return list(own.values() if isinstance(own, dict) else own)

    @property
    def device(self) -> str:
        return self.device_type


@named()
@dataclass
class VisionConfig:
    """How pictures are encoded: ``max_batch_size`` of them at once, at most. ``thread_safe``: without effect."""

    max_batch_size: int = 1
    thread_safe: bool = False

    def __post_init__(self) -> None:
        number("max_batch_size", self.max_batch_size, 1, 1 << 16, whole=True)


EngineConfig = TurbomindEngineConfig | PytorchEngineConfig
