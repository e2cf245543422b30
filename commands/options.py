"""The engine flags that every command which runs a model shares, spelled as LMDeploy spells them.

A command takes one parameter ``engine: EngineFlags`` and is decorated with ``@with_engine_flags``; the command
line then shows each field as a flag of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from toolkit.engine_configs import TurbomindEngineConfig
from toolkit.errors import UsageError
from toolkit.lmdeploy_options import IGNORED, NOT_BUILT, notice

if TYPE_CHECKING:
    from toolkit.engine.setup import Packed
    from toolkit.engine_configs import EngineConfig

PANEL = "Engine"
DEVICE_HELP = "auto, cpu, cuda, cuda:N, or another by torch's name, such as xpu."


def _flag(*names: str, help: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel=PANEL)


@dataclass
class EngineFlags:
    backend: Annotated[
        str | None, _flag("--backend", help="turbomind (native, fast) or pytorch (any model). Default: chosen.")
    ] = None
    device: Annotated[str, _flag("--device", help=DEVICE_HELP)] = TurbomindEngineConfig.device
    dtype: Annotated[
        str, _flag("--dtype", help="Activations: auto, float16, bfloat16, float32 (least swayed by the batch).")
    ] = TurbomindEngineConfig.dtype
    tp: Annotated[int, _flag("--tp", help="Devices to split the model over (tensor parallelism).")] = (
        TurbomindEngineConfig.tp
    )
    session_len: Annotated[
        int | None, _flag("--session-len", help="Longest context, in tokens. Default: the model's, if it fits.")
    ] = None
    max_batch_size: Annotated[
        int | None, _flag("--max-batch-size", help="Most requests in one step. Default: by device and memory.")
    ] = None
    cache_max_entry_count: Annotated[
        float | None,
        _flag(
            "--cache-max-entry-count", help="Share of free memory for the KV cache (up to 1), or its blocks (from 2)."
        ),
    ] = None
    cache_block_seq_len: Annotated[int, _flag("--cache-block-seq-len", help="Tokens in a KV block.")] = (
        TurbomindEngineConfig.cache_block_seq_len
    )
    enable_prefix_caching: Annotated[
        bool | None,
        _flag("--enable-prefix-caching", help="Reuse the KV cache of equal prefixes. Default, but in profile."),
    ] = None
    # A flag of its own: "--enable-…/--no-enable-…" would leave the help, at 80 columns, no room for flags' names.
    no_enable_prefix_caching: Annotated[
        bool, _flag("--no-enable-prefix-caching", help="Compute every prompt afresh.")
    ] = False
    quant_policy: Annotated[
        int, _flag("--quant-policy", help="KV cache: 0 (as --dtype), 8 or 4 bits, 16 or 17 (float8 e4m3, e5m2).")
    ] = TurbomindEngineConfig.quant_policy
    model_format: Annotated[
        str | None, _flag("--model-format", help="hf, awq, gptq, w8a8, gguf, engine. Default: read from the model.")
    ] = None
    load_format: Annotated[
        str,
        _flag(
            "--load-format",
            help="auto; int8, int4: rounded while read, without calibration; dummy: random, to measure with.",
        ),
    ] = TurbomindEngineConfig.load_format
    chat_template: Annotated[
        str | None, _flag("--chat-template", help="A built-in name (tool list), a .json or a .jinja file.")
    ] = None
    max_prefill_token_num: Annotated[
        int, _flag("--max-prefill-token-num", help="Most tokens in one step; longer prompts go in chunks.")
    ] = TurbomindEngineConfig.max_prefill_token_num
    target_step_ms: Annotated[
        float | None,
        _flag(
            "--target-step-ms",
            help="Time of a step, ms: prompts go in chunks that fit it while others decode. 0: no limit. "
            "Default: 150 on a CPU, 0 on a GPU.",
        ),
    ] = None
    adapters: Annotated[
        list[str] | None,
        _flag("--adapters", help="NAME=PATH of LoRA adapters (directory or hub id); several may follow."),
    ] = None
    revision: Annotated[str | None, _flag("--revision", help="Branch, tag or commit on the hub.")] = None
    download_dir: Annotated[str | None, _flag("--download-dir", help="Where downloads go.")] = None
    no_pack_cache: Annotated[
        bool, _flag("--no-pack-cache", help="Keep no packed copy of an unconverted model, use none (tool cache).")
    ] = False
    threads: Annotated[int | None, _flag("--threads", help="CPU threads. Default: all.")] = None
    rope_scaling_factor: Annotated[
        float | None, _flag("--rope-scaling-factor", help="Dynamic NTK scaling of positions (turbomind only).")
    ] = None
    use_logn_attn: Annotated[
        bool, _flag("--use-logn-attn", help="Queries grow by log n beyond the model's length (turbomind only).")
    ] = False
    async_: Annotated[
        int | None, _flag("--async", help="0: schedule a step when the one before has ended (turbomind only).")
    ] = None
    hf_overrides: Annotated[
        str | None, _flag("--hf-overrides", help="JSON object that goes over the model's config.json.")
    ] = None

    def prefix_caching(self, default: bool) -> bool:
        """Whether the flags ask for the prefix cache. Raises UsageError where they contradict each other."""
        if self.enable_prefix_caching and self.no_enable_prefix_caching:
            raise UsageError("--enable-prefix-caching and --no-enable-prefix-caching: give one of them")
        return self.enable_prefix_caching or (default and not self.no_enable_prefix_caching)

    def check_unused_template(self, why: str) -> None:
        """For commands without a chat: refuse an unknown --chat-template, say that a known one is unused."""
        if self.chat_template is None:
            return
        from toolkit.chat.template import ChatTemplate
        from toolkit.commands.output import stderr

        ChatTemplate.check(self.chat_template)
        stderr().print(f"--chat-template {self.chat_template}: not used, {why}", markup=False, soft_wrap=True)

    def packed(self, config: EngineConfig, tell: Callable[[str], None]) -> Packed | None:
        """Where an unconverted model lies packed, for ``AsyncEngine.open``; None where it is to be read as it is."""
        if self.no_pack_cache:
            return None
        from toolkit.convert import pack_cache

        return functools.partial(pack_cache.packed, tell=tell) if pack_cache.is_for(config, self.backend) else None

    def config(self) -> EngineConfig:
        """The engine config these flags mean. Raises UsageError for a value out of range."""
        from toolkit.engine_configs import PytorchEngineConfig, TurbomindEngineConfig

        common: dict[str, Any] = {
            "dtype": self.dtype,
            "tp": self.tp,
            "session_len": self.session_len,
            "max_batch_size": self.max_batch_size,
            "max_prefill_token_num": self.max_prefill_token_num,
            "target_step_ms": self.target_step_ms,
            "enable_prefix_caching": self.prefix_caching(default=True),
            "quant_policy": self.quant_policy,
            "model_format": self.model_format,
            "load_format": self.load_format,
            "revision": self.revision,
            "download_dir": self.download_dir,
            "threads": self.threads,
        }
        count = self.cache_max_entry_count
        if count is not None:
            common["cache_max_entry_count"] = int(count) if count > 1 and count == int(count) else count
        common["adapters"] = read_adapters(self.adapters or [])
        common["hf_overrides"] = None if self.hf_overrides is None else json_object("--hf-overrides", self.hf_overrides)
        if self.backend == "pytorch":
            if self.rope_scaling_factor is not None:
                raise UsageError("--rope-scaling-factor: only for --backend turbomind; write it into --hf-overrides")
            if self.use_logn_attn:
                raise UsageError("--use-logn-attn: only for --backend turbomind; leave it out")
            if self.async_ is not None:
                raise UsageError("--async: only for --backend turbomind; leave it out")
            return PytorchEngineConfig(block_size=self.cache_block_seq_len, device_type=self.device, **common)
        if self.backend in (None, "turbomind"):
            return TurbomindEngineConfig(
                cache_block_seq_len=self.cache_block_seq_len,
                device=self.device,
                rope_scaling_factor=self.rope_scaling_factor or 0.0,
                use_logn_attn=self.use_logn_attn,
                async_=1 if self.async_ is None else self.async_,
                **common,
            )
        raise UsageError(f"--backend: expected turbomind or pytorch, found {self.backend!r}")


def read_adapters(entries: list[str]) -> dict[str, str] | None:
    """``name=path`` entries as a dict; a bare path is allowed where it is the only one, its last part the name.

    Raises UsageError for an entry without a name or path, and for a name given twice.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals and len(entries) == 1:
            name, path = entry.rstrip("/").rpartition("/")[2], entry
        if not name.strip() or not path:
            raise UsageError(f"--adapters: expected NAME=PATH, found {entry!r}")
        if name in found:
            raise UsageError(f"--adapters: expected each name once, found {name!r} twice")
        found[name] = path
    return found or None


