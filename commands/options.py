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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import IO, TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.checks import number
from toolkit.configs.engine import CommonEngineConfig, PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.lmdeploy import FLAGS, notice, stepped_over
from toolkit.configs.option import option, option_of, same_option, spelled
from toolkit.errors import ToolkitError, UsageError
from toolkit.parallel.layout import launched

if TYPE_CHECKING:
    from toolkit.configs.engine import EngineConfig
    from toolkit.engine.load.setup import Packed


# Options of one backend, and what to do on the other.
TURBOMIND_ONLY = {
    "rope_scaling_factor": "write it into --hf-overrides",
    "async_": "leave it out",
    "use_logn_attn": "leave it out",
}


@dataclass
class EngineFlags(CommonEngineConfig):
    """The engine configs' options, and what says which of the two it is to be."""

    backend: str | None = option(None, "turbomind (native, fast) or pytorch (any model). Default: chosen.")
    device: str = same_option(TurbomindEngineConfig, "device")
    cache_block_seq_len: int = same_option(TurbomindEngineConfig, "cache_block_seq_len")
    enable_prefix_caching: bool = same_option(
        CommonEngineConfig, "enable_prefix_caching", default=False
    )  # not asked for
    rope_scaling_factor: float = same_option(TurbomindEngineConfig, "rope_scaling_factor")
    async_: int = same_option(TurbomindEngineConfig, "async_")
    use_logn_attn: bool = same_option(TurbomindEngineConfig, "use_logn_attn")
    num_gpu_blocks: int = option(0, "Blocks of the KV cache. Default: by memory.", hidden=True)
    chat_template: str | None = option(None, "A built-in name (tool list), a .json or a .jinja file.")
    # A flag of its own: "--enable-…/--no-enable-…" would leave the help, at 80 columns, no room for flags' names.
    no_enable_prefix_caching: bool = option(False, "Compute every prompt afresh.")
    force: bool = option(False, "Round the KV cache whatever that costs (--quant-policy 4, 44).")
    no_pack_cache: bool = option(False, "Keep no packed copy of an unconverted model, use none (tool cache).")

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
        from toolkit.commands.output import say

        ChatTemplate.check(self.chat_template)
        say(f"--chat-template {self.chat_template}: not used, {why}")

    def packed(self, config: EngineConfig, tell: Callable[[str], None]) -> Packed | None:
        """Where an unconverted model lies packed, for ``AsyncEngine.open``; None where it is to be read as it is."""
        from toolkit.convert import pack_cache
        from toolkit.convert.cache_gate import check_cache

        cached = pack_cache.is_for(config, self.backend) and not self.no_pack_cache
        packed = functools.partial(pack_cache.packed, tell=tell) if cached else None
        if config.quant_policy in (0, 8, 16, 17):
            return packed

        def checked(path: Path) -> tuple[Path, IO[bytes] | None]:
            found, lock = (path, None) if packed is None else packed(path)
            check_cache(found, config, tell, force=self.force)
            return found, lock

        return checked

    @property
    def _by_messages(self) -> bool:
        """Whether ranks are asked for that turbomind has not."""
        elsewhere = launched() > 1 or self.distributed_executor_backend == "ray"
        return max(self.pp, self.dp, self.ep) > 1 or (self.tp > 1 and elsewhere)

    def config(self) -> EngineConfig:
        """The engine config these flags mean. Raises UsageError for a value out of range."""
        common = {f.name: getattr(self, f.name) for f in dataclasses.fields(CommonEngineConfig) if option_of(f)}
        common["enable_prefix_caching"] = self.prefix_caching(default=True)
        count = self.cache_max_entry_count
        common["cache_max_entry_count"] = int(count) if count > 1 and float(count).is_integer() else count
        number("--num-gpu-blocks", self.num_gpu_blocks, 0, 1 << 40, whole=True)
        if self.num_gpu_blocks:
            common["cache_max_entry_count"] = self.num_gpu_blocks
        if self.backend == "pytorch" or (self.backend is None and self._by_messages):
            for name, instead in TURBOMIND_ONLY.items():
                if getattr(self, name) != getattr(TurbomindEngineConfig, name):
                    raise UsageError(f"{spelled(name)}: only for --backend turbomind; {instead}")
            common |= {"block_size": self.cache_block_seq_len, "device_type": self.device}
            return PytorchEngineConfig(**common)
        if self.backend in (None, "turbomind"):
            own = ("cache_block_seq_len", "device", *TURBOMIND_ONLY)
            return TurbomindEngineConfig(**common, **{name: getattr(self, name) for name in own})
        raise UsageError(f"--backend: expected turbomind or pytorch, found {self.backend!r}")


