"""What is said of files of all kinds that cannot be read, and of new weights that cannot be taken: the whole line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from tests.support.refused import refusing
from toolkit.artifacts.cache_cost import FORM, CacheCost, keep_cost
from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.formats.describe import common_layout
from toolkit.artifacts.gguf.container import read_container
from toolkit.artifacts.gguf.metadata import model_metadata
from toolkit.artifacts.gguf.vocabulary import vocabulary
from toolkit.artifacts.json_file import read_json
from toolkit.artifacts.manifest import file_digest
from toolkit.artifacts.output.result_file import append_csv, check_json, save_plot, write_text
from toolkit.artifacts.output.stage import open_stage, write_file
from toolkit.artifacts.rounding import to_mxfp4
from toolkit.artifacts.text.tokenizer import Tokenizer
from toolkit.artifacts.text.tokenizer_classes import with_older_files
from toolkit.artifacts.text.tokenizer_pieces import read_pieces
from toolkit.artifacts.text.tokenizer_ranks import RANKS, read_ranks
from toolkit.artifacts.weight_files.new_weight_files import WeightFiles
from toolkit.artifacts.weight_files.safetensors_file import read_header
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.registry import build, get
from toolkit.models.tiny import tiny_config

CUTS = (
    "gpt-2, smollm, qwen2, qwen35, llama-bpe, dbrx, gpt-4o, tekken, kimi-k2, deepseek-v3, deepseek-llm, "
    "deepseek-coder, falcon"
)

refused = refusing(ToolkitError)


@pytest.mark.parametrize(
    ("change", "size", "told"),
    [
        (
            lambda data: data["model"].update(type="WordPiece"),
            320,
            "model.type: expected BPE, found 'WordPiece'; GGUF needs another tool",
        ),
        (lambda data: None, 100, "token id 319: the model has 100 embeddings; the two do not match"),
        (
            lambda data: data.update(normalizer={"type": "Lowercase"}),
            320,
            "normalizer: found 'Lowercase', which GGUF cannot say of a byte-level tokenizer",
        ),
        (
            lambda data: data["model"].update(merges=[["zz", "yy"]]),
            320,
            "not a tokenizer of the tokenizers library (Cannot instantiate Tokenizer from buffer: "
            "Token `zz` out of vocabulary at line 1 column 5528); fetch the file again",
        ),
        (
            lambda data: data.update(pre_tokenizer={"type": "Whitespace"}),
            320,
            f"pre_tokenizer: expected one that llama.cpp has ({CUTS}, seed-coder, bailingmoe), found "
            '{"type": "Whitespace"}; GGUF cannot say how this model\'s texts are cut',
        ),
    ],
)
def test_tokenizers_that_gguf_cannot_say(tiny_models: Any, tmp_path: Path, change: Any, size: int, told: str) -> None:
    file = tmp_path / "tokenizer.json"
    data = json.loads((tiny_models("llama") / "tokenizer.json").read_text())
    change(data)
    file.write_text(json.dumps(data))
    assert refused(lambda: vocabulary(tmp_path, size, {}, {})) == f"{file}: {told}"


def test_a_family_whose_file_for_llama_cpp_is_not_written() -> None:
    spec, _ = build(tiny_config(get("afmoe")))
    told = "gguf: its file for llama.cpp's afmoe is not written: there is nothing here to try it against"
    assert refused(lambda: model_metadata(spec)) == told


def twice() -> None:
    files = WeightFiles()
    for _ in range(2):
        files.add_bytes(save({"a": torch.zeros(1)}))


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (
            lambda: WeightFiles().add_bytes(b"\x80\x02" + bytes(10)),
            ToolkitError,
            "expected a safetensors file, found a pickle, which is not read here since it can run code; "
            "safetensors.torch.save(tensors) makes one",
        ),
        (
            lambda: WeightFiles().add_bytes(b"nonsense" * 4),
            ToolkitError,
            "part 1 of the new weights: not a safetensors file: it states a header of 7310308002159816558 bytes",
        ),
        (
            lambda: WeightFiles().add_copy(Path("weights.bin")),
            ToolkitError,
            "weights.bin: expected a .safetensors file, or a directory with some",
        ),
        (twice, ToolkitError, "part 2 of the new weights: tensor a is there already; send each tensor once"),
        (
            lambda: WeightFiles().add_tensors([("a", torch.zeros(1)), ("a", torch.zeros(1))]),
            UsageError,
            "a: the tensor is there twice",
        ),
        (
            lambda: WeightFiles().add_tensors([5]),  # type: ignore[list-item]
            UsageError,
            "weights: expected names and tensors, found 5",
        ),
        (
            lambda: WeightFiles().add_tensors([("a", "text")]),
            UsageError,
            "a: expected a torch tensor or numpy array of numbers, found str",
        ),
    ],
)
def test_new_weights(call: Callable[[], object], kind: type[ToolkitError], told: str) -> None:
    assert refused(call, kind) == told


def test_new_weights_that_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 0))  # type: ignore[attr-defined]
    files = WeightFiles()
    told = refused(lambda: files.add_bytes(save({"a": torch.zeros(1 << 19)})))
    kept = "new weights are kept here until the next ones: they need 2 MiB, and 0 are free"
    assert told == f"{files.path.parent}: {kept}; make room, or set TMPDIR to a folder with more"


def test_new_weights_that_have_no_folder() -> None:
    files = WeightFiles()
    shutil.rmtree(files.path)
    told = refused(lambda: files.add_bytes(save({"a": torch.zeros(4)})))
    assert told == f"{files.path.parent}: the new weights cannot be kept: No such file or directory"


def test_files_of_older_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "added_tokens.json").write_text("{}")
    told = f"{tmp_path / 'tokenizer_config.json'}: added_tokens_decoder: expected an object by id"
    assert refused(lambda: with_older_files(tmp_path, {"added_tokens_decoder": [5]})) == told
    kind = next(iter(RANKS))
    (file := tmp_path / kind.name).mkdir()
    assert refused(lambda: read_ranks(tmp_path, kind, {})) == f"{file}: Is a directory"


def test_a_cost_that_cannot_be_kept(tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "e", Packing(target="cpu"), quiet=True).path
    (home := tmp_path / "home").write_text("a file stands in its way")
    monkeypatch.setenv("TOOLKIT_HOME", str(home))
    told = refused(lambda: keep_cost(path, CacheCost(1, (), (), form=FORM)))
    assert told.startswith(f"{home}/") and told.endswith(": cannot be written: Not a directory")


def test_what_is_no_file(tiny_models: Any, tmp_path: Path) -> None:
    told = f"{tmp_path}: expected a JSON file, found something else of that name"
    assert refused(lambda: read_json(tmp_path)) == told
    assert refused(lambda: file_digest(tmp_path)) == f"{tmp_path}: cannot be read: Is a directory"
    nothing = tmp_path / "nothing"
    assert refused(lambda: file_digest(nothing)) == f"{nothing}: cannot be read: No such file or directory"
    model = tiny_models("llama")
    told = f"{model}: tensor nothing is missing; fetch or convert the model again"
    assert refused(lambda: open_checkpoint(model).info("nothing")) == told


def test_files_for_another_number_of_ranks(tiny_models: Any, tmp_path: Path) -> None:
    path = convert(str(tiny_models("llama")), tmp_path / "e", Packing(tp=2)).path
    assert refused(lambda: open_engine(path, (0, 3)), UsageError) == (
        f"{path}: packed in files for --tp 2, found --tp 3; give --tp 2, or convert the model again with --tp 3 "
        "(without --tp any number of ranks can cut it)"
    )
    assert refused(lambda: open_engine(path).array_file, UsageError) == (
        f"{path}: packed in a file for each of 2 ranks of the native runner; start it with --tp 2 and nothing else "
        "that splits it, or convert the model again"
    )


def test_shapes_and_layouts() -> None:
    told = "w: 33 input features are no multiple of mxfp4's blocks of 32"
    assert refused(lambda: to_mxfp4(torch.ones(4, 33), "w")) == told
    told = "quantization_config: expected at least one quantized linear, found none"
    assert refused(lambda: common_layout({"a": None})) == told


class Figure:
    """One that cannot be drawn."""

    def savefig(self, *arguments: Any, **options: Any) -> None:
        raise ValueError("dpi must be positive")


def staged(target: Path) -> None:
    with open_stage(target, kind="checkpoint", stage="none", parent={}, options={}):
        pass


def written(target: Path, error: OSError) -> None:
    with write_file(target):
        raise error


def file_in(folder: Path) -> Path:
    (folder / "file").touch()
    return folder / "file"


LONG = "n" * 250  # a name that leaves no room for the one that is written first
OUT = "cannot be written"


@pytest.mark.parametrize(
    ("call", "kind", "told"),
    [
        (lambda at: append_csv("--csv", at, {"a": 1}), UsageError, f"--csv AT: {OUT} (Is a directory)"),
        (lambda at: write_text("--json", at, "x"), UsageError, f"--json AT: {OUT} (Is a directory)"),
        (
            lambda at: save_plot("--plot", Figure(), at / "p.png", 0),
            UsageError,
            f"--plot AT/p.png: {OUT} (dpi must be positive)",
        ),
        (
            lambda at: write_text("--json", file_in(at) / "x", "x"),
            ToolkitError,
            f"AT/file/x: {OUT}: File exists",
        ),
        (lambda at: staged(at / LONG), ToolkitError, f"AT/{LONG}: {OUT}: File name too long"),
        (
            lambda at: written(at / "x", OSError(5, "Input/output error")),
            ToolkitError,
            f"AT/x: {OUT}: Input/output error",
        ),
        (lambda at: read_pieces(at), ToolkitError, "AT: Is a directory"),
        (lambda at: read_container(at), ToolkitError, "AT: cannot be read: Is a directory"),
        (lambda at: read_header(at), ToolkitError, "AT: cannot be read: Is a directory"),
    ],
)
def test_what_the_system_refuses(
    tmp_path: Path, call: Callable[[Path], object], kind: type[ToolkitError], told: str
) -> None:
    assert refused(lambda: call(tmp_path), kind) == told.replace("AT", str(tmp_path))


def test_what_may_not_be_read_or_written(tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert refused(lambda: read_json(loop)) == f"{loop}: cannot be read: Too many levels of symbolic links"
    monkeypatch.setattr("toolkit.artifacts.json_file.MAX_JSON_BYTES", 1)
    (tmp_path / "x.json").write_text("{}")
    told = f"{tmp_path}/x.json: expected a JSON file of at most 1 bytes, found 2"
    assert refused(lambda: read_json(tmp_path / "x.json")) == told
    monkeypatch.undo()

    def denied(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.access", lambda *arguments, **options: False)  # whoever runs this may do all
    told = f"--json {tmp_path}/new: cannot be written (permission denied)"
    assert refused(lambda: check_json("--json", tmp_path / "new", ()), UsageError) == told
    monkeypatch.setattr(Path, "read_bytes", denied)
    (tmp_path / "tokenizer.json").touch()
    told = f"{tmp_path}/tokenizer.json: cannot be read: Permission denied"
    assert refused(lambda: Tokenizer.open(tmp_path)) == told
