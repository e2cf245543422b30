"""The one table of LMDeploy's options: complete, true, and what the page for its users says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import typer

import toolkit
from toolkit import ChatTemplateConfig, GenerationConfig, PytorchEngineConfig, TurbomindEngineConfig, VisionConfig
from toolkit.commands.app.aliases import ALIASES
from toolkit.commands.main import _explain, _load, normalise
from toolkit.configs.engine import CommonEngineConfig
from toolkit.configs.lmdeploy import OPTIONS, PLACES, of, stepped_over
from toolkit.configs.option import spelled
from toolkit.errors import UsageError

ROOT = Path(__file__).parents[1]
THEIRS = json.loads((ROOT / "tests/lmdeploy_interface.json").read_text())  # read from LMDeploy's sources, tag by tag
CONFIGS = {"TurbomindEngineConfig": TurbomindEngineConfig, "PytorchEngineConfig": PytorchEngineConfig}
KINDS: tuple[Any, ...] = (*CONFIGS.values(), GenerationConfig, VisionConfig, ChatTemplateConfig)


def command(place: str) -> Any:
    """Typer's command of ``tool PLACE``."""
    first, *rest = place.split()
    found = _load(first)
    for name in rest:
        found = found.get_command(None, name)
    return found


@pytest.mark.parametrize("kind", [TurbomindEngineConfig, PytorchEngineConfig, VisionConfig, GenerationConfig])
def test_every_field_of_theirs_is_one_here(kind: Any) -> None:
    assert set(THEIRS["fields"][kind.__name__]) <= {f.name for f in dataclasses.fields(kind)}


@pytest.mark.parametrize("place", CONFIGS)
def test_the_table_has_every_field(place: str) -> None:
    assert set(THEIRS["fields"][place]) <= set(PLACES[place])
    here = {f.name: f.default for f in dataclasses.fields(CONFIGS[place])}
    for name in PLACES[place]:
        option = of(place, name)
        assert option.fate == "works" or option.default == here[name], name


@pytest.mark.parametrize("place", THEIRS["flags"])
def test_every_flag_of_theirs_is_taken_or_refused_with_its_reason(place: str) -> None:
    known = {name for p in command(place).params for name in (*p.opts, *p.secondary_opts)}
    names = tuple(place.split())
    for flag in THEIRS["flags"][place]:
        name = flag.removeprefix("--").replace("-", "_")
        assert name in PLACES[place] or f"{name}_" in PLACES[place], flag
        assert ALIASES.get(names, {}).get(flag, flag) in known, flag


def test_all_names_are_somewhere() -> None:
    assert {name for names in PLACES.values() for name in names} == set(OPTIONS)
    assert all(option.why for option in OPTIONS.values() if option.fate != "works")


@pytest.mark.parametrize("place", CONFIGS)
def test_what_the_table_says_of_a_field_is_so(place: str) -> None:
    """Of a refused one any other value is; of one that is stepped over the values that there are not are."""
    config = CONFIGS[place]
    for name in PLACES[place]:
        option = of(place, name)
        if option.fate == "refused":
            with pytest.raises(UsageError, match=f"^{name}: found .*(, expected .*|; leave it out): "):
                config(**{name: "other"})
        if option.fate == "notice":
            with pytest.raises(UsageError, match=f"^{name}: expected "):
                config(**{name: "x" * 5})


@pytest.mark.parametrize(
    ("config", "given"),
    [
        (PytorchEngineConfig, {"migration_backend": "x"}),
        (PytorchEngineConfig, {"logprobs_mode": "logits"}),
        (TurbomindEngineConfig, {"cache_chunk_size": True}),
        (TurbomindEngineConfig, {"eager_mode": 1}),
        (PytorchEngineConfig, {"enable_mp_engine": "no"}),
        (PytorchEngineConfig, {"custom_module_map": {"LlamaForCausalLM": "my.module.Llama"}}),
    ],
)
def test_wrong_values_are_told_by_the_field_s_name(config: Any, given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(UsageError, match=f"^{name}: .*expected"):
        config(**given)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_unknown_fields_are_one_line_that_helps(kind: Any) -> None:
    first = next(f.name for f in dataclasses.fields(kind))
    with pytest.raises(UsageError, match=rf"^{first}s: {kind.__name__} has no such field; did you mean {first}\?"):
        kind(**{first + "s": 1})
    with pytest.raises(UsageError, match=rf"^xyzzy: {kind.__name__} has no such field; it has "):
        kind(xyzzy=1)


@pytest.mark.parametrize(
    ("config", "name", "hint"),
    [
        (TurbomindEngineConfig, "block_size", "did you mean cache_block_seq_len?"),
        (TurbomindEngineConfig, "device_type", "did you mean device?"),
        (PytorchEngineConfig, "device", "did you mean device_type?"),
        (TurbomindEngineConfig, "prefill_interval", "it is a field of PytorchEngineConfig"),
        (PytorchEngineConfig, "communicator", "it is a field of TurbomindEngineConfig"),
    ],
)
def test_a_field_of_the_other_config_is_told(config: Any, name: str, hint: str) -> None:
    with pytest.raises(UsageError) as told:
        config(**{name: 1})
    assert str(told.value).endswith(hint)


def test_signatures_stay() -> None:
    import inspect

    assert "session_len" in inspect.signature(TurbomindEngineConfig).parameters
    assert TurbomindEngineConfig("bfloat16").dtype == "bfloat16"
    assert dataclasses.replace(PytorchEngineConfig(), block_size=32).block_size == 32


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--device-type", "--device"),
        ("--block-size", "--cache-block-seq-len"),
        ("--logprob-mode", "--logprobs-mode"),
        ("--attn-tp", "--attn-tp-size"),
    ],
)
def test_flags_are_guessed_from_the_table(typed: str, meant: str) -> None:
    with pytest.raises(Exception, match=typed) as told:
        command("serve api_server").main(["M", typed, "1"], standalone_mode=False)
    assert f"did you mean {meant}?" in _explain(told.value)[0]


