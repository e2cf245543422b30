"""Targets that are asked: the HTTP application over a tiny model, and the command line."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from testing.modules import of_tests

from fuzzing.harness import Case, Found, Run, Target, fast_folder, skeleton
from fuzzing.models import Models
from fuzzing.mutate import NUMBERS, STRINGS, dump, odd_value, spoil_bytes, spoil_json

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "[a-z]{1,4}", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["a", "b", None, 3]},
        "list": {"type": "array", "items": {"$ref": "#/$defs/item"}, "maxItems": 3},
        "any": {"anyOf": [{"type": "number"}, {"const": "x"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"item": {"type": "object", "properties": {"n": {"type": "number"}}, "required": ["n"]}},
}
WORDS = (
    "patternProperties", "oneOf", "allOf", "not", "$ref", "#", "#/$defs/item", "format", "date-time", "uuid", "(a+)+$",
    "a{1,9999}", "\\p{L}+", "(?=a)", "[", "minLength", "multipleOf", "propertyNames", "if", "uniqueItems",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "description": "x"}}
COMMON = {"model": "tiny", "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": 7}
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
BODIES: list[tuple[str, dict[str, Any]]] = [
    (CHAT, COMMON | {"messages": MESSAGES}),
    (CHAT, COMMON | {"messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}, "n": 2}),
    (CHAT, COMMON | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3, "stop": ["a", "bc"]}),
    (CHAT, COMMON | {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "auto"}),
    (CHAT, COMMON | {"messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "1", "content": "3"}]}),
    (CHAT, COMMON | {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}),
    (PLAIN, COMMON | {"prompt": "Hello", "logprobs": 2, "echo": True}),
    (PLAIN, COMMON | {"prompt": [3, 4, 5], "min_p": 0.1, "repetition_penalty": 1.1, "bad_words": ["x"]}),
    (PLAIN, COMMON | {"prompt": ["a", "b"], "logit_bias": {"5": -3}, "presence_penalty": 0.5, "ignore_eos": True}),
    (PLAIN, COMMON | {"prompt": "x", "frequency_penalty": -1, "min_tokens": 2, "stop_token_ids": [4], "stream": True}),
]  # fmt: skip
FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
    {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "string", "pattern": "(a|b)+c?"}}},
    {"type": "regex_schema", "regex_schema": "[a-z]{1,5}(x|y)*"},
    {"type": "json_object"},
]
QUICK = ("inspect", "list", "pull", "convert", "chat", "eval", "lite")


def targets(models: Models) -> list[Target]:
    http = [{"path": path.encode(), "body": dump(body)} for path, body in BODIES]
    schemas = [
        {"path": path.encode(), "body": dump(body | {"response_format": form})}
        for path, body in (BODIES[0], BODIES[6])
        for form in FORMATS
    ]
    words = [{"argv": dump(argv)} for argv in _command_lines(models)]
    return [
        Target("http", http, _spoil_body, partial(_serve, models.native)),
        Target("schema", schemas, _spoil_format, partial(_serve, models.native)),
        Target("cli", words, partial(_spoil_words, _vocabulary(models)), partial(_command, models)),
    ]


# -- HTTP ---------------------------------------------------------------------------------------


def _spoil_body(rng: Random, case: Case) -> Case:
    if rng.random() < 0.1:
        return case | {"body": spoil_bytes(rng, case["body"])}
    try:
        return case | {"body": dump(spoil_json(rng, json.loads(case["body"])))}
    except (ValueError, RecursionError):
        return case | {"body": spoil_bytes(rng, case["body"])}


def _spoil_format(rng: Random, case: Case) -> Case:
    try:
        body = json.loads(case["body"])
        form = body["response_format"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _spoil_body(rng, case)
    form = spoil_json(rng, form)
    if isinstance(form, dict) and rng.random() < 0.5:
        holder = form.get("json_schema")
        inner = holder.get("schema") if isinstance(holder, dict) else None
        if isinstance(inner, dict):
            inner[rng.choice(WORDS)] = rng.choice((rng.choice(WORDS), odd_value(rng), {"a": {"type": "string"}}))
    return case | {"body": dump(body | {"response_format": form})}


def _serve(model: Path) -> Run:
    from toolkit.chat.template import ChatTemplate
    from toolkit.configs.engine import TurbomindEngineConfig
    from toolkit.engine.process.frontend import AsyncEngine
    from toolkit.serve.app import create_app
    from toolkit.serve.options import ServerSettings

    config = TurbomindEngineConfig(session_len=96, max_batch_size=8, cache_max_entry_count=0.01, threads=1)
    engine = AsyncEngine.open(model, backend_config=config)
    app = create_app(engine, ChatTemplate.open(engine.tokenizer, model), ServerSettings(model_name="tiny"))
    loop, post = asyncio.new_event_loop(), of_tests("asgi").post

    def run(case: Case) -> str:
        status, body = loop.run_until_complete(post(app, case["path"].decode(), case["body"]))
        if status >= 500:
            raise Found(f"answer {status}", body.decode(errors="replace")[:2000])
        if not engine.healthy:
            raise Found("unhealthy", f"after an answer of {status}")
        if status == 200:
            return "200"
        message = json.loads(body)["error"]["message"]
        if "\n" in message or len(message) > 1000:
            raise Found("an answer that is no clear line", message[:500])
        return f"{status} {skeleton(message)}"

    return run


# -- the command line ---------------------------------------------------------------------------


def _command_lines(models: Models) -> list[list[str]]:
    """Good ones to begin with; they run in a folder of their own, beside copies of the models."""
    return [
        ["inspect", "native"],
        ["inspect", "checkpoint", "--verify", "--json", "out.json"],
        ["list", "models", "--json", "-"],
        ["pull", "checkpoint"],
        ["convert", "checkpoint", "--dst-path", "out", "--target", "torch", "--overwrite"],
        ["convert", "checkpoint", "--dst-path", "out.gguf", "--to", "gguf", "--gguf-type", "q8_0"],
        ["convert", "quantized", "--dst-path", "out", "--to", "hf", "--dtype", "float32"],
        ["chat", "native", "--prompt", "Hi", "--max-new-tokens", "3", "--session-len", "64"],
        ["chat", "native", "--prompt", "Hi", "--temperature", "0.5", "--top-k", "5", "--system", "x"],
        ["eval", "ppl", "native", "--data", "text.txt", "--window", "16", "--stride", "8", "--max-tokens", "40"],
        ["eval", "compare", "checkpoint", "quantized", "--data", "text.txt", "--window", "16"],
        ["lite", "mxfp4", "checkpoint", "--work-dir", "out", "--eval-tokens", "32"],
        ["lite", "auto_awq", "checkpoint", "--calib-dataset", "text.txt", "--calib-samples", "1", "--work-dir", "out"],
    ]  # fmt: skip


def _vocabulary(models: Models) -> list[str]:
    """Every option of the quick commands, names of files, and odd values."""
    from toolkit.commands.main import _load

    found: set[str] = set()

    def collect(command: Any) -> None:
        for parameter in command.params:
            found.update(opt for opt in parameter.opts if opt.startswith("-"))
        for inner in getattr(command, "commands", {}).values():
            collect(inner)

    for name in QUICK:
        collect(_load(name))
    files = ["native", "checkpoint", "quantized", "text.txt", "model.gguf", "nothing", ".", "..", "out", "link", "-"]
    values = [str(number) for number in NUMBERS] + [text for text in STRINGS if "\0" not in text and len(text) < 400]
    values = [text.encode("utf-8", "replace").decode() for text in values if not text.startswith("/")]
    names = ["auto", "inf", "nan", "-1", "0.5", "1e-300", "cpu", "cuda:7", "float16", "int8", "awq", "a,b", "{}", "[1]"]
    return sorted(found) + 3 * files + values + names


def _spoil_words(vocabulary: list[str], rng: Random, case: Case) -> Case:
    argv = json.loads(case["argv"])
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(1, len(argv) + 1)
        how = rng.randrange(5)
        if how == 0 and len(argv) > 2:
            del argv[at - 1]
        elif how == 1:
            argv.insert(at, rng.choice(vocabulary))
        elif how == 2:
            argv[at:at] = [rng.choice(vocabulary), rng.choice(vocabulary)]
        elif how == 3:
            argv[min(at, len(argv) - 1)] = rng.choice(vocabulary)
        else:
            argv[at:at] = argv[at : at + 2]
    return {"argv": dump([word for word in argv if word not in ("--debug", "demo")])}


def _command(models: Models) -> Run:
    home = Path(tempfile.mkdtemp(prefix="fuzz-", dir=fast_folder()))
    for name in ("native", "checkpoint", "quantized"):
        shutil.copytree(getattr(models, name), home / "base" / name)
    (home / "base" / "text.txt").write_text("All happy families are alike. " * 40, encoding="utf-8")
    shutil.copyfile(models.gguf[0], home / "base" / "model.gguf")
    (home / "base" / "link").symlink_to("native")
    os.environ |= {"TOOLKIT_HOME": str(home / "home"), "HOME": str(home / "user"), "COLUMNS": "100"}
    (home / "user").mkdir()
    ours = {f"{name}/{file}" for name in ("native", "quantized") for file in _listed(home / "base" / name)}

    def run(case: Case) -> str:
        work = home / "work" / "here"
        shutil.copytree(home / "base", work, symlinks=True)
        os.chdir(work)
        try:
            before = _contents(work)
            argv = json.loads(case["argv"])
            word = _main(argv)
            after = _contents(work)
            lost = [name for name, raw in before.items() if after.get(name) != raw]
            if "--overwrite" in argv:  # an artifact of ours may be replaced then, nothing else
                lost = [name for name in lost if name not in ours]
            if lost:
                raise Found("a file of the user is gone", f"{lost[:5]} after {case['argv'].decode()}")
            return word
        finally:
            os.chdir(home)
            shutil.rmtree(home / "work")

    return run


def _listed(folder: Path) -> list[str]:
    """The files of an artifact: those that its manifest lists, and it."""
    manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    return ["manifest.json", *(file["name"] for file in manifest["files"])]


def _contents(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def _main(argv: list[str]) -> str:
    from toolkit.commands.main import main

    out, err = io.StringIO(), io.StringIO()
    code: Any = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(argv)
        except SystemExit as end:
            code = end.code
    said = err.getvalue()
    if code not in (0, 1, 2) or "Traceback" in said or "internal error" in said:
        raise Found(f"exit code {code}" if "internal error" not in said else "internal error", f"{said[-1500:]} {argv}")
    return f"{argv[0]} {code} {skeleton(said.strip().splitlines()[-1] if said.strip() and code else '')}"
