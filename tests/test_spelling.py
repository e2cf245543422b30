"""LMDeploy's spelling of the command line: what its users type works, or the answer says what to type."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from toolkit.commands import options
from toolkit.commands.app import aliases
from toolkit.commands.main import _load, main, normalise
from toolkit.configs.engine import PytorchEngineConfig, TurbomindEngineConfig
from toolkit.errors import ToolkitError, UsageError


@pytest.fixture
def tool(capsys: pytest.CaptureFixture[str]) -> Any:
    """``tool ARGS`` in this process -> exit code, standard output, standard error."""

    def run(*args: str) -> tuple[Any, str, str]:
        with pytest.raises(SystemExit) as left:
            main(list(args))
        return left.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize("command", ["", "chat", "serve", "serve api_server", "lite auto_awq", "list", "check_env"])
def test_h_is_help(tool: Any, command: str) -> None:
    long, short = (tool(*command.split(), flag) for flag in ("--help", "-h"))
    assert long == short and short[0] == 0 and "Usage: tool" in short[1]


@pytest.mark.parametrize(
    "command", ["lite auto-awq", "serve api-server", "serve api-client", "check-env", "list models"]
)
def test_commands_may_be_written_with_dashes(tool: Any, command: str) -> None:
    code, out, _ = tool(*command.split(), "-h")
    assert code == 0 and "Usage: tool" in out


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("chatt", "did you mean chat?"),
        ("check-enf", "did you mean check_env?"),
        ("lite auto-awk M", "did you mean auto_awq?"),
        ("lite awq M", "did you mean auto_awq?"),
        ("lite gptq M", "did you mean auto_gptq?"),
        ("lite round M", "did you mean auto_round?"),
        ("serve api_serve M", "did you mean api_server?"),
        ("serve demo", "a model is served by: tool serve api_server demo"),
        ("chat M --sesion-len 4", "did you mean --session-len?"),
        ("serve api_server M --cache_max_entry_cout 0.5", "did you mean --cache-max-entry-count?"),
    ],
)
def test_a_near_miss_is_answered_with_what_was_meant(tool: Any, typed: str, meant: str) -> None:
    code, out, err = tool(*typed.split())
    assert (code, out) == (2, "") and meant in err and err.count("\n") == 1


def test_what_is_like_nothing_gets_no_suggestion(tool: Any) -> None:
    for typed in (["xyzzy"], ["chat", "M", "--xyzzy"]):
        code, _, err = tool(*typed)
        assert code == 2 and "xyzzy" in err and "did you mean" not in err


@pytest.mark.parametrize(
    ("flag", "value"), [("--load-format", "int5"), ("--quant_policy", "3"), ("--temperature", "-1"), ("--dtype", "x")]
)
def test_what_is_refused_is_named_as_typed(tool: Any, tiny_models: Any, flag: str, value: str) -> None:
    code, _, err = tool("chat", str(tiny_models("llama")), flag, value, "--prompt", "a")
    assert code == 2 and f"tool: error: {flag.replace('_', '-')}: expected " in err


def test_what_fails_is_named_as_typed() -> None:
    """Also by an engine that is being opened: exit code 1, the option's name as on the command line."""
    app = typer.Typer()

    @app.command()
    @options.with_engine_flags
    def command(model: str, engine: options.EngineFlags) -> None:
        raise ToolkitError("kv_transfer_address: cannot listen there")

    with pytest.raises(ToolkitError, match=r"^--kv-transfer-address: cannot listen there$") as told:
        app(args=["MODEL"], standalone_mode=False)
    assert told.value.exit_code == 1


def engine_flags(*args: str) -> options.EngineFlags:
    """The flags of a command line ``tool x MODEL ARGS``."""
    found: list[options.EngineFlags] = []
    app = typer.Typer()

    @app.command()
    @options.with_engine_flags
    def command(model: str, engine: options.EngineFlags) -> None:
        found.append(engine)

    app(args=normalise(["MODEL", *args])[0], standalone_mode=False)
    return found[0]


def test_several_adapters_after_one_flag() -> None:
    for args in (["--adapters", "a=x", "b=y"], ["--adapters=a=x", "b=y"], ["--adapters", "a=x", "--adapters", "b=y"]):
        assert engine_flags(*args, "--tp", "1").config().adapters == {"a": "x", "b": "y"}
    assert normalise(["api_server", "--adapters", "a=x", "model"])[0][-1] == "model"
    assert normalise(["--work_dir", "a=b", "c=d"])[0] == ["--work-dir", "a=b", "c=d"]


@pytest.mark.parametrize(
    "args",
    [
        ["chat", "demo", "--adapters", "a=x", "-p", "solve x=3"],
        ["profile", "api_server", "--goodput", "ttft:500", "http://127.0.0.1:23333"],
        ["chat", "demo", "-p", "--- my_file.py ---"],
        ["chat", "demo", "--system", "--be_kind, always"],
    ],
)
def test_what_is_no_flag_and_none_of_several_stays_as_typed(args: list[str]) -> None:
    assert normalise(args)[0] == args


def test_eager_mode_reaches_either_config() -> None:
    for backend in ("turbomind", "pytorch"):
        assert engine_flags("--eager-mode", "--backend", backend).config().eager_mode


