"""Code of pages that is a piece of something larger: it fits what it is a piece of."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sys
import tomllib
import types
from pathlib import Path
from typing import Any, ClassVar

import pytest

from toolkit.models.config.fields import Fields
from toolkit.models.registry import GROUP

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def blocks(support: Any) -> Any:
    return support("examples").blocks


def test_the_family_that_is_shown_is_one(blocks: Any) -> None:
    from toolkit.models.registry import get

    names: dict[str, Any] = {}
    exec(blocks(DOCS / "add-a-model.md", "python")[0], names)
    family, ours = names["FAMILY"], get("seed_oss")
    assert (family.name, family.architectures) == (ours.name, ours.architectures)
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 128, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert family.build(Fields(dict(config))) == ours.build(Fields(dict(config)))


def test_the_kernel_that_is_shown_fits_its_op(blocks: Any) -> None:
    """Its file, its names, its signature and how it is registered."""
    code, _ = blocks(DOCS / "add-a-kernel.md", "python")
    from toolkit.kernels.reference.norm import rms_norm as op
    from toolkit.kernels.triton import launch
    from toolkit.kernels.triton.elementwise import norm

    assert (DOCS.parent / code.splitlines()[0].removeprefix("# ")).samefile(norm.__file__)
    (function,) = (node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef))
    assert [a.arg for a in function.args.args] == list(inspect.signature(op.reference).parameters)
    (register,) = (node for node in function.decorator_list if isinstance(node, ast.Call))
    inspect.signature(op.register).bind(
        *(ast.literal_eval(a) for a in register.args), **{str(k.arg): None for k in register.keywords}
    )
    needs = next(k.value for k in register.keywords if k.arg == "unsupported")
    assert isinstance(needs, ast.Call)
    launch.needs(**{str(k.arg): ast.literal_eval(k.value) for k in needs.keywords})
    assert hasattr(norm, "rms_norm_kernel") and "rms_norm_kernel" in code


def test_the_op_that_is_declared_is_one(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from toolkit.kernels import registry

    _, code = blocks(DOCS / "add-a-kernel.md", "python")
    monkeypatch.setattr(registry, "_OPS", {})  # nobody else is to meet it
    names: dict[str, Any] = {"__package__": "toolkit.kernels.reference"}
    exec(code, names)
    declared = names["softcap"]
    for case in declared.cases():
        given = case.make(torch.float32, torch.device("cpu"), torch.Generator().manual_seed(0))
        expected = given["cap"] * torch.tanh(given["x"] / given["cap"])
        torch.testing.assert_close(declared.reference(**given), expected)


def test_opencompass_is_told_what_it_understands(blocks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for OpenCompass, which is installed apart: fields of its models, and those of our engine."""

    class Stub(types.ModuleType):
        __path__: ClassVar[list[str]] = []

        def __getattr__(self, name: str) -> Any:
            return [{"abbr": name}]

    paths = ["mmengine", "mmengine.config", "opencompass", "opencompass.models", "opencompass.models.base"]
    code = blocks(DOCS / "how-to" / "opencompass.md", "python")
    for line in "\n".join(code).split():
        if line.startswith("opencompass.configs"):
            parts = line.split(".")
            paths += [".".join(parts[:n]) for n in range(3, len(parts) + 1)]
    for path in paths:
        monkeypatch.setitem(sys.modules, path, Stub(path))
    sys.modules["mmengine.config"].read_base = contextlib.nullcontext  # type: ignore[attr-defined]
    sys.modules["opencompass.models.base"].BaseModel = object  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "toolkit.opencompass", raising=False)
    shown: dict[str, Any] = {}
    for block in code:
        exec(block, shown)
    monkeypatch.delitem(sys.modules, "toolkit.opencompass", raising=False)
    from toolkit.configs.engine import TurbomindEngineConfig
    from toolkit.messages import GenerationConfig

    (model,) = shown["models"]
    theirs = {"type", "abbr", "max_out_len", "batch_size", "run_cfg"}  # OpenCompass's own
    inspect.signature(model["type"]).bind(**{k: v for k, v in model.items() if k not in theirs})
    TurbomindEngineConfig(**model["engine_config"])
    GenerationConfig(**model["gen_config"])
    for more, sampled in (({}, False), ({"do_sample": True, "top_k": 40}, True)):
        made = object.__new__(model["type"])
        made.gen_config, made.end_str = model["gen_config"] | {"top_p": 0.8} | more, None
        asked: list[GenerationConfig] = []
        made.pipe = lambda batch, config, asked=asked, **_: asked.append(config) or []
        made.generate(["a"])
        (config,) = asked
        assert config.do_sample is sampled and not config.without_effect(), "a warning for what the page shows"
        assert (config.top_p, config.top_k) == (
            (0.8, 40) if sampled else (GenerationConfig.top_p, GenerationConfig.top_k)
        )
    assert {part["role"] for part in shown["meta_template"]["round"]} == {"HUMAN", "BOT"}
    assert len(shown["datasets"]) == 8


def test_settings_that_are_shown_are_read(blocks: Any) -> None:
    (points,) = blocks(DOCS / "add-a-model.md", "toml")
    assert list(tomllib.loads(points)["project"]["entry-points"]) == [GROUP]
    (codex,) = blocks(DOCS / "other-apis.md", "toml")
    told = tomllib.loads(codex)
    assert told["model_provider"] in told["model_providers"]
