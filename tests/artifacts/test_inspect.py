"""``inspect`` on every kind of model, and the three commands of this folder from the command line."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from toolkit.artifacts.inspect import inspect
from toolkit.artifacts.manifest import describe_parent
from toolkit.artifacts.output.stage import open_stage
from toolkit.commands.main import main
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.errors import ToolkitError

KEYS = {
    "kind", "stage", "schema_version", "tool_version", "created", "parent", "options", "quality", "files", "size_bytes",
}  # fmt: skip


@pytest.fixture
def engine(tiny_models: Any, tmp_path: Path) -> Path:
    """llama → a copy called quantized → engine."""
    source = tiny_models("llama")
    with open_stage(
        tmp_path / "q", kind="quantized", stage="lite", parent=describe_parent(source), options={"w_bits": 4}
    ) as stage:
        for file in source.iterdir():
            shutil.copy(file, stage.dir)
        stage.finish({"perplexity_before": 12.5, "perplexity_after": 13, "kl": 0.05, "tokens": 2000, "layers": [1, 2]})
    return convert(str(tmp_path / "q"), tmp_path / "engine").path


def tool(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(argv))
    captured = capsys.readouterr()
    code = ended.value.code
    return (code if isinstance(code, int) else 0), captured.out, captured.err


def test_plain_checkpoint_and_gguf_have_all_keys(tiny_models: Any, support: Any, tmp_path: Path) -> None:
    model = tiny_models("qwen2")
    gguf = support("gguf_files").write_gguf(model, tmp_path / "m.gguf", "Q4_0")
    for path in (model, gguf):
        found = inspect(path)
        assert set(found.record) == KEYS
        assert found.record["kind"] == "checkpoint" and found.record["stage"] is None
        files = [path] if path.is_file() else list(path.iterdir())
        assert found.record["size_bytes"] == sum(file.stat().st_size for file in files)
        assert dict(found.facts)["architecture"] == "Qwen2ForCausalLM"
        assert found.lineage == [str(path)]
    assert dict(inspect(gguf).facts)["quantization"] == "gguf"


def test_what_cannot_take_the_model_is_said(tiny_models: Any, capsys: Any, tmp_path: Path) -> None:
    """From the spec alone; of a model that nothing runs, why."""
    _, plain, _ = tool(capsys, "inspect", str(tiny_models("qwen2")))
    assert "not for" not in plain
    _, refused, _ = tool(capsys, "inspect", str(tiny_models("cohere")))
    assert "GGUF" in refused and "native" not in refused
    strange = tmp_path / "strange"
    shutil.copytree(tiny_models("qwen2"), strange)
    config = json.loads((strange / "config.json").read_text())
    (strange / "config.json").write_text(json.dumps(config | {"architectures": ["Strange"], "model_type": "strange"}))
    code, told, _ = tool(capsys, "inspect", str(strange))
    assert code == 0 and "does not run" in told and "Strange" in told


def test_lineage_goes_back_to_the_source(engine: Path, tiny_models: Any) -> None:
    found = inspect(engine, verify=True)
    assert set(found.record) == KEYS and found.record["kind"] == "engine"
    assert len(found.lineage) == 3
    assert "target cpu" in found.lineage[0] and "w_bits 4" in found.lineage[1]
    assert found.lineage[2].startswith(str(tiny_models("llama"))) and "\n" not in found.lineage[2]
    cost = found.lineage[1].splitlines()[-1]
    assert cost == "perplexity 12.5 → 13 (+4.0 %), KL 0.0500 nats, on 2,000 tokens"


def test_what_is_known_of_the_files_is_told(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain, verified = tool(capsys, "inspect", str(engine))[1], tool(capsys, "inspect", str(engine), "--verify")[1]
    assert "verified" not in plain and "(--verify)" in plain
    assert "verified: " in verified and "(--verify)" not in verified


def test_damage_is_found(engine: Path) -> None:
    path = engine / "tokenizer.json"
    text = path.read_text()
    path.write_text(text.replace("a", "b", 1))
    inspect(engine)  # same size: only --verify reads it
    with pytest.raises(ToolkitError, match=r"tokenizer\.json: was changed .* expected sha256"):
        inspect(engine, verify=True)
    path.write_text(text + " ")
    with pytest.raises(ToolkitError, match=r"tokenizer\.json: trailing bytes: expected \d+ bytes"):
        inspect(engine)
    path.unlink()
    with pytest.raises(ToolkitError, match=r"tokenizer\.json: missing"):
        inspect(engine)


@pytest.mark.parametrize("kind", ["calibration", "deployment", "gguf"])
def test_artifacts_that_are_no_checkpoints(
    kind: str, tiny_models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Statistics, files of a deployment, and a directory with a GGUF file have their record and lineage."""
    model, target = tiny_models("qwen2"), tmp_path / "made"
    if kind == "gguf":
        rewrite(str(model), target, to="gguf")
    else:
        with open_stage(target, kind=kind, stage="some", parent=describe_parent(model), options={}) as stage:
            (stage.dir / "some.txt").write_text("it")
            stage.finish()
    code, out, _ = tool(capsys, "inspect", str(target), "--verify")
    assert code == 0 and "verified: " in out and "does not run" not in out
    assert inspect(target).lineage[-1] == str(model)
    assert bool(inspect(target).facts) == (kind == "gguf")


