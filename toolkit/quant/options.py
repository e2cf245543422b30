"""The options of ``tool lite``: what every method shares, and a record a method. They are flags of the command line and
what Python callers pass; nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.engine import CommonEngineConfig, TurbomindEngineConfig
from toolkit.configs.on_ray import OnRay
from toolkit.configs.option import option, same_option
from toolkit.quant.presets import Preset, choose_preset


def _unheard(line: str) -> None:
    """A notice that nobody reads."""


@dataclass(frozen=True)
class Common(OnRay):
    """What every method shares; workers on Ray only where layers are independent. ``notice``: told of the plan."""

    preset: str = option(
        "balanced",
        "How much effort: fast (16 samples, AWQ rounds to nearest, no tuning, 4k tokens measured), balanced, or best "
        "(128 samples, gradients of all). Other options go before it.",
    )
    calib_dataset: str = option(
        "self",
        "`self` (the model writes it), a .txt/.jsonl/.json/.parquet file or folder, or a known name "
        "(wikitext2, c4, pileval, ptb, gsm8k, open-platypus, openwebtext, ultrachat); NAME=FOLDER reads a copy "
        "of its repository.",
    )
    calib_samples: int | None = option(
        None, "Samples. Default: the preset's; balanced: 128, for `self` at most as many as make 16k tokens."
    )
    calib_self_samples: int | None = option(
        None,
        "Samples that the model writes itself, beside those of a dataset: the loss then carries over to other text. "
        "Default: half of the preset's samples, at most 16k tokens; none with --calib-samples.",
    )
    calib_seqlen: int = option(512, "Tokens in a sample.")
    batch_size: int = option(8, "Samples that go through a layer at once.")
    cache_memory: float = option(4.0, "GiB of activations kept in memory; more goes to disk.")
    calibration: str | None = option(None, "Statistics that `tool lite calibrate` wrote, in place of text.")
    format: str | None = option(
        None,
        "awq, gptq, gptq_v2, compressed-tensors, w8a8, fp8, mxfp4, auto_round, gguf, or trellis (2 to 4 bits with the "
        "least loss, read by this tool alone). Default: the method's.",
    )
    skip: tuple[str, ...] = option((), "Leave linears dense whose name this pattern fits (repeatable).")
    include: tuple[str, ...] = option((), "Quantize only linears that this pattern fits (repeatable).")
    quantize_lm_head: bool = option(False, "Quantize the head too; a tied one gets weights of its own.")
    dtype: str = option("auto", "What stays unquantized is stored as: auto, float16, bfloat16, float32.")
    device: str = same_option(TurbomindEngineConfig, "device")
    revision: str | None = same_option(CommonEngineConfig, "revision")
    download_dir: str | None = same_option(CommonEngineConfig, "download_dir")
    seed: int = option(0, "Of the calibration text.")
    eval_tokens: int | None = option(
        None, "Tokens of held-out text for the perplexity before and after. Default: 24576; preset fast: 4096."
    )
    overwrite: bool = option(False, "Replace the artifact in --work-dir.")
    notice: Callable[[str], None] = _unheard

    @property
    def effort(self) -> Preset:
        """What options that are left open come from. Raises UsageError."""
        return choose_preset(self.preset)

    @property
    def measured(self) -> int:
        """Tokens of the held-out text that are scored."""
        return self.effort.eval_tokens if self.eval_tokens is None else self.eval_tokens


@dataclass(frozen=True)
class Awq:
    w_bits: int = option(4, "Bits of a weight: 4; 8, 3 and 2 not in the AWQ format.")
    w_sym: bool = option(False, "A grid that is symmetric about zero.")
    w_group_size: int | str = option(
        "auto", "Weights that share a scale: auto (the largest that fits), 128, 64, 32, -1."
    )
    search_scale: bool = option(
        True, "Search each layer's scales; else mean|x|^0.5.", "--search-scale/--no-search-scale"
    )
    rounding: str | None = option(
        None, "gptq: AWQ's scales, then GPTQ's error feedback; or nearest. Default: gptq; preset fast: nearest."
    )
    damp: float = option(0.01, "GPTQ: share of the mean diagonal added to XᵀX.")
    shrink: float = option(
        0.4, "GPTQ: share by which XᵀX counts less off its diagonal, so that the loss carries over to other text."
    )
    carry_error: bool = option(
        True,
        "GPTQ: what rounding has changed in the residual stream is made up for by the linears behind that write to it.",
        "--carry-error/--no-carry-error",
    )
    guide_samples: int | None = option(
        None,
        "GPTQ: of so many samples gradients tell what an error of each token and output does to the predictions, and "
        "rounding goes by that; 0: none. Default: the preset's (balanced: 32, best: 128).",
    )
    sweeps: int | None = option(
        None,
        "GPTQ: times that all scales and codes are gone through again behind it, each set to what the others leave. "
        "Default: the preset's (best: 2; else 0); 0 in trellis codes.",
    )
    desc_act: bool = option(False, "GPTQ: columns with the largest inputs first.")
    static_groups: bool = option(
        True,
        "With --desc-act: groups stay consecutive; else the file holds each column's group (act-order).",
        "--static-groups/--no-static-groups",
    )
    tune_steps: int | None = option(
        None,
        "Steps by which all scales and norms are then tuned together, so that the model predicts what it did; 0: "
        "none. Left out: the preset's (balanced: 64), where --cache-memory allows it and bits are at most 3 or no "
        "gradients guide.",
    )


@dataclass(frozen=True)
class Gptq:
    w_bits: int = same_option(Awq, "w_bits")
    w_sym: bool = option(True, "A grid that is symmetric about zero; else written as gptq_v2.", "--w-sym/--no-w-sym")
    w_group_size: int | str = same_option(Awq, "w_group_size")
    damp: float = same_option(Awq, "damp")
    shrink: float = same_option(Awq, "shrink")
    carry_error: bool = same_option(Awq, "carry_error")
    guide_samples: int | None = same_option(Awq, "guide_samples")
    sweeps: int | None = same_option(Awq, "sweeps")
    desc_act: bool = same_option(Awq, "desc_act")
    static_groups: bool = same_option(Awq, "static_groups")
    tune_steps: int | None = same_option(Awq, "tune_steps")


@dataclass(frozen=True)
class AutoRound:
    """``layer_config``: see ``layer_config.read_layer_config``."""

    w_bits: int = same_option(Awq, "w_bits")
    w_sym: bool = option(True, "A grid that is symmetric about zero.", "--w-sym/--no-w-sym")
    w_group_size: int | str = same_option(Awq, "w_group_size")
    iters: int | None = option(None, "Steps of the optimizer a block. Default: the preset's (balanced: 200).")
    layer_config: str | None = option(
        None, 'Bits of their own for some linears: a JSON file (or JSON) like {"down_proj": {"bits": 8}}.'
    )


@dataclass(frozen=True)
class SmoothQuant:
    quant_dtype: str = option("int8", "int8, fp8 (float8_e4m3fn) or float8_e5m2, weights and activations.")
    strength: float | None = option(None, "How far outliers move into weights, 0 to 1. Default: searched.")
    tune_steps: int | None = option(
        None,
        "Steps by which all scales and norms are then tuned together. Default: the preset's (balanced: 0, best: 64), "
        "where --cache-memory allows it.",
    )


@dataclass(frozen=True)
class BlockedFp8:
    scale_fmt: str | None = option(None, "ue8m0: scales are powers of two. Default: float32.")


@dataclass(frozen=True)
class Search:
    """``size``: in bytes, or with a unit."""

    bits: float | None = option(None, "Budget: bits a weight, scales and zero points included (4.5).")
    size: int | str | None = option(
        None, "Budget: of the engine artifact, with --format gguf of the file (90MiB, 1.5GB)."
    )
    damp: float = same_option(Awq, "damp")
    shrink: float = same_option(Awq, "shrink")
    carry_error: bool = same_option(Awq, "carry_error")
    guide_samples: int | None = same_option(Awq, "guide_samples")
    sweeps: int | None = same_option(Awq, "sweeps")
    tune_steps: int | None = same_option(Awq, "tune_steps")


@dataclass(frozen=True)
class DraftHead:
    """A head that guesses next tokens, and how it is trained."""

    tokens: int = option(786_432, "Tokens of text that the model writes.")
    steps: int = option(3000, "Training steps, of 1024 tokens each.")
    draft_vocab_size: int = option(8192, "Tokens that the head can guess: the most frequent of that text.")
    num_draft_tokens: int = option(4, "Tokens of a guess that it is trained for.")
    seed: int = option(0, "Of text and training.")