def read_paths(flag: str, entries: list[str]) -> dict[str, str] | None:
    """``name=path`` entries as a dict; a bare path is allowed where it is the only one, its last part the name.

    Raises UsageError for an entry without a name or path, and for a name given twice.
    """
    found: dict[str, str] = {}
    for entry in entries:
        name, equals, path = entry.partition("=")
        if not equals and len(entries) == 1:
            name, path = entry.rstrip("/").rpartition("/")[2], entry
        if not name.strip() or not path:
            raise UsageError(f"{flag}: expected NAME=PATH, found {entry!r}")
        if name in found:
            raise UsageError(f"{flag}: expected each name once, found {name!r} twice")
        found[name] = path
    return found or None


def json_object(option: str, text: str) -> dict[str, Any]:
    """An option's value as a JSON object. Raises UsageError for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{option}: expected a JSON object, found {text!r:.60} ({e})") from e
    if not isinstance(found, dict):
        raise UsageError(f"{option}: expected a JSON object, found {text!r:.60}")
    return found


def read_tools(flag: str, file: Path | None) -> list[dict[str, Any]] | None:
    """Tools of a JSON file in OpenAI's form; bare functions are put into it. Raises UsageError."""
    if file is None:
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{flag} {file}: expected a JSON list of tools ({error})") from error
    found = []
    for tool in data if isinstance(data, list) else [data]:
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise UsageError(f'{flag} {file}: expected {{"type": "function", "function": {{"name": …}}}} in a list')
        found.append({"type": "function", **tool} if "function" in tool else {"type": "function", "function": tool})
    return found


def read_numbers(flag: str, kind: type, text: str) -> tuple[Any, ...]:
    """Numbers separated by commas. Raises UsageError."""
    try:
        return tuple(kind(number) for number in text.split(","))
    except ValueError:
        raise UsageError(
            f"{flag}: expected {'whole ' if kind is int else ''}numbers separated by commas, found {text!r}"
        ) from None


def _typed(flag: str, hint: Any, default: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
    """How a field of type ``hint`` is typed: (what Typer reads, its default, that → the field's value)."""
    members = [x for x in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if x is not NoneType]
    kind, inner = get_origin(members[0]), get_args(members[0])
    if kind in (tuple, Sequence) and inner[0] is str:
        return list[str] | None, None, lambda entries: tuple(entries) if entries else default
    if kind is tuple:
        shown = ",".join(f"{number:g}" for number in default) or None
        return str | None, shown, lambda text: () if text is None else read_numbers(flag, inner[0], text)
    if kind is dict and inner[1] is str:
        return list[str] | None, None, lambda entries: read_paths(flag, entries or [])
    if kind is dict:
        return str | None, None, lambda text: None if text is None else json_object(flag, text)
    if len(members) > 1:  # a number or a word; a number or a whole one
        plain: Any = str if str in members else float
        # a word that says the default is it, of its own type
        return (
            plain | None if default is None else plain,
            str(default) if plain is str and default is not None else default,
            lambda value: default if str(value) == str(default) else value,
        )
    return hint, default, lambda value: value


def _names(f: dataclasses.Field[Any]) -> tuple[str, ...]:
    """The field as it is typed."""
    told = option_of(f)
    return (told and told.names) or (spelled(f.name),)


def _flag(
    f: dataclasses.Field[Any], hint: Any, panel: str | None, changed: Mapping[str, Any]
) -> tuple[inspect.Parameter, Callable[[Any], Any]]:
    told = option_of(f)
    assert told is not None
    names = _names(f)
    kind, default, read = _typed(names[0], hint, f.default)
    shown: dict[str, Any] = {"help": told.help, "rich_help_panel": panel} | told.shown | {**changed}
    if "min" in shown:
        shown.setdefault("metavar", f"<{(get_args(kind) or (kind,))[0].__name__}>")
    annotation: Any = Annotated[kind, typer.Option(*names, **shown)]
    return inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation), read