@pytest.mark.parametrize("place", ["chat", "serve proxy", "lite calibrate", "convert"])
def test_flags_that_are_stepped_over_say_so(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    """All that are taken without effect at once: a line each; then each that is refused alone."""
    from toolkit.commands.options import with_lmdeploy_flags

    app, ran = typer.Typer(), []

    @app.command()
    @with_lmdeploy_flags("" if place == "chat" else place)
    def run() -> None:
        ran.append(1)

    found = stepped_over("" if place == "chat" else place)
    args = []
    for name, option in found.items():
        if option.fate == "notice":
            other = next((v for v in option.values if not isinstance(v, type) and v != option.default), None)
            text = [] if isinstance(option.default, bool) else [str(other or "7")]
            args += [spelled(name), *text]
    app(args=normalise(args)[0], standalone_mode=False)
    said = capsys.readouterr().err.splitlines()
    assert ran and len(said) == sum(option.fate == "notice" for option in found.values())
    for name, option in found.items():
        if option.fate == "refused":
            with pytest.raises(UsageError, match=f"^{spelled(name)}: found "):
                app(args=[spelled(name), *([] if isinstance(option.default, bool) else ["7"])], standalone_mode=False)
            if not isinstance(option.default, bool):
                app(args=[spelled(name), str(option.default)], standalone_mode=False)


def test_wrong_values_of_flags_are_told_by_the_flag_s_name() -> None:
    for args in (["--migration-backend", "x"], ["--cache-chunk-size", "many"], ["--role", "Reader"]):
        with pytest.raises(UsageError, match=f"^{args[0]}: "):
            command("chat").main(["demo", *args, "-p", "x"], standalone_mode=False)


@pytest.mark.parametrize(
    ("config", "flags"),
    [
        ({"load_format": "int4", "model_format": "awq"}, ["--load-format", "int4", "--model-format", "awq"]),
        ({"device_type": "ascend"}, ["--backend", "pytorch", "--device", "ascend"]),
    ],
)
def test_errors_have_the_names_of_who_asked(config: dict[str, Any], flags: list[str], tiny_models: Any) -> None:
    """Python's in Python, the flag's on the command line."""
    model = str(tiny_models("llama"))
    asked, typed = [*config][-1], [flag for flag in flags if flag.startswith("--")][-1]
    with pytest.raises(UsageError, match=f"^{asked}: "):
        toolkit.pipeline(model, backend_config=PytorchEngineConfig(**config))
    with pytest.raises(UsageError, match=f"^{typed}: "):
        command("chat").main([model, *flags, "-p", "x"], standalone_mode=False)


def test_a_device_of_lmdeploy_s_is_known_by_its_plugin() -> None:
    from toolkit.runners.tensor.devices.find import find_device

    with pytest.raises(UsageError, match=r"^device: .*'ascend'.*torch's npu, which torch_npu brings"):
        find_device("ascend")


def test_an_engine_in_a_process_of_its_own(tiny_models: Any) -> None:
    import multiprocessing

    import psutil

    config = PytorchEngineConfig(enable_mp_engine=True, session_len=64, dtype="float32")
    before = {child.pid for child in psutil.Process().children()} | {c.pid for c in multiprocessing.active_children()}
    with toolkit.pipeline(str(tiny_models("llama")), backend_config=config) as pipe:
        assert pipe("the fox", gen_config=GenerationConfig(max_new_tokens=3, ignore_eos=True)).generate_token_len == 3
        assert pipe.engine._loop.__class__.__name__ == "ProcessLoop"
        assert {child.pid for child in psutil.Process().children()} - before


def test_families_may_be_named_in_a_dict(tmp_path: Path) -> None:
    config = PytorchEngineConfig(custom_module_map={"LouderForCausalLM": str(tmp_path / "own.py")})
    assert config.family_files == [str(tmp_path / "own.py")]


def test_the_page_is_made_of_the_table(script: Any) -> None:
    made = script("site/lmdeploy_tables.py")
    text = made.PAGE.read_text(encoding="utf-8")
    assert text == made.page(text), "run: python scripts/site/lmdeploy_tables.py"
    assert [name for name in OPTIONS if name.rstrip("_") not in text and spelled(name) not in text] == []


def test_common_fields_are_flags() -> None:
    assert {f.name for f in dataclasses.fields(CommonEngineConfig)} <= {p.name for p in command("chat").params} | {
        "enable_metrics",
        "memory_share",  # what --memory of several models becomes
    }
