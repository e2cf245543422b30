"""``tool lite draft``: a head trained on a model's own text, read as speculators says, the same after a kill."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import toolkit.quant.draft.run as run
import toolkit.quant.draft.train as train
from tests.support.hidden_states import hidden_states
from toolkit.artifacts.drafts.draft_head import read_head, read_head_spec
from toolkit.artifacts.manifest import read_manifest
from toolkit.artifacts.weight_files.safetensors_file import widened
from toolkit.commands.main import main
from toolkit.errors import ToolkitError
from toolkit.quant.draft.features import States
from toolkit.quant.draft.layer import Passes
from toolkit.quant.layers.source import LayerSource
from toolkit.quant.options import DraftHead

FEW = DraftHead(tokens=512, steps=6, draft_vocab_size=200, num_draft_tokens=3)


@pytest.fixture(scope="module")
def trained(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(model, head)."""
    model, made = tiny_models("llama", num_hidden_layers=4), tmp_path_factory.mktemp("head") / "head"
    run.draft(str(model), made, FEW)
    return model, made


def as_speculators_reads(path: Path, ids: torch.Tensor, taps: torch.Tensor, passes: int) -> torch.Tensor:
    """Guessed ids behind ``ids`` [length], written by speculators' description alone: rows one after another, a cache
    of lists. ``taps`` [length − 1, fused · hidden]."""
    config = json.loads((path / "config.json").read_text())
    w = {name: t.float() if t.is_floating_point() else t for name, t in load_file(path / "model.safetensors").items()}
    layer = config["transformer_layer_config"]
    assert config["speculators_config"]["algorithm"] == "eagle3" and layer["num_hidden_layers"] == 1
    assert config["norm_before_residual"] and not config["norm_before_fc"]
    heads, kv, size = layer["num_attention_heads"], layer["num_key_value_heads"], layer["head_dim"]
    inverse = layer["rope_theta"] ** -(torch.arange(0, size, 2).float() / size)

    def rms(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.square().mean() + layer["rms_norm_eps"]).sqrt() * w[f"{name}.weight"]

    def turned(x: torch.Tensor, place: int) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        cos, sin = (place * inverse).cos(), (place * inverse).sin()
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def one(token: int, hidden: torch.Tensor, place: int, cache: list[Any]) -> torch.Tensor:
        hidden = rms(hidden, "layers.0.hidden_norm")
        x = torch.cat([rms(w["embed_tokens.weight"][token], "layers.0.input_layernorm"), hidden])
        q, k, v = (F.linear(x, w[f"layers.0.self_attn.{n}_proj.weight"]).view(-1, size) for n in "qkv")
        cache.append((turned(k, place), v))
        q = turned(q, place)
        out = []
        for h in range(heads):
            scores = torch.stack([q[h] @ key[h * kv // heads] for key, _ in cache]) / size**0.5
            values = torch.stack([value[h * kv // heads] for _, value in cache])
            out.append(scores.softmax(0) @ values)
        hidden = hidden + F.linear(torch.cat(out), w["layers.0.self_attn.o_proj.weight"])
        x = rms(hidden, "layers.0.post_attention_layernorm")
        gate, up = (F.linear(x, w[f"layers.0.mlp.{n}_proj.weight"]) for n in ("gate", "up"))
        return hidden + F.linear(F.silu(gate) * up, w["layers.0.mlp.down_proj.weight"])

    cache: list[Any] = []
    for i, row in enumerate(F.linear(taps.float(), w["fc.weight"])):
        hidden = one(int(ids[i + 1]), row, i + 1, cache)
    found = []
    for i in range(passes):
        best = int(F.linear(rms(hidden, "norm"), w["lm_head.weight"]).argmax())
        token = best + int(w["d2t"][best])
        assert w["t2d"][token]
        found.append(token)
        hidden = one(token, hidden, len(ids) + i, cache)
    assert int(w["t2d"].sum()) == config["draft_vocab_size"] == len(w["d2t"])
    return torch.tensor(found)


def test_it_guesses_as_speculators_would(trained: tuple[Path, Path]) -> None:
    _, path = trained
    spec, weights = read_head(path, 4)
    ids = torch.randint(0, spec.vocab_size, (1, 20), generator=torch.Generator().manual_seed(3))
    taps = torch.randn(1, 20, len(spec.layers) * spec.hidden_size, generator=torch.Generator().manual_seed(4))
    expected = as_speculators_reads(path, ids[0], taps[0, :-1], 3)
    kept = torch.from_numpy(weights.pop("d2t") + np.arange(spec.draft_vocab_size))
    weights = {name: torch.from_numpy(widened(w)) for name, w in weights.items()}
    for i in range(3):  # what is guessed last is seen where the text goes on with what was guessed before
        text = torch.cat([ids, expected[None, :i]], 1)
        passes = Passes(spec, weights, weights["embed_tokens.weight"], text, F.pad(taps, (0, 0, 0, i)))
        for _ in range(i + 1):
            logits = passes.next()
        assert int(kept[logits[0, 18].argmax()]) == int(expected[i])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "lfm2", "deepseek_v3"])
def test_hidden_states_are_those_of_the_model(tiny_models: Any, family: str) -> None:
    """Whatever layers keep of a text; samples that begin alike are told each. Near ones of experts may be others."""
    source = LayerSource(tiny_models(family))
    ids = torch.randint(3, 300, (9, 150), generator=torch.Generator().manual_seed(1))
    ids[1, :140] = ids[0, :140]
    layers = (1, len(source.spec.layers))
    with States(source.path, layers, 150, "cpu") as states:
        states.of(ids[:2], lambda done: None)
        found = states.of(ids, lambda done: None).float()
    wanted = hidden_states(source, ids, layers)
    apart = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert apart.median() < 0.02 and apart.quantile(0.8) < 0.04


def test_a_model_whose_weights_are_damaged_is_named(tiny_models: Any, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(tiny_models("llama"), path)
    weights = load_file(path / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"].fill_(1e38)
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    told = "model: hidden states cannot be taken: no token"
    with States(path, (2,), 20, "cpu") as states, pytest.raises(ToolkitError, match=told):
        states.of(torch.full((1, 20), 5), lambda done: None)


def test_rows_that_are_gone_on_with_are_as_among_all(trained: tuple[Path, Path]) -> None:
    spec, weights = read_head(trained[1], 4)
    w = {name: torch.from_numpy(widened(x)) for name, x in weights.items() if name != "d2t"}
    draw = torch.Generator().manual_seed(5)
    ids, taps = torch.randint(0, spec.vocab_size, (2, 24), generator=draw), torch.randn(2, 24, 192, generator=draw)
    all_rows, few = (Passes(spec, w, w["embed_tokens.weight"], ids, taps) for _ in range(2))
    rows = torch.arange(23)
    for kept in (slice(None), [0, 3, 4, 11, 17, 20], [1, 2, 5]):  # of those of the pass before
        rows = rows[kept]
        few.narrow(torch.arange(23)[kept])
        torch.testing.assert_close(few.next(), all_rows.next()[:, rows])


def test_the_manifest_has_the_curve(trained: tuple[Path, Path]) -> None:
    model, path = trained
    found = read_manifest(path)
    assert found is not None and found.kind == "draft" and found.parent["path"] == str(model)
    curve = found.quality["acceptance"]
    assert [curve[0]["step"], curve[-1]["step"]] == [0, FEW.steps]
    assert all(len(point["accepted"]) == len(point["best"]) == 3 for point in curve)
    assert curve[-1]["loss"] < curve[0]["loss"]
    assert (path / "acceptance.png").read_bytes()[1:4] == b"PNG"


def test_after_a_kill_it_is_the_same(
    trained: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = trained

    class Killed(BaseException):
        """As abrupt as a kill: nothing tidies up behind it but what a kill leaves, too."""

    def until(phase: str, at: int) -> Any:
        def progress(what: str, done: int, total: int) -> None:
            if what == phase and done >= at:
                raise Killed

        return progress

    monkeypatch.setattr(train, "KEEP_SECONDS", 0.0)
    for phase, at in (("writing text", 300), ("taking hidden states", 300), ("training", 2), ("training", 5)):
        with pytest.raises(Killed):
            run.draft(str(model), tmp_path / "head", FEW, progress=until(phase, at))
        assert not (tmp_path / "head").exists()
    told: list[str] = []
    seen: list[int] = []
    progress = lambda what, done, total: seen.append(done) if what == "training" else None  # noqa: E731
    run.draft(str(model), tmp_path / "head", FEW, notice=told.append, progress=progress)
    assert told == ["going on where an earlier run was"] and seen[0] == 5
    first, again = (load_file(p / "model.safetensors") for p in (path, tmp_path / "head"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name]), name
    assert read_manifest(path).quality == read_manifest(tmp_path / "head").quality  # type: ignore[union-attr]


def test_heads_that_cannot_be(trained: tuple[Path, Path], tmp_path: Path) -> None:
    model, path = trained
    with pytest.raises(ToolkitError, match=r"fc.weight: expected \[64, 64\], found \[64, 192\]"):
        read_head(_changed(path, tmp_path / "a", eagle_aux_hidden_state_layer_ids=[1]), 4)
    config = json.loads((path / "config.json").read_text())
    inner = config["transformer_layer_config"]
    with pytest.raises(ToolkitError, match="num_hidden_layers: expected 1, found 2"):
        read_head_spec(_changed(path, tmp_path / "b", transformer_layer_config=inner | {"num_hidden_layers": 2}))
    with pytest.raises(ToolkitError, match=r"model_type: expected llama or qwen3, found \['llama'\]"):
        read_head_spec(_changed(path, tmp_path / "e", transformer_layer_config=inner | {"model_type": ["llama"]}))
    with pytest.raises(ToolkitError, match="speculators_model_type: expected eagle3, found 'dflash'"):
        read_head_spec(_changed(path, tmp_path / "c", speculators_model_type="dflash"))
    with pytest.raises(ToolkitError, match="expected an EAGLE-3 head"):
        read_head_spec(model)
    tensors = load_file(path / "model.safetensors")
    other = _changed(path, tmp_path / "d")
    save_file({n: t for n, t in tensors.items() if n != "fc.weight"}, other / "model.safetensors")
    with pytest.raises(ToolkitError, match=r"expected a tensor fc.weight \[64, 192\], found none"):
        read_head(other, 4)
    save_file(tensors | {"d2t": tensors["d2t"] + 10_000}, other / "model.safetensors")
    with pytest.raises(ToolkitError, match="tensor d2t: expected ids below"):
        read_head(other, 4)


def test_the_authors_own_form(trained: tuple[Path, Path], tmp_path: Path) -> None:
    _, path = trained
    config, tensors = json.loads((path / "config.json").read_text()), load_file(path / "model.safetensors")
    flat = config["transformer_layer_config"] | {"draft_vocab_size": 200, "architectures": ["LlamaForCausalLMEagle3"]}
    other = tmp_path / "flat"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(flat))
    names = {n: n.replace("layers.0.", "midlayer.") for n in tensors if n not in ("embed_tokens.weight", "t2d")}
    save_file({new: tensors[old] for old, new in names.items()}, other / "model.safetensors")
    spec, found = read_head(other, 4)
    assert spec == replace(read_head_spec(path), layers=(), norm_before_residual=False)
    assert (
        all(np.array_equal(widened(found[n]), tensors[n].float()) for n in found if n != "d2t")
        and "embed_tokens.weight" not in found
    )


def test_wrong_options(trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, path = trained
    for flags, told in (
        (["--steps", "0"], "--steps: expected 1 or more, found 0"),
        (["--tokens", "9"], "--tokens"),
        (["--seed", str(1 << 70)], f"--seed: expected 0 to 2147483647, found {1 << 70}"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["lite", "draft", str(model), "--work-dir", str(tmp_path / "x"), *flags])
        assert ended.value.code == 2 and told in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:  # a head is no model
        main(["lite", "draft", str(path), "--work-dir", str(tmp_path / "x")])
    assert ended.value.code == 1 and not (tmp_path / "x").exists()


def _changed(path: Path, to: Path, **fields: Any) -> Path:
    to.mkdir()
    config = json.loads((path / "config.json").read_text()) | fields
    (to / "config.json").write_text(json.dumps(config))
    (to / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    return to