def _as_typed(message: str, typed: Mapping[str, str]) -> str:
    """``message``, which names a field first as a record's checks do, with the flag in its place."""
    name, colon, rest = message.partition(":")
    return typed.get(name, name) + colon + rest


def with_flags(
    parameter: str,
    kind: type,
    panel: str | None = None,
    first: Sequence[str] = (),
    changed: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator for Typer commands: ``parameter``, of dataclass ``kind``, becomes one flag for each of its fields that
    is an option (``toolkit/configs/option.py``); the others have their default. ``panel``: where the help has them,
    those of ``first`` before the rest. ``changed``: of a field, what ``typer.Option`` takes in this command alone.
    """
    hints = get_type_hints(kind)
    fields = sorted((f for f in dataclasses.fields(kind) if option_of(f)), key=lambda f: f.name not in first)
    readers = {f.name: _flag(f, hints[f.name], panel, changed.get(f.name, {})) for f in fields}
    flags = [flag for flag, _ in readers.values()]
    typed = {f.name: _names(f)[0].partition("/")[0] for f in fields}
    typed |= {name: typed[flag] for name, flag in FLAGS.items() if flag in typed}

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own_hints = get_type_hints(command, include_extras=True)
        own = [
            p.replace(annotation=own_hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for name, p in inspect.signature(command).parameters.items()
            if name != parameter
        ]

        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            made = kind(**{name: read(values.pop(name)) for name, (_, read) in readers.items()})
            try:
                return command(**{parameter: made}, **values)
            except ToolkitError as error:
                error.args = (_as_typed(str(error), typed),)
                raise

        wrapped.__signature__ = inspect.Signature(own + flags)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in own + flags}
        del wrapped.__wrapped__
        return wrapped

    return decorate


def with_engine_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """``engine: EngineFlags`` as flags; and those of LMDeploy's that do nothing here, unseen in the help."""
    return with_lmdeploy_flags()(with_flags("engine", EngineFlags, "Engine", first=("backend", "device"))(command))


def with_lmdeploy_flags(place: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: also take what ``lmdeploy_options`` names of the command ``place`` ("": of all that run a model); say
    once that it does nothing, or refuse it."""
    theirs = stepped_over(place)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = list(inspect.signature(command).parameters.values())
        more = [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[
                    bool | None if isinstance(option.default, bool) else str | None,
                    typer.Option(spelled(name), hidden=True),
                ],
            )
            for name, option in theirs.items()
            if name not in {p.name for p in own}
        ]

        @functools.wraps(command)
        def wrapped(**values: Any) -> Any:
            given = {p.name: value for p in more if (value := values.pop(p.name)) is not None}
            for name, value in given.items():
                theirs[name].typed(spelled(name), value)
                if theirs[name].fate == "notice":
                    print(notice(theirs[name], spelled(name)), file=sys.stderr)
            return command(**values)

        wrapped.__signature__ = inspect.Signature(own + more)  # type: ignore[attr-defined]
        wrapped.__annotations__ = {p.name: p.annotation for p in own + more}
        del wrapped.__wrapped__
        return wrapped

    return decorate
