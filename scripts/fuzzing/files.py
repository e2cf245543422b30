"""Targets that are files: artifacts, GGUF, safetensors, torch.save's, tokenizers, templates, adapters, calibration."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from testing.modules import of_tests

from fuzzing.harness import Case, Found, Run, Target, fast_folder
from fuzzing.models import Models
from fuzzing.mutate import STRINGS, dump, spoil_bytes, spoil_json, spoil_text
from fuzzing.pickles import pickled

TEXTS = ("Hello wörld 123\n  汉字 🙂", "", "<|im_start|>user\n" + "a b " * 50)
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <b>"}]
JINJA = (
    "{% for m in messages %}", "{% endfor %}", "{{ messages }}", "{% if true %}", "{% endif %}", "{{ 'x' * 10**9 }}",
    "{% set x = namespace(a=1) %}", "{% set x.a = x.a + 1 %}", "| tojson", "| join('x')", "{{ raise_exception('no') }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__ }}", "{% for i in range(10**7) %}", "~",
    "[::0]", "{{ '%999999d' % 1 }}", "{{ '{0:999999}'.format(1) }}", "{{ tools[0].function }}",
    "{%- generation %}", "{# ",
    "{{ messages[0]['content'].split('')[9] }}", "{{ strftime_now('%Y') }}", "{{ 1 // 0 }}", "{% include 'x' %}",
)  # fmt: skip


def targets(models: Models) -> list[Target]:
    checkpoint = models.checkpoint
    tokenizer = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json")
    engine = ("manifest.json", "engine.json", "engine.safetensors", "config.json", "generation_config.json")
    plain = ("manifest.json", "config.json", "model.safetensors", "generation_config.json", "tokenizer_config.json")
    return [
        _directory("safetensors", checkpoint, ("model.safetensors",), _read_tensors),
        _directory("checkpoint", checkpoint, plain, _run_model),
        _directory("quantized", models.quantized, plain, _run_model),
        _directory("native", models.native, engine, _run_model, fix_digests=True),
        _directory("torch", models.torch, engine, _run_model, fix_digests=True),
        _directory("torch-blocks", models.torch_quantized, engine, _run_model, fix_digests=True),
        _gguf(models),
        pickled(models),
        _directory("tokenizer", checkpoint, tokenizer, _use_tokenizer),
        _templates(models),
        _directory(
            "adapter", models.adapter, ("adapter_config.json", "adapter_model.safetensors"),
            partial(_read_adapter, checkpoint),
        ),
        _directory(
            "statistics", models.statistics, ("manifest.json", "statistics-00000.safetensors"),
            partial(_read_statistics, checkpoint),
        ),
        _calibration_texts(),
    ]  # fmt: skip


# -- directories --------------------------------------------------------------------------------


def _directory(
    name: str, base: Path, files: Sequence[str], use: Callable[[Path], str], fix_digests: bool = False
) -> Target:
    """Cases hold the changed files of a directory; the others are those of ``base``."""
    seeds = [{file: (base / file).read_bytes()} for file in files if (base / file).is_file()]
    manifest = (base / "manifest.json").read_bytes() if fix_digests else b""

    def spoil(rng: Random, case: Case) -> Case:
        changed = dict(case)
        file = rng.choice(sorted(case))
        changed[file] = _spoil_file(rng, file, case[file])
        if manifest and "manifest.json" not in changed and rng.random() < 0.8:
            changed["manifest.json"] = _with_digests(manifest, changed)
        return changed

    return Target(name, seeds, spoil, partial(_in_directory, base, use))


def _in_directory(base: Path, use: Callable[[Path], str]) -> Run:
    home = Path(tempfile.mkdtemp(prefix="fuzz-", dir=fast_folder()))
    folder = home / "model"
    shutil.copytree(base, folder)
    os.environ["TOOLKIT_HOME"] = str(home / "home")

    def run(case: Case) -> str:
        try:
            for name, raw in case.items():
                (folder / name).write_bytes(raw)
            return use(folder)
        finally:
            for name in case:
                if (base / name).is_file():
                    shutil.copyfile(base / name, folder / name)
                else:
                    (folder / name).unlink()

    return run


def _spoil_file(rng: Random, name: str, raw: bytes) -> bytes:
    if rng.random() < 0.15:
        return spoil_bytes(rng, raw, within=1 << 14)
    if name.endswith(".safetensors"):
        return _spoil_header(rng, raw)
    try:
        return dump(spoil_json(rng, json.loads(raw)))
    except (ValueError, RecursionError):  # an entry of the corpus that is no JSON
        return spoil_bytes(rng, raw)


def _spoil_header(rng: Random, raw: bytes) -> bytes:
    """A safetensors file whose header says something else."""
    length = int.from_bytes(raw[:8], "little")
    try:
        header = json.loads(raw[8 : 8 + length])
    except (ValueError, RecursionError):
        return spoil_bytes(rng, raw, within=1 << 12)
    text = dump(spoil_json(rng, header))
    if rng.random() < 0.5:
        text = text.ljust(length)
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def _with_digests(manifest: bytes, case: Case) -> bytes:
    """The manifest as if the changed files had been written so: what is behind the digests is tried too."""
    data = json.loads(manifest)
    for entry in data["files"]:
        raw = case.get(entry["name"])
        if raw is not None:
            header = raw[: 8 + int.from_bytes(raw[:8], "little")]
            entry |= {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
            entry |= {"header_sha256": hashlib.sha256(header).hexdigest()} if "header_sha256" in entry else {}
    return dump(data)


# -- what is done with them ---------------------------------------------------------------------


def _read_tensors(folder: Path) -> str:
    from toolkit.artifacts.weight_files.safetensors_file import map_arrays, read_metadata
    from toolkit.artifacts.weight_files.tensor_file import TensorFile

    file = folder / "model.safetensors"
    read_metadata(file)
    arrays = map_arrays(file)
    total = sum(int(array.reshape(-1).view("u1").sum()) for array in arrays.values() if array.size)
    tensors = TensorFile(file)
    assert {name: tuple(tensors[name].shape) for name in tensors} == {n: a.shape for n, a in arrays.items()}
    return f"read {total % 3}"


def _run_model(path: Path) -> str:
    """Show it, open it, and generate two tokens."""
    from toolkit.artifacts.inspect import inspect
    from toolkit.configs.engine import TurbomindEngineConfig
    from toolkit.engine.process.frontend import AsyncEngine
    from toolkit.messages import GenerationConfig

    inspect(path)
    config = TurbomindEngineConfig(
        session_len=32, max_batch_size=1, cache_max_entry_count=0.01, threads=1, device="cpu"
    )
    with AsyncEngine.open(path, backend_config=config) as engine:
        answers = list(engine.generate_sync([3, 4, 5], GenerationConfig(max_new_tokens=2, ignore_eos=True)))
    last = answers[-1]
    if "the engine failed" in (last.error_message or ""):
        raise Found("a step failed", last.error_message or "")
    return f"ran, {last.finish_reason}"


def _use_tokenizer(folder: Path) -> str:
    from toolkit.artifacts.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.open(folder)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        [tokenizer.bytes_of(i) for i in ids]
    tokenizer.decode([0, tokenizer.vocab_size - 1])
    return f"eos {len(tokenizer.eos_ids)}, template {tokenizer.chat_template is not None}"


def _read_adapter(model: Path, folder: Path) -> str:
    from toolkit.artifacts.adapters.adapter import read_adapter
    from toolkit.artifacts.checkpoint import open_checkpoint
    from toolkit.models.registry import load_spec

    spec, stored = load_spec(open_checkpoint(model))
    return f"{len(read_adapter(folder, spec, stored))} linears"


def _read_statistics(model: Path, folder: Path) -> str:
    from toolkit.artifacts.manifest import content_digest
    from toolkit.quant.layers.source import LayerSource
    from toolkit.quant.layers.statistics_file import open_statistics

    source = LayerSource(model)
    saved = open_statistics(folder, content_digest(model), source)
    grams = saved.grams(0)
    return f"{sum(grams[site].revived().xtx.numel() for site in grams)} numbers"


# -- single files -------------------------------------------------------------------------------


def _gguf(models: Models) -> Target:
    seeds = [{"model.gguf": file.read_bytes()} for file in models.gguf]

    def spoil(rng: Random, case: Case) -> Case:
        raw = case["model.gguf"]
        if rng.random() < 0.7 and (spoilt := _spoil_tables(rng, raw)) is not None:
            return {"model.gguf": spoilt}
        return {"model.gguf": spoil_bytes(rng, raw, within=rng.choice((400, 4000, 1 << 15)))}

    def start() -> Run:
        home = Path(tempfile.mkdtemp(prefix="fuzz-", dir=fast_folder()))
        os.environ["TOOLKIT_HOME"] = str(home / "home")

        def run(case: Case) -> str:
            (home / "model.gguf").write_bytes(case["model.gguf"])
            try:
                return _run_model(home / "model.gguf")
            finally:
                shutil.rmtree(home / "home", ignore_errors=True)

        return run

    return Target("gguf", seeds, spoil, start)


def _spoil_tables(rng: Random, raw: bytes) -> bytes | None:
    """A sound GGUF file whose metadata and tensors say something else; None for a file that is not sound."""
    import struct

    from toolkit.artifacts.gguf.container import read_container
    from toolkit.artifacts.gguf.writer import Entry, write_gguf
    from toolkit.errors import ToolkitError

    with tempfile.TemporaryDirectory(dir=fast_folder()) as folder:
        file = Path(folder) / "model.gguf"
        file.write_bytes(raw)
        try:
            found = read_container(file)
            metadata, tensors = dict(found.metadata), dict(found.tensors)
            for _ in range(rng.choice((1, 1, 2, 4))):
                _edit_metadata(rng, metadata)
                if tensors and rng.random() < 0.3:
                    name = rng.choice(sorted(tensors))
                    info = tensors.pop(name)
                    other = rng.choice((name + "x", "blk.0.attn_q.weight", "blk.7.ffn_up.weight", "", "output.weight"))
                    turned = dataclasses.replace(info, shape=info.shape[::-1] if info.dtype == "F32" else info.shape)
                    tensors |= rng.choice(({}, {other: info}, {name: turned}))
            entries = [Entry(name, info.shape, info.dtype) for name, info in tensors.items()]
            spoilt = Path(folder) / "spoilt.gguf"
            write_gguf(spoilt, metadata, entries, (found.data[i.start : i.end] for i in tensors.values()))
            return spoilt.read_bytes()
        except (ToolkitError, struct.error, UnicodeError, KeyError, AttributeError, TypeError):
            return None  # not sound, or a value that the format has no type for


def _edit_metadata(rng: Random, metadata: dict[str, Any]) -> None:
    key = rng.choice(sorted(metadata)) if metadata else "general.architecture"
    value = metadata.get(key)
    how = rng.randrange(4)
    if how == 0:
        metadata.pop(key, None)
    elif how == 1 and isinstance(value, (list, np.ndarray)):
        metadata[key] = value[: rng.randrange(len(value) + 1)]
    elif how == 2 and isinstance(value, list) and value:
        metadata[key] = [rng.choice(STRINGS[:6]) if rng.random() < 0.02 else item for item in value]
    else:
        odd = rng.choice((0, 1, 2, 3, 64, 255, 1 << 16, (1 << 32) - 1, 0.0, -1.0, 1e-30, float("nan"), True, "", "x"))
        metadata[key] = rng.choice((odd, odd, odd, [], ["x"], np.zeros(3, "<i4"), np.full(2, -7, "<i4")))


def _templates(models: Models) -> Target:
    from toolkit.chat import builtin

    own = (models.checkpoint / "chat_template.jinja").read_bytes()
    texts = [own, *(file.read_bytes() for file in sorted(_template_folder(builtin).glob("*.jinja")))]
    seeds = [{"chat_template.jinja": raw} for raw in texts]
    words = [*JINJA, *(text for text in of_tests("templates", "corpus").HOSTILE if len(text) < 1000)]

    def spoil(rng: Random, case: Case) -> Case:
        text = case["chat_template.jinja"].decode("utf-8", "replace")
        return {"chat_template.jinja": spoil_text(rng, text, words).encode("utf-8", "surrogatepass")}

    def start() -> Run:
        from toolkit.chat.renderer import Renderer

        return _in_directory(models.checkpoint, partial(_render, Renderer()))

    return Target("template", seeds, spoil, start)


def _template_folder(builtin: Any) -> Path:
    return Path(builtin.__file__).resolve().parents[2] / "templates"


def _render(renderer: Any, folder: Path) -> str:
    from toolkit.artifacts.text.tokenizer import Tokenizer
    from toolkit.chat.template import ChatTemplate

    template = ChatTemplate.open(Tokenizer.open(folder), folder, renderer=renderer)
    text = template.render(TURNS)
    template.render([*TURNS, {"role": "assistant", "content": "Go"}])
    return f"rendered {min(len(text) // 100, 9)}"


def _calibration_texts() -> Target:
    rows = [
        {"text": "All happy families are alike."},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
    ]
    seeds = [
        {"text.json": dump(rows)},
        {"text.jsonl": b"\n".join(dump(row) for row in rows)},
        {"text.txt": "Héllo\n\nthere".encode()},
        {"text.parquet": _parquet(rows[:1])},
    ]

    def spoil(rng: Random, case: Case) -> Case:
        (name, raw), *_ = case.items()
        if name == "text.json" and rng.random() < 0.8:
            return {name: _spoil_file(rng, name, raw)}
        if name == "text.jsonl" and rng.random() < 0.8:
            return {name: b"\n".join(_spoil_file(rng, name, line) for line in raw.split(b"\n"))}
        return {name: spoil_bytes(rng, raw)}

    def start() -> Run:
        from toolkit.quant.text.calibration import local_texts

        home = Path(tempfile.mkdtemp(prefix="fuzz-", dir=fast_folder()))

        def run(case: Case) -> str:
            (name, raw), *_ = case.items()
            (home / name).write_bytes(raw)
            return f"{min(len(list(local_texts(home / name, 0))), 4)} texts"

        return run

    return Target("texts", seeds, spoil, start)


def _parquet(rows: list[dict[str, str]]) -> bytes:
    import pyarrow
    import pyarrow.parquet

    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue().to_pybytes()