def test_overrides_reach_the_config() -> None:
    config = engine_flags("--hf-overrides", '{"rope_theta": 5000.0}', "--rope_scaling_factor", "2.5").config()
    assert isinstance(config, TurbomindEngineConfig)
    assert (config.hf_overrides, config.rope_scaling_factor) == ({"rope_theta": 5000.0}, 2.5)
    other = engine_flags("--backend", "pytorch", "--hf-overrides", '{"rope_theta": 5000.0}').config()
    assert isinstance(other, PytorchEngineConfig) and other.hf_overrides == {"rope_theta": 5000.0}
    with pytest.raises(UsageError, match="--rope-scaling-factor: only for --backend turbomind"):
        engine_flags("--backend", "pytorch", "--rope-scaling-factor", "2").config()
    assert engine_flags("--async", "0").config() == TurbomindEngineConfig(async_=0)
    for text in ("[]", "{", "5"):
        with pytest.raises(UsageError, match="--hf-overrides: expected a JSON object"):
            engine_flags("--hf-overrides", text).config()


def test_options_without_effect_are_taken_with_one_notice_each(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--cache-chunk-size", "4", "--communicator", "native", "--dp", "1"]
    assert engine_flags(*given).config() == engine_flags().config()
    said = capsys.readouterr().err.splitlines()
    assert sorted(line.partition(":")[0] for line in said) == [
        "--cache-chunk-size",
        "--communicator",
    ]
    assert engine_flags("--backend", "pytorch", "--trust-remote-code").config() == PytorchEngineConfig()
    assert "never run" in capsys.readouterr().err


@pytest.mark.parametrize(("flag", "value"), [("--cp", "2"), ("--dp-rank", "2")])
def test_options_that_ask_for_more_than_there_is_are_refused(flag: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{flag}: found '?{value}'?, expected "):
        engine_flags(flag, value)


@pytest.mark.parametrize("count", ["inf", "nan", "-1", "1.5"])
def test_counts_that_are_none_are_refused(count: str) -> None:
    with pytest.raises(UsageError, match="cache_max_entry_count: expected "):
        engine_flags("--cache-max-entry-count", count).config()


def test_ranks_are_of_either_backend() -> None:
    assert isinstance(engine_flags("--tp", "2").config(), TurbomindEngineConfig)
    assert isinstance(engine_flags("--tp", "2", "--backend", "pytorch").config(), PytorchEngineConfig)
    assert isinstance(engine_flags("--tp", "2", "--nnodes", "2").config(), TurbomindEngineConfig)
    for flag in ("--pp", "--dp"):
        assert isinstance(engine_flags(flag, "2").config(), PytorchEngineConfig)


def _options(path: tuple[str, ...]) -> set[str]:
    """All that a command takes."""
    command = _load(path[0])
    for name in path[1:]:
        command = command.get_command(typer.Context(command), name)
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("path", aliases.ALIASES, ids=" ".join)
def test_other_tools_words_mean_an_option_that_is_there_and_hide_none(path: tuple[str, ...]) -> None:
    there = _options(path)
    assert set(aliases.ALIASES[path].values()) <= there
    assert not set(aliases.ALIASES[path]) & there
    out, _ = normalise([*path, "MODEL", *(flag for flag in aliases.ALIASES[path])])
    assert out[len(path) + 1 :] == list(aliases.ALIASES[path].values())


def test_other_tools_words_do_what_they_mean(tool: Any, tiny_models: Any) -> None:
    model = str(tiny_models("llama"))
    words = ("--ctx-size", "128", "--n_predict", "3", "--temp=0", "--dtype", "float32")
    ours = ("--session-len", "128", "--max-new-tokens", "3", "--temperature", "0", "--dtype", "float32")
    one, other = (tool("run", model, "-p", "the fox", *words), tool("chat", model, "-p", "the fox", *ours))
    assert one[:2] == other[:2] and one[0] == 0 and "3 tokens" in one[2]


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("chat M --kv-cache-dtype fp8", "the KV cache's bits are --quant-policy"),
        ("serve api_server M --gpu_memory_utilization 0.9", "--cache-max-entry-count is the KV cache's share"),
        ("lite auto_awq M --host x", "the address to listen on is --server-name"),
        ("lite auto_awq M --max-model-len 8", "--session-len, of commands that run a model"),
        ("quantize M", "tool lite auto_awq MODEL quantizes"),
        ("serve my-model", "a model is served by: tool serve api_server my-model"),
    ],
)
def test_what_has_no_twin_is_answered_with_what_does_the_job(tool: Any, typed: str, told: str) -> None:
    code, out, err = tool(*typed.split())
    assert (code, out) == (2, "") and told in err and "did you mean" not in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ("chat M --session-le 8", "; did you mean --session-len?"),
        ("chat M --ctx-siz 8", "; did you mean --ctx-size, here --session-len?"),
        ("batch A B --model M --max-mode-len 8", "; did you mean --max-model-len, here --session-len?"),
        ("serve api_server M --hos x", "; did you mean --host, here --server-name?"),
        ("serve api_server M --gpu-memory-utilisation .9", "; did you mean --gpu-memory-utilization? --cache-max-"),
        ("lite auto_awq M --ctx_siz 8", "; did you mean --ctx-size? the longest context is --session-len"),
        ("quantise M", "; did you mean quantize? tool lite auto_awq MODEL quantizes"),
        ("rnu M", "; did you mean chat?"),
    ],
)
def test_slips_of_other_tools_words_are_understood_too(tool: Any, typed: str, told: str) -> None:
    code, out, err = tool(*typed.split())
    assert (code, out) == (2, "") and told in err and err.count("\n") == 1


def test_dashes_make_no_flags_alike(tool: Any) -> None:
    for flag in ("--zzz", "--qq"):
        assert "did you mean" not in tool("chat", "M", flag, "1")[2]