def test_inspect_command(engine: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tool(capsys, "inspect", str(engine), "--json", "-")
    assert code == 0 and set(json.loads(out)) == KEYS
    code, out, _ = tool(capsys, "inspect", str(tmp_path / "q"), "--json", str(tmp_path / "x.json"))
    assert code == 0 and json.loads((tmp_path / "x.json").read_text())["kind"] == "quantized"
    assert "Lineage" in out and "12.5" in out and "model.safetensors" in out and "2 entries" in out
    code, out, err = tool(capsys, "inspect", str(tmp_path / "none"))
    assert (code, out) == (2, "") and err.count("\n") == 1 and "none" in err


def test_pull_prints_the_path_alone(tiny_models: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_models("llama")
    assert tool(capsys, "pull", str(path)) == (0, f"{path}\n", "")
    code, out, err = tool(capsys, "pull", "nobody/nothing")
    assert (code, out) == (1, "") and err.count("\n") == 1


def test_convert_command(tiny_models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, target = str(tiny_models("llama")), str(tmp_path / "e")
    code, out, err = tool(capsys, "convert", model, "--dst_path", target)
    assert code == 0 and "tool chat" in out, err
    code, out, _ = tool(capsys, "convert", model, "--dst-path", target)
    assert (code, out) == (0, f"{target}: already there\n")
    code, out, err = tool(capsys, "convert", model, "--dst-path", target, "--dtype", "float16")
    assert (code, out) == (2, "") and err.count("\n") == 1 and "--overwrite" in err
    code, out, _ = tool(capsys, "convert", model, "--dst-path", target, "--overwrite", "--json", "-")
    assert code == 0 and json.loads(out)["options"] == {"target": "cpu", "dtype": "auto", "head_bits": 8}
    code, _, err = tool(capsys, "convert", model, "--dst-path", target, "--target", "abacus")
    assert code == 2 and "abacus" in err and "torch" in err


@pytest.mark.parametrize("to", [(), ("--to", "gguf"), ("--to", "hf")])
def test_convert_ends_with_what_works(
    tiny_models: Any, tiny_checkpoint: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], to: tuple[str, ...]
) -> None:
    if "gguf" not in to:
        bare = str(tiny_checkpoint("llama", tmp_path / "bare", tokenizer=False))
        code, out, err = tool(capsys, "convert", bare, "--dst-path", str(tmp_path / "e"), *to)
        assert code == 0 and "tool chat" not in out and "no tokenizer" in out and "copy the files" in out, err
        code, out, err = tool(capsys, "convert", str(tiny_models("bert")), "--dst-path", str(tmp_path / "b"), *to)
        assert code == 0 and "tool chat" not in out and "tool embed" in out, err
    code, out, err = tool(capsys, "convert", str(tiny_models("llama")), "--dst-path", str(tmp_path / "t"), *to)
    folded = re.sub(r"[│\s]", "", out)
    assert code == 0 and "toolchat" in folded and ("model.gguf" in folded) == ("gguf" in to), err
