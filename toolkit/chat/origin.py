"""Where a chat template comes from: what the user named, the model's own, or a built-in."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.base.lazy_dataclass import dataclass
from toolkit.chat import builtin
from toolkit.chat.custom import MODELS
from toolkit.errors import UsageError
from toolkit.messages import ChatTemplateConfig
from toolkit.parsers.thinking import spot_reasoning

if TYPE_CHECKING:
    from toolkit.parsers.formats import ReasoningFormat, ToolFormat

JINJA, JSON = (".jinja", ".jinja2", ".j2"), ".json"  # how the name of a file with a template ends
log = logging.getLogger(__name__)
CHATTY = re.compile(r"chat|instruct|assistant|\bit\b")  # as models are named that were taught to talk
CAPABILITIES = ("completion", "infilling", "chat", "python")


@dataclass
class Origin:
    """A template before it is compiled. ``what``: how messages name it. ``built_in``: its source is one of ours.
    ``custom``: it is this Python object. ``parse_special``: as ChatTemplateConfig has it."""

    name: str
    what: str
    sources: dict[str, str]
    pieces: dict[str, Any] | None = None
    meta_instruction: str | None = None
    stop_words: tuple[str, ...] = ()
    capability: str = "chat"
    custom: Any = None
    built_in: bool = False
    parse_special: bool = False

    @cached_property
    def spells_tools(self) -> bool:
        """Whether tools stand in the system text, for the template has no place for them."""
        return self.custom is None and not any("tools" in source for source in self.sources.values())

    @cached_property
    def knows_ipython(self) -> bool:
        return any("ipython" in source for source in self.sources.values())

    @property
    def tool_format(self) -> ToolFormat | None:
        """How its source has a model call tools."""
        source = self.sources.get("tool_use", self.sources.get("default", ""))
        if self.pieces is not None or "tools" not in source:
            return None
        from toolkit.parsers import registry  # of twenty ways of calling, for who asks

        return registry.spot_tools(source)

    @property
    def reasoning_format(self) -> ReasoningFormat | None:
        """How its source has a model think."""
        return None if self.pieces is not None else spot_reasoning(self.sources.get("default", ""))


def choose(tokenizer: Tokenizer, model_path: str | Path, config: ChatTemplateConfig | str | None) -> Origin:
    """The template of a model: the named one > the model's own > a built-in by the model's name > ``base``."""
    if config is not None:
        return named(config) or _of_model(tokenizer, as_config(config))
    if tokenizer.chat_templates:
        return _own(tokenizer)
    if (found := builtin.match(str(model_path))) is not None:
        return _from_builtin(found, f"built-in {found.name!r}, guessed from the model's name")
    base = builtin.find("base")
    assert base is not None
    if CHATTY.search(Path(os.path.abspath(model_path)).name.lower()):
        log.warning(
            "%s: its name is that of a chat model, but it brings no chat template and none is known by the name: texts "
            "are joined as is; --chat-template (chat_template_config) names one",
            model_path,
        )
    return _from_builtin(base, "none: the model brings no chat template, texts are joined as is")


def named(config: ChatTemplateConfig | str) -> Origin | None:
    """What a name, a file or a config means; None where it takes the model's own template ("hf").

    Needs no model, so that a mistake can be told before one is loaded. Raises UsageError.
    """
    if isinstance(config, str) and config.endswith(JINJA):
        return _from_jinja(Path(config), f"the file {config}")
    config = as_config(config)
    if config.capability not in (None, *CAPABILITIES):
        raise UsageError(f"capability: expected one of {', '.join(CAPABILITIES)}, found {config.capability!r}")
    given: dict[str, Any] = {n: getattr(config, n) for n in builtin.PIECES if getattr(config, n) is not None}
    if config.model_name == "hf":
        if given:
            raise UsageError(f"chat template 'hf': {next(iter(given))} cannot be set, the template is the model's own")
        return None
    if config.model_path is not None:
        raise UsageError("model_path: goes with model_name='hf' only, whose template it names; leave it out")
    if (custom := MODELS.get(config.model_name)) is not None:
        return _from_class(custom, config, given)
    return _with_fields(_of_pieces(config, given), config)


def as_config(config: ChatTemplateConfig | str) -> ChatTemplateConfig:
    """A name or JSON (file or text) as a config. Raises UsageError for bad JSON."""
    if isinstance(config, ChatTemplateConfig):
        return config
    is_json = config.endswith(JSON) or config.lstrip().startswith("{")
    return ChatTemplateConfig.from_json(config) if is_json else ChatTemplateConfig(config)


def _with_fields(origin: Origin, config: ChatTemplateConfig) -> Origin:
    if config.meta_instruction is not None:
        origin.meta_instruction = config.meta_instruction
    if config.stop_words is not None:
        origin.stop_words = tuple(config.stop_words)
    origin.capability = config.capability or "chat"
    origin.parse_special = bool(config.parse_special)
    return origin


def _from_class(cls: type, config: ChatTemplateConfig, given: dict[str, Any]) -> Origin:
    """A registered class, made with those fields of ``config`` that are set."""
    more = {n: getattr(config, n) for n in ("meta_instruction", "capability", "stop_words")}
    try:
        made = cls(**given, **{name: value for name, value in more.items() if value is not None})
    except TypeError as e:
        raise UsageError(f"chat template {config.model_name!r}: its class cannot be made ({e})") from e
    return Origin(
        config.model_name,
        f"{config.model_name!r}, written in Python",
        {},
        None,
        getattr(made, "meta_instruction", None),
        tuple(getattr(made, "stop_words", None) or ()),
        getattr(made, "capability", None) or "chat",
        made,
        parse_special=bool(config.parse_special),
    )


def _of_pieces(config: ChatTemplateConfig, given: dict[str, Any]) -> Origin:
    found = builtin.find(config.model_name)
    if found is None:
        if not given and config.meta_instruction is None:
            raise builtin.unknown(config.model_name)
        found = builtin.Builtin(config.model_name, "")
        what = f"{config.model_name!r}, made of the pieces given"
    else:
        what = f"built-in {found.name!r}"
    if given and not found.of_pieces:
        raise UsageError(
            f"chat template {found.name!r} is not made of pieces, {next(iter(given))} cannot be set; "
            "meta_instruction, stop_words and capability can"
        )
    if "assistant" in given:
        found = dataclasses.replace(found, generation=None)
    return _from_builtin(dataclasses.replace(found, **given), what)


def _of_model(tokenizer: Tokenizer, config: ChatTemplateConfig) -> Origin:
    """The model's own template ("hf"), or that of the model or Jinja file at ``model_path``."""
    source = tokenizer
    if config.model_path is not None:
        path = Path(config.model_path)
        if not path.exists():
            raise UsageError(f"model_path: {path} does not exist")
        if path.is_file():
            return _with_fields(_from_jinja(path, f"the file {path}"), config)
        source = Tokenizer.open(path)
    if not source.chat_templates:
        raise UsageError(f"chat template 'hf': {source.path} brings none; 'tool list' shows the built-in ones")
    return _with_fields(_own(source), config)


def _own(tokenizer: Tokenizer) -> Origin:
    """The model's own template; of several the one called default, else the first."""
    sources = dict(tokenizer.chat_templates)
    if "default" not in sources:
        sources["default"] = next(iter(sources.values()))
    return Origin("hf", f"the model's own, {tokenizer.path}", sources)


def _from_jinja(file: Path, what: str) -> Origin:
    try:
        return Origin(file.stem, what, {"default": file.read_text(encoding="utf-8")})
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{file}: cannot read the chat template ({e})") from e


def _from_builtin(found: builtin.Builtin, what: str) -> Origin:
    return Origin(
        found.name,
        what,
        {"default": found.source()},
        found.variables() if found.of_pieces else None,
        found.meta_instruction,
        found.stop_words,
        built_in=True,
    )
