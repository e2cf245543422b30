"""From messages to the prompt text a model was trained on.

Where the template comes from, first that applies: what the user named (built-in name, .json or .jinja file,
ChatTemplateConfig) > the model's own (chat_template.jinja, tokenizer_config.json) > a built-in that the model's name
suggests > ``base``, which joins the texts as they are.

The rendered text is complete: it spells the special tokens that stand around a prompt, so encode it with
``add_special_tokens=False``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.artifacts.tokenizer import Tokenizer
from toolkit.chat import builtin
from toolkit.chat.messages import Message, normalise
from toolkit.chat.sandbox import Sandbox, TemplateRefusal
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import ChatTemplateConfig, GenerationConfig

_END = "\ue0a7\ue0a8"  # private characters that mark the end of an answer to be continued; they never reach a prompt
_CAPABILITIES = ("completion", "infilling", "chat", "python")


@dataclass
class _Origin:
    """A template before it is compiled. ``what``: how messages name it."""

    name: str
    what: str
    sources: dict[str, str]
    pieces: dict[str, Any] | None = None
    meta_instruction: str | None = None
    stop_words: tuple[str, ...] = ()
    capability: str = "chat"


class ChatTemplate:
    """Renders conversations for one model. Thread-safe.

    ``name``: "hf" for the model's own template, else the built-in's or the file's. ``note``: one line, where it came
    from. ``meta_instruction``: the system text of conversations that bring none; set it to None to drop it.
    ``stop_words``: texts that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, origin: _Origin) -> None:
        self.name = origin.name
        self.note = origin.what
        self.meta_instruction = origin.meta_instruction
        self.capability = origin.capability
        self._pieces = origin.pieces
        self._tokenizer = tokenizer
        self._sandbox = Sandbox()
        self._compiled = {name: self._compile(source) for name, source in origin.sources.items()}
        self.stop_words = list(origin.stop_words) or self._turn_end()

    @classmethod
    def open(
        cls, tokenizer: Tokenizer, model_path: str | Path, config: ChatTemplateConfig | str | None = None
    ) -> ChatTemplate:
        """The template of a model. ``config``: a built-in name, a .json or .jinja file, a ChatTemplateConfig, or None.

        Raises UsageError for a name or file that is none, ToolkitError for a template that does not compile.
        """
        if isinstance(config, str):
            if config.endswith((".jinja", ".jinja2", ".j2")):
                return cls(tokenizer, _from_jinja(Path(config), f"the file {config}"))
            config = ChatTemplateConfig.from_json(config) if _is_json(config) else ChatTemplateConfig(config)
        if config is not None:
            return cls(tokenizer, _configured(tokenizer, config))
        if tokenizer.chat_templates:
            return cls(tokenizer, _own(tokenizer))
        if (found := builtin.match(str(model_path))) is not None:
            return cls(tokenizer, _from_builtin(found, f"built-in {found.name!r}, guessed from the model's name"))
        base = builtin.find("base")
        assert base is not None
        return cls(tokenizer, _from_builtin(base, "none: the model brings no chat template, texts are joined as is"))

    def render(
        self,
        messages: str | Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt of a conversation; a plain string is one user message.

        Ends where the answer begins; if the last message is an assistant's, where that one ends, so that the model
        goes on with it. ``tools``: OpenAI tool definitions. ``variables`` go to the template (enable_thinking …).
        Raises UsageError when the messages do not fit the template, ToolkitError when the template fails.
        """
        if isinstance(messages, str):
            if self.capability in ("completion", "python"):
                return self._start() + messages
            if self.capability == "infilling":
                return self._start() + _infilling(messages)
            messages = [{"role": "user", "content": messages}]
        turns = normalise(messages)
        if self.meta_instruction is not None and turns[0]["role"] not in ("system", "developer"):
            turns.insert(0, {"role": "system", "content": self.meta_instruction})
        last = turns[-1]
        if not add_generation_prompt or last["role"] != "assistant" or last.get("tool_calls"):
            return self._run(turns, tools, add_generation_prompt, variables)
        if not last["content"]:
            return self._run(turns[:-1], tools, True, variables)
        turns[-1] = {**last, "content": last["content"] + _END}
        text, mark, _ = self._run(turns, tools, False, variables).rpartition(_END)
        if not mark:
            raise ToolkitError(f"chat template ({self.note}): it drops the last answer, which then cannot be continued")
        return text

    def encode(self, messages: str | Sequence[Message], **options: Any) -> list[int]:
        """Token ids of ``render(messages, **options)``."""
        return self._tokenizer.encode(self.render(messages, **options), add_special_tokens=False)

    def with_stops(self, config: GenerationConfig) -> GenerationConfig:
        """A copy of ``config`` that also ends where this template ends an answer (unless it ignores eos).

        What it adds and is one special token becomes a stop token id: as text it would be dropped before it is seen.
        """
        if config.ignore_eos:
            return config
        words, ids = list(config.stop_words or []), list(config.stop_token_ids or [])
        for word in self.stop_words:
            token = self._tokenizer.token_id(word)
            if word in words or token in ids or token in self._tokenizer.eos_ids:
                continue  # it ends the answer anyway
            if token is not None and token in self._tokenizer.special_ids:
                ids.append(token)
            else:
                words.append(word)
        return dataclasses.replace(config, stop_words=words or None, stop_token_ids=ids or None)

    def _run(
        self, turns: list[Message], tools: list[dict[str, Any]] | None, open_answer: bool, variables: dict[str, Any]
    ) -> str:
        chosen = self._compiled["default"]
        if tools:
            if self._pieces is not None:
                raise UsageError(f"tools: the chat template {self.name!r} has no place for them")
            chosen = self._compiled.get("tool_use", chosen)
        values = {
            **self._tokenizer.special_tokens,
            "start": self._start(),
            "pieces": self._pieces,
            "messages": turns,
            "tools": tools or None,
            "documents": None,
            "add_generation_prompt": open_answer,
            **variables,
        }
        try:
            return self._sandbox.render(chosen, values)
        except TemplateRefusal as e:
            raise UsageError(f"messages: the model's chat template refuses them: {e}") from e
        except ValueError as e:
            raise ToolkitError(f"chat template ({self.note}) fails: {e}; choose another by --chat-template") from e

    def _compile(self, source: str) -> Any:
        try:
            return self._sandbox.compile_source(source)
        except ValueError as e:
            raise ToolkitError(
                f"chat template ({self.note}) is broken: {e}; choose another with --chat-template"
            ) from e

    def _start(self) -> str:
        return self._tokenizer.start_text

    def _turn_end(self) -> list[str]:
        """The special token that a model's own template puts behind an answer, found by rendering one.

        Some checkpoints forget it in generation_config.json; the model would then talk to itself.
        """
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{_END}"}]
        try:
            after = self._run(turns, None, False, {}).rpartition(_END)[2]
        except ToolkitError:
            return []
        ids = self._tokenizer.encode(after.lstrip(), add_special_tokens=False)
        if not ids or ids[0] not in self._tokenizer.special_ids:
            return []
        return [self._tokenizer.decode(ids[:1], skip_special_tokens=False)]


def _is_json(text: str) -> bool:
    return text.endswith(".json") or text.lstrip().startswith("{")


def _own(tokenizer: Tokenizer) -> _Origin:
    """The model's own template; of several the one called default, else the first."""
    sources = dict(tokenizer.chat_templates)
    if "default" not in sources:
        sources["default"] = next(iter(sources.values()))
    return _Origin("hf", f"the model's own, {tokenizer.path}", sources)


def _from_jinja(file: Path, what: str) -> _Origin:
    try:
        return _Origin(file.stem, what, {"default": file.read_text(encoding="utf-8")})
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{file}: cannot read the chat template ({e})") from e


def _from_builtin(found: builtin.Builtin, what: str) -> _Origin:
    return _Origin(
        found.name,
        what,
        {"default": found.source()},
        found.variables() if found.of_pieces else None,
        found.meta_instruction,
        found.stop_words,
    )


def _configured(tokenizer: Tokenizer, config: ChatTemplateConfig) -> _Origin:
    """What a ChatTemplateConfig means: the built-in it names, fields replaced, or a template of its own pieces."""
    if config.capability not in (None, *_CAPABILITIES):
        raise UsageError(f"capability: expected one of {', '.join(_CAPABILITIES)}, found {config.capability!r}")
    given: dict[str, Any] = {
        name: getattr(config, name) for name in builtin.PIECES if getattr(config, name) is not None
    }
    if config.model_name == "hf":
        if given:
            raise UsageError(f"chat template 'hf': {next(iter(given))} cannot be set, the template is the model's own")
        origin = _of_model(tokenizer, config.model_path)
    elif config.model_path is not None:
        raise UsageError("model_path: goes with model_name='hf' only, it names the model whose template is used")
    else:
        origin = _of_pieces(config, given)
    if config.meta_instruction is not None:
        origin.meta_instruction = config.meta_instruction
    if config.stop_words is not None:
        origin.stop_words = tuple(config.stop_words)
    origin.capability = config.capability or "chat"
    return origin


def _of_model(tokenizer: Tokenizer, model_path: str | None) -> _Origin:
    source = tokenizer
    if model_path is not None:
        if not Path(model_path).exists():
            raise UsageError(f"model_path: {model_path} does not exist")
        if Path(model_path).is_file():
            return _from_jinja(Path(model_path), f"the file {model_path}")
        source = Tokenizer.open(model_path)
    if not source.chat_templates:
        raise UsageError(f"chat template 'hf': {source.path} brings none; 'tool list' shows the built-in ones")
    return _own(source)


def _of_pieces(config: ChatTemplateConfig, given: dict[str, Any]) -> _Origin:
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


def _infilling(text: str) -> str:
    """Code Llama's prompt for what belongs at ``<FILL>``. Source: "Code Llama" (2023), section 2.3."""
    before, mark, after = text.partition("<FILL>")
    if not mark:
        raise UsageError("prompt: capability 'infilling' expects the text with <FILL> where it is to be filled in")
    return f"<PRE> {before} <SUF>{after} <MID>"
