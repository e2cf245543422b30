"""Layers for multi-token prediction, and EAGLE heads: guesses are those of the layer as it is defined, and change no
answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.drafts.assistant import is_assistant
from toolkit.artifacts.drafts.dflash import is_dflash
from toolkit.artifacts.engine.files import open_engine
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.configs.speculative import Speculation
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.engine.core import EngineCore
from toolkit.engine.drafts.draft import Guess
from toolkit.engine.load.drafts.assistant import open_assistant_model
from toolkit.engine.load.drafts.dflash import open_dflash_model
from toolkit.engine.load.drafts.eagle import open_eagle_layer
from toolkit.engine.load.drafts.mtp import open_mtp_layer
from toolkit.engine.options import EngineOptions
from toolkit.engine.request import EngineRequest, SamplingParams
from toolkit.engine.sequence import Sequence
from toolkit.errors import ToolkitError, UsageError
from toolkit.models.drafts.mtp import COPIES
from toolkit.parallel.choose import open_ranks
from toolkit.parallel.layout import Layout
from toolkit.parallel.model import Model
from toolkit.runners.base import RunnerOptions
from toolkit.runners.choose import open_runner
from toolkit.runners.native import library
from toolkit.runners.native.runner import NativeRunner
from toolkit.runners.step import StepBatch

pytestmark = pytest.mark.skipif(library.available() is not None, reason="the native library is not here")
FAMILIES = ("deepseek_v3", "glm4_moe", "qwen3_next", "qwen3_5_text", "qwen2")
PROMPTS = [list(range(9, 9 + n)) for n in (1, 5, 40, 100)]
BLOCKS = 60
Made = list[tuple[list[int], list[int]]]


@pytest.fixture(scope="module")
def mtp(support: Any) -> Any:
    return support("mtp")


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: Any, mtp: Any, tiny_models: Any, tmp_path_factory: Any) -> tuple[Path, Path]:
    """A checkpoint whose layer is random, and one whose layer is right."""
    plain, base = tiny_models(request.param, **mtp.CONFIGS[request.param]), tmp_path_factory.mktemp("mtp")
    return mtp.add_mtp(plain, base / "random"), mtp.add_mtp(plain, base / "right", right=True)


def answers_of(
    path: Path,
    guess: bool | Path,
    made: Made | None = None,
    backend: Any = "turbomind",
    ranks: int = 1,
    turns: int = 1,
    **options: Any,
) -> tuple[dict[str, list[int]], int]:
    """What requests are answered, and of guesses how many tokens came true. ``guess``: by the model's layer, an EAGLE
    head or an assistant; ``made``: gets texts and guesses."""
    runner: Any
    if ranks > 1:
        how = RunnerOptions(dtype="float32", threads=ranks, device="cpu")
        runner, _ = open_ranks(Model(str(path), how, {}), Layout(tp=ranks), backend)
    else:
        how = RunnerOptions(dtype="float32", threads=1, quant_policy=options.pop("quant_policy", 0))
        runner, _ = open_runner(path, backend=backend, options=how)
    config = TurbomindEngineConfig(speculative_algorithm="mtp" if guess is True else None)
    layer = open_mtp_layer(path, config, runner, ()) if guess is True else None
    if isinstance(guess, Path):
        kinds = {
            is_assistant: open_assistant_model,
            is_dflash: lambda path, runner: open_dflash_model(path, runner, None),
        }
        layer = next((kinds[is_one] for is_one in kinds if is_one(guess)), open_eagle_layer)(guess, runner)
    runner.load_weights()
    groups = len(runner.spec.cache_groups)
    blocks, layer_blocks = (options.pop("blocks", BLOCKS),) * groups, options.pop("layer_blocks", BLOCKS)
    runner.allocate_cache(blocks)
    words = {"session_len": 300, "max_batch_size": 4, "max_prefill_token_num": 64, "num_blocks": blocks} | options
    limits = EngineOptions(**words, speculation=Speculation(most=5, always=True, shared="off") if guess else None)
    drafts = []
    if layer is not None:
        layer.blocks = (layer_blocks,) * len(layer.head.groups)
        drafts.append(layer.load(type("Plan", (), words)))  # type: ignore[arg-type]
    core = EngineCore(runner, limits, None, drafts=drafts)
    if drafts:
        core.speculator.drafts = list(drafts)  # type: ignore[union-attr]
        noted, propose = made if made is not None else [], drafts[0].propose

        def note(asked: Seq[tuple[Sequence, int]]) -> list[Guess]:
            found = propose(asked)
            noted.extend((s.tokens[: s.known].tolist(), g.tokens) for (s, _), g in zip(asked, found, strict=True))
            return found

        drafts[0].propose = note  # type: ignore[method-assign]
    found: dict[str, list[int]] = {}
    cached = 0
    for turn in range(turns):
        for i, prompt in enumerate(PROMPTS):
            core.add(EngineRequest(f"{i} {turn}", prompt, SamplingParams(40, temperature=0.7 * (i % 2), seed=i)))
        while core.has_work:
            for output in core.step():
                assert output.error is None
                found.setdefault(output.id, []).extend(output.token_ids)
                cached = max(cached, output.cached_tokens)
    assert turns == 1 or cached >= 64, "a prompt's beginning comes from the cache"
    core.check_integrity()
    accepted = 0 if not drafts else core.stats()["spec_accepted_tokens"]
    left = drafts and core.speculator.drafts  # type: ignore[union-attr]
    assert not drafts or left, "it failed"
    core.close()
    return found, accepted


@pytest.mark.parametrize("backend, chunk", [("turbomind", 9), ("turbomind", 64), ("pytorch", 9)])
def test_guesses_are_those_of_the_layer(
    models: tuple[Path, Path], backend: str, chunk: int, mtp: Any, tmp_path: Path
) -> None:
    """By transformers' own layer, behind the join as it is written down; whatever was guessed before came true."""
    made: Made = []
    answers, _ = answers_of(models[0], True, made, backend, max_prefill_token_num=chunk)
    assert answers == answers_of(models[0], False, None, backend)[0]
    oracle = mtp.Oracle(models[0], tmp_path)
    made = [one for one in made if one[1]]
    assert len(made) > 40
    tried = 0
    for tokens, guess in made[:: len(made) // 20]:
        for token, (right, margin) in zip(guess, oracle.guess(tokens, len(guess)), strict=True):
            if margin < 0.02:
                break
            assert token == right
            tried += 1
    assert tried > 12


def rows_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on how many rows steps of drafts read."""
    read: list[int] = []
    submit = NativeRunner.submit

    def note(self: NativeRunner, batch: StepBatch) -> Any:
        if batch.embeds is not None:
            read.append(len(batch.embeds))
        return submit(self, batch)

    monkeypatch.setattr(NativeRunner, "submit", note)
    return read


def test_a_prompt_is_read_in_parts(models: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as a whole, for which others would wait."""
    plain = answers_of(models[1], False)[0]
    read = rows_read(monkeypatch)
    answers, accepted = answers_of(models[1], True, max_prefill_token_num=24)
    assert answers == plain and accepted > 20
    assert max(read) <= 24 and sum(read) > 100


@pytest.mark.parametrize("options", [{"blocks": 5}, {"max_batch_size": 1}, {"layer_blocks": 2}, {"turns": 2}], ids=str)
@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
def test_answers_stay_what_they_are(models: tuple[Path, Path], backend: str, options: dict[str, Any]) -> None:
    plain = answers_of(models[1], False, None, backend, turns=options.get("turns", 1))[0]
    answers, accepted = answers_of(models[1], True, None, backend, **options)
    assert answers == plain
    assert accepted > 20 or "blocks" in options  # where states are kept no slot is free for a guess


def test_both_runners_guess_the_same(models: tuple[Path, Path]) -> None:
    made: dict[str, dict[tuple[int, ...], list[int]]] = {}
    for backend in ("turbomind", "pytorch"):
        noted: Made = []
        answers_of(models[0], True, noted, backend)
        made[backend] = {tuple(tokens): guess for tokens, guess in noted if guess}
    both = [(guess, made["pytorch"][text]) for text, guess in made["turbomind"].items() if text in made["pytorch"]]
    assert len(both) > 40
    assert sum(a[: len(b)] == b[: len(a)] for a, b in both) > 0.95 * len(both)  # equals are told apart by the last bit


@pytest.mark.skipif(sys.platform != "linux", reason="ranks meet in Linux's memory")
def test_ranks_give_the_bits_of_one_process(models: tuple[Path, Path], tmp_path: Path) -> None:
    """Of a layer in the model's files, in an artifact, and in one that is packed for ranks."""
    plain = answers_of(models[1], False)[0]
    answers, accepted = answers_of(models[1], True, ranks=2)
    assert answers == plain and accepted > 20
    convert(str(models[1]), tmp_path / "engine", quiet=True)
    plain = answers_of(tmp_path / "engine", False)[0]
    for name, packing in {"engine": Packing(), "cut": Packing(target="cpu", tp=2)}.items():
        convert(str(models[1]), tmp_path / name, packing, quiet=True)
        answers, accepted = answers_of(tmp_path / name, True, ranks=2)
        assert answers == plain and accepted > 20


@pytest.mark.parametrize("models", FAMILIES[:-1], indirect=True)  # llama.cpp drops MiMo's layer
def test_a_gguf_file_guesses_what_its_checkpoint_does(models: tuple[Path, Path], mtp: Any, tmp_path: Path) -> None:
    file, made = mtp.as_gguf(models[0], tmp_path / "m.gguf"), list[Made]()
    for path in (models[0], file):
        made.append([])
        assert answers_of(path, True, made[-1])[0] == answers_of(models[0], False)[0]
    assert made[1] == made[0] and any(guess for _, guess in made[0])
    assert open_engine(convert(str(file), tmp_path / "engine", quiet=True).path).mtp is not None


@pytest.mark.parametrize("models", FAMILIES[:-1], indirect=True)
def test_a_gguf_file_of_ours_has_the_layer_as_llama_cpp_writes_it(
    models: tuple[Path, Path], mtp: Any, tmp_path: Path
) -> None:
    import gguf

    from toolkit.convert.formats import rewrite

    rewrite(str(models[0]), tmp_path / "ours.gguf", to="gguf", gguf_type="f32", quiet=True)
    ours, theirs = (gguf.GGUFReader(f) for f in (tmp_path / "ours.gguf", mtp.as_gguf(models[0], tmp_path / "m.gguf")))
    arch = str(ours.fields["general.architecture"].contents())
    for key in (f"{arch}.block_count", f"{arch}.nextn_predict_layers"):
        assert ours.fields[key].contents() == theirs.fields[key].contents()
    mine, its = ({t.name: t.data for t in reader.tensors} for reader in (ours, theirs))
    its = {name: data for name, data in its.items() if not name.split(".", 2)[-1].startswith(COPIES)}
    assert mine.keys() == its.keys()
    for name, data in its.items():
        assert np.array_equal(mine[name].ravel(), data.ravel()), name


def test_a_right_layer_guesses_right_from_an_artifact(models: tuple[Path, Path], tmp_path: Path) -> None:
    from toolkit import pipeline
    from toolkit.messages import GenerationConfig

    convert(str(models[1]), tmp_path / "engine", quiet=True)
    assert open_engine(tmp_path / "engine").mtp is not None
    for target in ("cpu", "torch", "cuda-sm80"):
        path = convert(str(models[1]), tmp_path / target, Packing(target=target), quiet=True).path
        for backend in ("turbomind", "pytorch"):
            plain = answers_of(path, False, None, backend)[0]
            answers, accepted = answers_of(path, True, None, backend)
            assert answers == plain and accepted > 20
    config = GenerationConfig(max_new_tokens=40, ignore_eos=True, do_sample=False)
    found = {}
    for name, fields in {
        "off": {"speculative": "off"},
        "auto": {},
        "mtp": {"speculative_algorithm": "mtp"},
        "NEXTN": {"speculative_algorithm": "NEXTN"},
    }.items():
        with pipeline(str(tmp_path / "engine"), backend_config=TurbomindEngineConfig(session_len=128, **fields)) as p:
            found[name] = p("Once upon a time", gen_config=config).text
            rows = [row[0] for row in p.engine.plan.rows]
            assert ("MTP layer" in rows) == (name != "off")
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("backend", [TurbomindEngineConfig, PytorchEngineConfig])
def test_it_guesses_again_after_sleep(models: tuple[Path, Path], backend: Any) -> None:
    from toolkit import pipeline
    from toolkit.messages import GenerationConfig

    config = GenerationConfig(max_new_tokens=20, ignore_eos=True, do_sample=False)
    fields = {"speculative_algorithm": "mtp", "session_len": 128}
    with pipeline(str(models[1]), backend_config=backend(**fields)) as p:
        before = p("Once", gen_config=config).text
        p.engine.weights.sleep()
        p.engine.weights.wake()
        assert p("Once", gen_config=config).text == before
        core = p.engine._loop._core
        core.speculator.options = replace(core.speculator.options, always=True)
        core.speculator.drafts = [d for d in core.speculator.drafts if d.name == "mtp"]
        assert p("Once", gen_config=config).text == before
        assert p.engine.stats()["spec_by_method"]["mtp"]["accepted"] > 0


@pytest.mark.parametrize("backend", [TurbomindEngineConfig, PytorchEngineConfig])
def test_it_guesses_by_the_head_of_new_weights(models: tuple[Path, Path], backend: Any) -> None:
    from toolkit import pipeline
    from toolkit.messages import GenerationConfig

    config = GenerationConfig(max_new_tokens=20, ignore_eos=True, do_sample=False)
    fields = {"speculative_algorithm": "mtp", "session_len": 128}
    tensors = load_file(models[1] / "model.safetensors")
    with pipeline(str(models[1]), backend_config=backend(**fields)) as p:
        before = p("Once", gen_config=config).text
        p.update_weights(tensors | {"lm_head.weight": tensors["lm_head.weight"].roll(7, 0)})
        core = p.engine._loop._core
        core.speculator.options = replace(core.speculator.options, always=True)
        core.speculator.drafts = [d for d in core.speculator.drafts if d.name == "mtp"]
        assert p("Once", gen_config=config).text != before
        counts = p.engine.stats()["spec_by_method"]["mtp"]
        assert counts["accepted"] > 0.8 * counts["tokens"] > 0


def test_wrong_layers_are_told_in_a_line(
    models: tuple[Path, Path], tmp_path: Path, tiny_models: Any, caplog: Any
) -> None:
    from toolkit import pipeline

    def opened(path: Path, config: Any = TurbomindEngineConfig, **fields: Any) -> None:
        pipeline(str(path), backend_config=config(session_len=64, **fields)).close()

    def changed(name: str, make: Any) -> Path:
        target = tmp_path / name
        target.mkdir()
        for file in models[0].iterdir():
            (target / file.name).write_bytes(file.read_bytes())
        tensors = load_file(models[0] / "model.safetensors")
        save_file(make(tensors), target / "model.safetensors", {"format": "pt"})
        return target

    names = open_checkpoint(models[0]).names()
    join = next(name for name in names if name.endswith(("eh_proj.weight", "mtp.fc.weight", "input_proj.weight")))
    state = next(
        name for name in names if name.endswith(("hnorm.weight", "norm_hidden.weight", "hidden_layernorm.weight"))
    )
    lacks = changed("lacks", lambda found: {name: x for name, x in found.items() if name != state})
    wide = changed("wide", lambda found: found | {join: found[join][:, 1:].contiguous()})
    for path, why in ((lacks, f"tensor {state} is missing"), (wide, f"tensor {join}: expected shape")):
        with pytest.raises(ToolkitError, match=f"speculative_algorithm: mtp: .*{why}"):
            opened(path, speculative_algorithm="mtp")
        caplog.clear()
        opened(path)
        assert why in caplog.text
        assert open_engine(convert(str(path), tmp_path / f"engine-{path.name}", quiet=True).path).mtp is None
    with pytest.raises(UsageError, match=r"mtp: .* has no layer for multi-token prediction"):
        opened(tiny_models("llama"), speculative_algorithm="mtp")
    opened(models[0], PytorchEngineConfig, speculative_algorithm="mtp")
    with pytest.raises(UsageError, match=r"speculative_draft_model: .* is no assistant, as mtp expects"):
        opened(tiny_models("llama"), speculative_algorithm="mtp", speculative_draft_model=str(models[0]))
    with pytest.raises(UsageError, match="ngram takes none"):
        TurbomindEngineConfig(speculative_algorithm="ngram", speculative_draft_model="x")


@pytest.mark.parametrize("backend", ["turbomind", "pytorch"])
@pytest.mark.parametrize("form, bias", [("authors", False), ("authors", True), ("speculators", True)])
def test_eagle_heads_guess_what_they_are_defined_to(
    form: str, bias: bool, backend: str, mtp: Any, tiny_models: Any, tmp_path: Path
) -> None:
    """By transformers' layer without its first norm; the two forms are spelled otherwise, and guess the same."""
    model = tiny_models("llama")
    heads = {name: mtp.write_eagle(model, tmp_path / name, form=name, bias=bias) for name in {"authors", form}}
    made: Made = []
    answers, _ = answers_of(model, heads[form], made, backend)
    assert answers == answers_of(model, False, None, backend)[0]
    made = [one for one in made if one[1]]
    tried = 0
    for tokens, guess in made[:: max(1, len(made) // 12)]:
        for token, (right, margin) in zip(
            guess, mtp.eagle_guess(model, heads["authors"], tokens, len(guess)), strict=True
        ):
            if margin < 0.02:
                break
            assert token == right
            tried += 1
    assert tried > 8


def test_a_right_eagle_head_guesses_right(mtp: Any, tiny_models: Any, tmp_path: Path) -> None:
    model = mtp.alone(tiny_models("llama"), tmp_path / "model")
    head = mtp.write_eagle(model, tmp_path / "head", right=True)
    plain = answers_of(model, False)[0]
    for ranks in (1, 2):
        answers, accepted = answers_of(model, head, ranks=ranks)
        assert answers == plain and accepted > 20


def test_eagle_heads_of_other_models_are_refused(mtp: Any, tiny_models: Any, tmp_path: Path) -> None:
    from toolkit import pipeline

    model = tiny_models("llama")
    made = {form: mtp.write_eagle(model, tmp_path / form, form=form) for form in ("authors", "speculators")}

    def opened(path: Path, config: Any = TurbomindEngineConfig, on: Path = model, **fields: Any) -> None:
        fields = {"speculative_algorithm": "eagle", "speculative_draft_model": str(path)} | fields
        pipeline(str(on), backend_config=config(session_len=64, **fields)).close()

    opened(made["authors"])
    opened(made["speculators"], speculative_algorithm=None)
    with pytest.raises(UsageError, match=r"is of a model of width 64 and 320 tokens, the model has 96 and 320"):
        opened(made["authors"], on=tiny_models("llama", hidden_size=96))
    opened(made["authors"], PytorchEngineConfig)
    with pytest.raises(UsageError, match="runs with ranks of the native runner alone"):
        opened(made["authors"], PytorchEngineConfig, tp=2)
    packed = convert(str(model), tmp_path / "packed", Packing(target="cpu", tp=2), quiet=True).path
    opened(made["authors"], on=packed, tp=2)
    with pytest.raises(UsageError, match="runs with tp at most; leave it out, or pp, dp and ep"):
        opened(made["authors"], PytorchEngineConfig, pp=2)
    with pytest.raises(ToolkitError, match=r"expected an EAGLE head with a tensor fc.weight or fusion_fc.weight"):
        opened(model)
    with pytest.raises(UsageError, match="is a head, no model; use eagle"):
        opened(made["speculators"], speculative_algorithm="draft_model")
    with pytest.raises(ToolkitError, match="speculators_model_type: expected eagle3, found 'eagle'"):
        opened(made["speculators"], speculative_algorithm="eagle3")
    tensors = load_file(made["authors"] / "model.safetensors")
    save_file({name: x for name, x in tensors.items() if "o_proj" not in name}, made["authors"] / "model.safetensors")
    with pytest.raises(ToolkitError, match=r"layers.0.self_attn.o_proj.weight is missing"):
        opened(made["authors"])
    with pytest.raises(UsageError, match="eagle needs speculative_draft_model"):
        TurbomindEngineConfig(speculative_algorithm="eagle")
