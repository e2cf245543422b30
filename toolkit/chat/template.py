"""From messages to the prompt text a model was trained on.

Where the template comes from, first that applies: what the user named (built-in name, .json or .jinja file,
ChatTemplateConfig) > the model's own (chat_template.jinja, tokenizer_config.json) > a built-in that the model's name
suggests > ``base``, which joins the texts as they are.

The rendered text is complete: it spells the special tokens that stand around a prompt, so encode it with
``add_special_tokens=False``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text.written import Marks, Written
from toolkit.chat import builtin, origin
from toolkit.chat.custom import MODELS
from toolkit.chat.forged import Apart, told_apart
from toolkit.chat.messages import PICTURE, Message, normalise, with_arguments_as_text
from toolkit.chat.refusal import TemplateRefusal
from toolkit.chat.renderer import Renderer
from toolkit.chat.tool_text import (
    PLUGIN,
    PLUGIN_ROLE,
    results_beside_calls,
    spell_for_internlm,
    spell_out,
    system_in_user,
)
from toolkit.errors import ToolkitError, UsageError
from toolkit.messages import ChatTemplateConfig, GenerationConfig
from toolkit.parsers.tools import hermes, internlm

if TYPE_CHECKING:
    from toolkit.chat.sandbox import Sandbox

_END = "\ue0a7\ue0a8"  # private characters that mark the end of an answer to be continued; they never reach a prompt
_NO_MORE = {"tools": None, "add_generation_prompt": False}  # variables where a template is tried with a message


class ChatTemplate:
    """Renders conversations for one model. Thread-safe.

    ``name``: "hf" for the model's own template, else the built-in's or the file's. ``note``: one line, where it came
    from. ``stop_words``: texts that end an answer. ``tool_format``: how the template has a model call tools
    (Hermes' way where it has no place for tools: they stand in the system text then), None where that is not known;
    ``reasoning_format``: how it has a model think, None where it does not. ``picture``: what is written for a picture
    where the template itself writes nothing; None: the model reads text alone. ``parse_special``: special tokens that
    messages spell become those tokens.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        found: origin.Origin,
        renderer: Renderer | None = None,
        picture: str | None = None,
    ) -> None:
        self.picture = picture
        self.name = found.name
        self.note = found.what
        self._meta_instruction = found.meta_instruction
        self._bare = False
        self.capability = found.capability
        self.tool_format = hermes.FORMAT if found.spells_tools else found.tool_format
        self._spell = spell_out
        self.reasoning_format = found.reasoning_format
        self._found = found
        self._tokenizer = tokenizer
        self._renderer = _renderer(found, renderer)
        self.parse_special = found.parse_special
        self.stop_words = list(found.stop_words) or [*self._turn_end(), *self._call_ends()]
        if self._found.spells_tools and self._prints_plugin_turns():
            self.tool_format, self._spell = internlm.FORMAT, spell_for_internlm

    @property
    def meta_instruction(self) -> str | None:
        """The system text of conversations that bring none. Set to None there is none, not even the template's own."""
        return self._meta_instruction

    @meta_instruction.setter
    def meta_instruction(self, text: str | None) -> None:
        self._meta_instruction, self._bare = text, text is None

    @property
    def source(self) -> str:
        """Its Jinja text as others can run it: what a built-in one is given here stands in it; "" for one in Python."""
        if self._found.custom is not None:
            return ""
        values, ahead = {"start": self._tokenizer.start_text, "pieces": self._found.pieces}, ""
        if self._found.built_in:
            ahead = "".join(f"{{%- set {name} = {_literal(value)} -%}}" for name, value in values.items())
        if self._meta_instruction is not None:
            system = _literal({"role": "system", "content": self._meta_instruction})
            more = f"{{%- set messages = [{system}] + messages -%}}"
            ahead += f'{{%- if messages[0].role not in ["system", "developer"] -%}}{more}{{%- endif -%}}'
        return ahead + self._found.sources["default"]

    @classmethod
    def open(
        cls,
        tokenizer: Tokenizer,
        model_path: str | Path,
        config: ChatTemplateConfig | str | None = None,
        renderer: Renderer | None = None,
        picture: str | None = None,
    ) -> ChatTemplate:
        """The template of a model. ``config``: a built-in name, a .json or .jinja file, a ChatTemplateConfig, or None.
        ``renderer``: one that has been started already, for a template that is not built in.

        Raises UsageError for a name or file that is none, ToolkitError for a template that does not compile.
        """
        return cls(tokenizer, origin.choose(tokenizer, model_path, config), renderer, picture)

    @staticmethod
    def of_adapters(
        names: Iterable[str], tokenizer: Tokenizer, model_path: str | Path, picture: str | None = None
    ) -> dict[str, ChatTemplate]:
        """The templates of adapters that are called as a built-in or registered template is, as LMDeploy has it."""
        known = [name for name in names if builtin.find(name) is not None or name in MODELS]
        return {name: ChatTemplate.open(tokenizer, model_path, name, picture=picture) for name in known}

    @staticmethod
    def check(config: ChatTemplateConfig | str | None) -> None:
        """Raise what ``open`` would raise for this ``config``, as far as that needs no model."""
        if config is not None and (found := origin.named(config)) is not None:
            _renderer(found)

    def render(
        self,
        messages: str | Sequence[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> Written:
        """The prompt of a conversation; a plain string is one user message.

        Special tokens that messages, tools or variables spell are text in it, unless ``parse_special``.

        Ends where the answer begins; if the last message is an assistant's, where that one ends, so that the model
        goes on with it. ``tools``: OpenAI tool definitions. ``variables`` go to the template (enable_thinking …).
        Raises UsageError when the messages do not fit the template, ToolkitError when the template fails.
        """
        if isinstance(messages, str):
            if self.capability in ("completion", "python"):
                return _plain(self._tokenizer.start_text + messages)
            if self.capability == "infilling":
                return _plain(self._tokenizer.start_text + _infilling(messages))
            messages = [{"role": "user", "content": messages}]
        turns = normalise(messages, self.picture is not None)
        opens = {"add_generation_prompt": add_generation_prompt}
        if self.parse_special:
            return _plain(self._whole(turns, {"tools": tools, **opens, **variables}))
        names = self._apart.names
        marks = Marks(names)
        try:
            turns, values = marks.put(turns), {"tools": marks.put(tools), **opens, **marks.put(variables)}
        except RecursionError as e:
            raise UsageError("messages: nested too deep, such as the arguments of a call; send them flatter") from e
        return Written.of(self._whole(turns, values), marks.spelled, names)

    def _whole(self, turns: list[Message], values: dict[str, Any]) -> str:
        """The prompt of messages as ``normalise`` makes them. ``values``: the template's variables besides: tools,
        add_generation_prompt and what else it is given."""
        if self._meta_instruction is not None and self._found.custom is None and not _has_system(turns):
            turns.insert(0, {"role": "system", "content": self._meta_instruction})
        if self._found.spells_tools and (values["tools"] or any(turn.get("tool_calls") for turn in turns)):
            turns, values = self._spell(turns, values["tools"]), values | {"tools": None}
            try:
                return self._end(turns, values)
            except UsageError:
                if len(turns) < 2 or not _has_system(turns) or turns[1]["role"] != "user":
                    raise
                return self._end(system_in_user(turns), values)
        return self._end(turns, values)

    def _end(self, turns: list[Message], values: dict[str, Any]) -> str:
        """The prompt, ended where the answer begins, or where an answer that has begun goes on."""
        last = turns[-1]
        if not values["add_generation_prompt"] or last["role"] != "assistant" or last.get("tool_calls"):
            return self._run(turns, values)
        if not last["content"]:
            return self._run(turns[:-1], values)
        turns[-1] = {**last, "content": last["content"] + _END}
        text, mark, _ = self._run(turns, values | {"add_generation_prompt": False}).rpartition(_END)
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

    def _run(self, turns: list[Message], values: dict[str, Any]) -> str:
        if self._found.custom is not None:
            return self._run_custom(turns, values)
        if not self._bare or _has_system(turns) or self._found.pieces is not None:
            return self._run_jinja(turns, values)
        if values["tools"]:  # they stand beside the system text
            return self._run_jinja([{"role": "system", "content": ""}, *turns], values)
        mark = [{"role": "system", "content": _END}]
        try:
            block = self._run_jinja(mark, values | {"add_generation_prompt": False})
            text = self._run_jinja([*mark, *turns], values)
        except ToolkitError:
            block = ""
        if _END not in block or not text.startswith(block):  # no system text, or it stands inside another turn
            return self._run_jinja(turns, values)
        rest, bos = text[len(block) :], self._tokenizer.special_tokens.get("bos_token", "")
        own = rest.startswith(bos)  # where every turn begins with it, it is no start of its own
        return bos + rest if block.startswith(bos) and not own else rest

    def _run_custom(self, turns: list[Message], values: dict[str, Any]) -> str:
        self._found.custom.meta_instruction = self._meta_instruction  # it may have been changed since
        try:
            text = self._found.custom.messages2prompt(self._with_pictures(turns, parts=False), True, **values)
        except Exception as e:
            raise ToolkitError(f"chat template ({self.note}) fails: {type(e).__name__}: {e}") from e
        return self._tokenizer.start_text + text

    def _run_jinja(self, turns: list[Message], values: dict[str, Any]) -> str:
        chosen = self._found.sources["default"]
        if values["tools"]:
            chosen = self._found.sources.get("tool_use", chosen)
        if not self._found.knows_ipython:
            turns = [{**turn, "role": "tool"} if turn["role"] == "ipython" else turn for turn in turns]
        if "tool_responses" in chosen and "tool_call_id" not in chosen:  # it knows results there alone
            turns = results_beside_calls(turns)
        turns = self._with_pictures(turns, parts=self.picture is not None and self._takes_parts)
        try:
            return self._rendered(chosen, turns, values)
        except TemplateRefusal as e:
            raise UsageError(f"messages: the model's chat template refuses them: {e}") from e
        except ValueError as e:
            if (told := self._with_texts(chosen, turns, values)) is not None:
                return told
            raise ToolkitError(f"chat template ({self.note}) fails: {e}; choose another by --chat-template") from e

    def _with_texts(self, chosen: str, turns: list[Message], values: dict[str, Any]) -> str | None:
        """The prompt with the arguments of calls as JSON text, None where that fails too: a template that joins them to
        other text, as DeepSeek's do, wants them so."""
        if not any(turn.get("tool_calls") for turn in turns):
            return None
        try:
            return self._rendered(chosen, with_arguments_as_text(turns), values)
        except (TemplateRefusal, ValueError):
            return None

    def _rendered(self, chosen: str, turns: list[Message], values: dict[str, Any]) -> str:
        given = {
            **self._tokenizer.special_tokens,
            "start": self._tokenizer.start_text,
            "pieces": self._found.pieces,
            "messages": turns,
            "documents": None,
            **values,
            "tools": values["tools"] or None,
        }
        return self._renderer.render(chosen, given)

    @property
    def forgery(self) -> str | None:
        """One line on what messages can pass off as the template's; None where that is nothing."""
        if self.parse_special:
            return "special tokens that messages spell become those tokens (parse_special)"
        return None if self.name == "base" else self._apart.note

    @cached_property
    def _apart(self) -> Apart:
        try:
            turn = self._whole([{"role": "user", "content": "a"}], _NO_MORE)
        except ToolkitError:
            turn = ""
        return told_apart(self._tokenizer, self._found.sources.values(), turn)

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads a message's content part by part, found by rendering one: it then writes itself
        what stands for pictures."""
        return self._prints([{"role": "user", "content": [{"type": "text", "text": _END}]}])

    @cached_property
    def _takes_texts(self) -> dict[str, bool]:
        """Whether a template that reads parts prints a content that is text too, by role. Llama 3.2 Vision's has no
        other way for the system's, and for a user's beside tools: of parts it writes the list."""
        asked: Message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
        user, answer, system = ({"role": role, "content": _END} for role in ("user", "assistant", "system"))
        talks = {"user": [user], "assistant": [asked, answer], "system": [system, asked]}
        return {role: self._prints(talk) for role, talk in talks.items()}

    def _prints(self, turns: list[Message]) -> bool:
        """Whether the template writes the _END that is in ``turns``."""
        try:
            return _END in self._rendered(self._found.sources["default"], turns, _NO_MORE)
        except (TemplateRefusal, ValueError):
            return False

    def _with_pictures(self, turns: list[Message], parts: bool) -> list[Message]:
        """``turns`` with what stands for pictures as the template wants it: contents with any in ``parts``, and others
        where it takes no text; or all as text."""
        if self.picture is None:
            return turns
        made = []
        for turn in turns:
            texts = turn["content"].split(PICTURE)
            content: Any = self.picture.join([texts[0], *(text.removeprefix("\n") for text in texts[1:])])
            if parts and (len(texts) > 1 or not self._takes_texts.get(turn["role"], self._takes_texts["user"])):
                pieces = [[{"type": "image"}, {"type": "text", "text": text}] for text in texts]
                content = [p for piece in pieces for p in piece][1:]
                nothing = "" if turn.get("tool_calls") else content[:1]  # templates ask whether calls are all there is
                content = [p for p in content if p != {"type": "text", "text": ""}] or nothing
            made.append({**turn, "content": content})
        return made

    def _prints_plugin_turns(self) -> bool:
        """Whether this is a model of InternLM's with a template that prints any role."""
        if self._tokenizer.token_id(PLUGIN) not in self._tokenizer.special_ids:
            return False
        try:
            return PLUGIN_ROLE in self._run([{"role": PLUGIN_ROLE, "content": "a"}], _NO_MORE)
        except ToolkitError:
            return False

    def _turn_end(self) -> list[str]:
        """The special token that a model's own template puts behind an answer, found by rendering one.

        Some checkpoints forget it in generation_config.json; the model would then talk to itself.
        """
        if self.reasoning_format is not None and self.reasoning_format.harmony:
            return []  # an answer is several messages; its end is in the model's files
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{_END}"}]
        try:
            after = self._run(turns, _NO_MORE).rpartition(_END)[2]
        except ToolkitError:
            return []
        ids = self._tokenizer.encode(after.lstrip(), add_special_tokens=False)
        if not ids or ids[0] not in self._tokenizer.special_ids:
            return []
        return [self._tokenizer.decode(ids[:1], skip_special_tokens=False)]

    def _call_ends(self) -> list[str]:
        """The special tokens that end an answer with calls, where another one ends answers without."""
        stops = self.tool_format.stops if self.tool_format is not None else ()
        return [stop for stop in stops if self._tokenizer.token_id(stop) in self._tokenizer.special_ids]


def _plain(text: str) -> Written:
    return Written.of(text, {}, frozenset())


def _literal(value: Any) -> str:
    """Texts, None and objects of them as Jinja spells them."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(name)}: {_literal(inner)}" for name, inner in value.items()) + "}"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _has_system(turns: list[Message]) -> bool:
    return turns[0]["role"] in ("system", "developer")


def _renderer(found: origin.Origin, renderer: Renderer | None = None) -> Sandbox | Renderer:
    """What renders a template: a built-in one here, another in a process of its own. Raises ToolkitError where the
    template does not compile."""
    chosen: Sandbox | Renderer
    if found.built_in:
        from toolkit.chat.sandbox import Sandbox  # Jinja is not for a process that renders no template itself

        chosen = Sandbox()
    else:
        chosen = renderer or Renderer()
    for source in found.sources.values():
        try:
            chosen.check(source)
        except ValueError as e:
            raise ToolkitError(f"chat template ({found.what}) is broken: {e}; choose another by --chat-template") from e
    return chosen


def _infilling(text: str) -> str:
    """Code Llama's prompt for what belongs at ``<FILL>``. Source: "Code Llama" (2023), section 2.3."""
    before, mark, after = text.partition("<FILL>")
    if not mark:
        raise UsageError("prompt: expected a text with <FILL> where it is to be filled in (capability 'infilling')")
    return f"<PRE> {before} <SUF>{after} <MID>"