def json_object(option: str, text: str) -> dict[str, Any]:
    """An option's value as a JSON object. Raises UsageError for anything else."""
    try:
        found = json.loads(text)
    except ValueError as e:
        raise UsageError(f"{option}: expected a JSON object, found {text!r:.60} ({e})") from e
    if not isinstance(found, dict):
        raise UsageError(f"{option}: expected a JSON object, found {text!r:.60}")
    return found


def _annotation(field: dataclasses.Field[Any], hints: dict[str, Any]) -> Any:
    hint = hints[field.name]
    if "help" not in field.metadata:
        return hint
    low = 1 if hint is int else 0
    option = typer.Option(min=low, metavar=f"<{hint.__name__}>", help=field.metadata["help"], rich_help_panel="Limits")
    return Annotated[hint, option]


def with_flags(parameter: str, kind: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for Typer commands: ``parameter``, of dataclass ``kind``, becomes one option for each of its fields.

    A field is annotated for Typer, or is a number whose metadata has the help text.
    """
    hints = get_type_hints(kind, include_extras=True)
    flags = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=_annotation(f, hints))
        for f in dataclasses.fields(kind)
    ]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own_hints = get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, p in inspect.signature(command).parameters.items()
            if name != parameter
        ]

        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            made = kind(**{p.name: values.pop(p.name) for p in flags})
            return command(**{parameter: made}, **values)

        wrapped.__signature__ = inspect.Signature(own + flags)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in own + flags}
        del wrapped.__wrapped__
        return wrapped

    return decorate


def with_engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """``engine: EngineFlags`` as flags; and those of LMDeploy's that do nothing here, unseen in the help."""
    return _with_lmdeploy_flags(with_flags("engine", EngineFlags)(command))


def _with_lmdeploy_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: also take what ``lmdeploy_options`` names; say once that it does nothing, or refuse it."""
    from toolkit.engine_configs import PytorchEngineConfig

    configs = (*dataclasses.fields(TurbomindEngineConfig), *dataclasses.fields(PytorchEngineConfig))
    default = {f.name: f.default for f in configs} | {"trust_remote_code": False}
    own = list(inspect.signature(command).parameters.values())
    more = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[bool | None if is_switch else str | None, typer.Option(spelled, hidden=True)],
        )
        for name in (*IGNORED, *NOT_BUILT)
        for spelled, is_switch in [(_spelled(name), isinstance(default.get(name), bool))]
    ]

    @functools.wraps(command)
    def wrapped(**values: Any) -> Any:
        given = {p.name: value for p in more if (value := values.pop(p.name)) is not None}
        for name, value in given.items():
            if name in NOT_BUILT and value != str(default[name]):
                raise UsageError(f"{_spelled(name)}: found {value}, expected {default[name]}: {NOT_BUILT[name]}")
            if name in IGNORED:
                print(notice(name, _spelled(name)), file=sys.stderr)
        return command(**values)

    wrapped.__signature__ = inspect.Signature(own + more)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in own + more}
    del wrapped.__wrapped__
    return wrapped


def _spelled(name: str) -> str:
    return "--" + name.rstrip("_").replace("_", "-")
