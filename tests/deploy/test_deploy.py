"""``tool deploy``: files that other tools accept, sized by the server's own plan; refusals that say the way."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from toolkit.artifacts.manifest import read_manifest
from toolkit.commands.serve import app
from toolkit.configs.engine import PytorchEngineConfig
from toolkit.convert.convert import convert
from toolkit.convert.formats import rewrite
from toolkit.convert.options import Packing
from toolkit.deploy.deploy import deploy
from toolkit.deploy.facts import PROCESSES
from toolkit.deploy.options import Deployment, name_of
from toolkit.deploy.targets import TARGETS, TURNED
from toolkit.engine.load.memory_plan import SAFE_SHARE
from toolkit.engine.load.setup import Setup
from toolkit.engine.load.share_out import share_out
from toolkit.errors import ToolkitError, UsageError
from toolkit.runners.base import Backend, RunnerOptions
from toolkit.runners.choose import open_runner

SECRET = "a-key-that-nobody-may-read"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def engine(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "Tiny_Engine"
    convert(str(tiny_models("llama")), path, Packing(target="cpu", dtype="float32", head_bits=16), quiet=True)
    return path


@pytest.fixture(scope="module")
def models(engine: Path, tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One a format."""
    folder, dense = tmp_path_factory.mktemp("formats"), tiny_models("llama")
    found = {"engine": engine, "hf": dense}
    for form in ("w8a8", "fp8"):
        found[form] = rewrite(str(dense), folder / form, to=form, quiet=True).path
    found["gguf"] = rewrite(str(dense), folder / "m.gguf", to="gguf", gguf_type="q8_0", quiet=True).path
    found["compressed-tensors"] = rewrite(str(found["w8a8"]), folder / "ct", to="compressed-tensors", quiet=True).path
    return found


@pytest.fixture
def tool(support: Any) -> Callable[..., subprocess.CompletedProcess[str]]:
    return lambda *given: support("command").tool("deploy", *given, TOOLKIT_API_KEYS=SECRET)


def read(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def taken(words: list[str]) -> dict[str, Any]:
    """What the server's command line makes of ``words``. Raises where it takes one of them not."""
    assert words[:2] == ["serve", "api_server"]
    command = typer.main.get_command(app).commands["api_server"]  # type: ignore[attr-defined]
    return dict(command.make_context("api_server", list(words[2:])).params)


@pytest.mark.parametrize("to", ["docker", "compose", "k8s", "systemd"])
def test_our_server_is_started_with_the_sizes_of_its_plan(to: str, engine: Path, tmp_path: Path, tool: Any) -> None:
    flags = ["--session-len", 128, "--max-batch-size", 3, "--server-port", 8123, "--quant-policy", 8]
    done = tool(engine, "--to", to, "--dst-path", tmp_path / "out", *flags, "--json", "-")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    texts = {name: (tmp_path / "out" / name).read_text() for name in made["files"]}
    assert not any(SECRET in text for text in texts.values())
    if to == "k8s":
        pod = read(tmp_path / "out/server.yaml")[0]["spec"]["template"]["spec"]
        (container,) = pod["containers"]
        words, memory = container["args"], int(container["resources"]["limits"]["memory"].removesuffix("Mi"))
        assert container["envFrom"] == [{"secretRef": {"name": "toolkit-keys"}}]
        assert pod["securityContext"]["runAsUser"] == 10001
    elif to == "compose":
        server = read(tmp_path / "out/compose.yaml")[0]["services"]["server"]
        words, memory = server["command"], int(server["deploy"]["resources"]["limits"]["memory"].removesuffix("M"))
        assert server["environment"] == ["TOOLKIT_API_KEYS"] and server["user"] == "10001"
        assert server["volumes"][0]["source"] == str(engine) and "8123/health" in server["healthcheck"]["test"][-1]
    elif to == "docker":
        command = shlex.split(texts["run.sh"].partition("exec ")[2].replace("\\\n", " "))
        words = command[command.index("serve") : -1]
        memory = int(command[command.index("--memory") + 1].removesuffix("m"))
        assert command[command.index("--user") + 1] == "10001"
        assert (
            "8123/health" in shlex.split(command[command.index("--health-cmd") + 1])[-1]
        )  # the image's looks at 23333
        assert json.loads(re.findall(r"^CMD (.*)", texts["Dockerfile"], re.M)[0]) == words
    else:
        (line,) = re.findall(r"^ExecStart=(.*)", texts["tiny-engine.service"], re.M)
        command = shlex.split(line)
        words = command[1 : command.index("--api-key-file")]
        assert command[len(words) + 2] == "${CREDENTIALS_DIRECTORY}/keys"  # systemd 247 has it, but no specifier
        memory = int(re.findall(r"^MemoryMax=(\d+)M", texts["tiny-engine.service"], re.M)[0])
    options = taken(words)
    assert (options["server_port"], options["session_len"], options["max_batch_size"]) == (8123, 128, 3)
    assert options["model_name"] == "tiny-engine" and int(options["quant_policy"]) == 8
    assert int(options["cache_max_entry_count"]) * 64 >= 3 * 128
    assert memory << 20 == made["memory_bytes"]


def test_memory_is_what_the_server_plans(engine: Path, tmp_path: Path) -> None:
    """More requests, longer ones, and more bits of the cache want more; what a limit leaves decides the rest."""
    few = deploy(str(engine), tmp_path / "a", to="k8s", asked=Deployment(session_len=64, max_batch_size=1)).memory
    many = deploy(str(engine), tmp_path / "b", to="k8s", asked=Deployment(session_len=64, max_batch_size=50)).memory
    assert many.plan.num_blocks[0] == 50 * few.plan.num_blocks[0] and many.host >= few.host
    assert many.host >= many.plan.total / SAFE_SHARE + PROCESSES
    given = deploy(str(engine), tmp_path / "c", to="k8s", asked=Deployment(memory="1GiB")).memory
    assert given.host == 1 << 30 and given.plan.free == (1 << 30) - PROCESSES
    with pytest.raises(ToolkitError, match=r"^--memory: the server's processes alone take 768 MiB, found 700MiB"):
        deploy(str(engine), tmp_path / "d", to="k8s", asked=Deployment(memory="700MiB"))
    with pytest.raises(ToolkitError, match="max_batch_size 100000: its logits and activations take"):
        deploy(str(engine), tmp_path / "d", to="k8s", asked=Deployment(memory="800MiB", max_batch_size=100000))
    assert not (tmp_path / "d").exists()


def test_a_gpu_s_memory_depends_on_no_processor(
    models: dict[str, Path], tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers are as the checkpoint has them, and quantized weights stay packed, whatever is best on this machine."""
    monkeypatch.setattr("toolkit.runners.tensor.devices.find.bf16_is_native", lambda: False)
    sizes = {}
    for name, model in {
        "full": models["hf"],
        "half": tiny_models("llama", dtype="bfloat16"),
        "q8_0": models["gguf"],
    }.items():
        memory = deploy(str(model), tmp_path / name, to="vllm" if name != "q8_0" else "docker").memory
        sizes[name] = dict(row[:2] for row in memory.plan.rows)
        assert memory.gpu == sum(sizes[name].values())
        assert "150 ms" not in (tmp_path / name / "run.sh").read_text()  # a GPU's steps have no such limit
    assert sizes["half"]["weights"] == pytest.approx(sizes["full"]["weights"] / 2, rel=0.01)  # norms are float32
    assert sizes["half"]["KV cache"] * 2 == sizes["full"]["KV cache"]
    assert sizes["q8_0"]["weights"] < sizes["half"]["weights"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pictures_have_their_memory(device: str, tiny_models: Any, tmp_path: Path) -> None:
    """Else the server would find no room for its blocks beside the tower, and not start."""
    model = tiny_models("qwen2_vl")
    asked = Deployment(session_len=64, max_batch_size=1, device=device)
    memory = deploy(str(model), tmp_path / "out", to="vllm", asked=asked).memory
    backend: Backend = "turbomind" if device == "cpu" else "pytorch"
    runner, _ = open_runner(model, backend=backend, options=RunnerOptions(device="cpu"))
    server = share_out(Setup(model, model, PytorchEngineConfig(session_len=64, max_batch_size=1), None), runner, None)
    rows, expected = (dict(row[:2] for row in plan.rows) for plan in (memory.plan, server))
    assert rows["tower"] == expected["tower"] > 0
    assert memory.plan.total == sum(rows.values())


def test_kubernetes_has_one_pod_in_two_files(engine: Path, tmp_path: Path) -> None:
    """The one that is written for an artifact differs from ``deploy/kubernetes`` in names and sizes alone."""
    asked = Deployment(name="toolkit", image="registry.example/toolkit:cpu")
    deploy(str(engine), tmp_path / "out", to="k8s", asked=asked)
    ours, service = read(tmp_path / "out/server.yaml")
    theirs, other = read(ROOT / "deploy/kubernetes/server.yaml")
    assert service == other
    for one in (ours, theirs):
        (container,) = one["spec"]["template"]["spec"]["containers"]
        container["args"] = [
            word for word in container["args"] if word in ("serve", "api_server", "--grace-period", "30")
        ]
        del container["resources"]
    assert ours == theirs


def test_compose_guards_its_server_alike_in_two_files(engine: Path, tmp_path: Path) -> None:
    deploy(str(engine), tmp_path / "out", to="compose")
    ours, theirs = (
        read(file)[0]["services"]["server"] for file in (tmp_path / "out/compose.yaml", ROOT / "deploy/compose.yaml")
    )
    for key in ("read_only", "tmpfs", "cap_drop", "security_opt", "restart", "environment", "ports"):
        assert ours[key] == theirs[key]


def test_a_gpu_s_server_has_a_place_for_what_it_compiles(models: dict[str, Path], tmp_path: Path) -> None:
    """Triton makes libraries. The root can only be read, and docker lets nothing run that it keeps in memory."""
    for to in ("docker", "compose", "systemd"):
        deploy(str(models["hf"]), tmp_path / to, to=to, asked=Deployment(name="tiny"))
    image = (ROOT / "deploy/docker/cuda.Dockerfile").read_text()
    assert " TRITON_CACHE_DIR=/home/toolkit/.cache/triton " in image
    assert " --tmpfs /home/toolkit/.cache:exec " in (tmp_path / "docker/run.sh").read_text()
    server = read(tmp_path / "compose/compose.yaml")[0]["services"]["server"]
    assert server["tmpfs"] == ["/tmp", "/home/toolkit/.cache:exec"]
    unit = (tmp_path / "systemd/tiny.service").read_text()
    assert '"TRITON_CACHE_DIR=%C/toolkit-tiny/triton"' in unit and "CacheDirectory=toolkit-tiny" in unit


@pytest.mark.parametrize("to", ["vllm", "sglang", "lmdeploy", "llama.cpp"])
def test_other_engines_get_a_script_and_a_container(to: str, models: dict[str, Path], tmp_path: Path) -> None:
    target = TARGETS[to]
    model = next(models[form] for form in ("compressed-tensors", "gguf") if form in target.reads)
    done = deploy(str(model), tmp_path / "out", to=to, asked=Deployment(session_len=100, max_batch_size=2, name="m"))
    script = tmp_path / "out/run.sh"
    assert script.stat().st_mode & 0o111 and subprocess.run(["bash", "-n", script]).returncode == 0
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / target.program).write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')  # the engine's program: shows its words
    (folder / target.program).chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", target.key: SECRET}
    said = subprocess.run(["bash", script, "--more"], capture_output=True, text=True, env=env, check=True).stdout
    words = said.splitlines()
    assert (
        str(model) in words
        and words[-1] == "--more"
        and words[words.index("--port" if to != "lmdeploy" else "--server-port") + 1] == "23333"
    )
    assert (SECRET in words) == bool(target.key_option)
    server = read(tmp_path / "out/compose.yaml")[0]["services"]["server"]
    inside = [word.replace(str(model), "/model/m.gguf" if model.suffix else "/model") for word in words]
    assert [w for w in server["command"] if w in inside] == [w for w in inside if w not in (SECRET, "--more")]
    assert "/health" in server["healthcheck"]["test"][-1]
    assert SECRET not in script.read_text() + (tmp_path / "out/compose.yaml").read_text()
    for folders in ("/nowhere", str(Path(sys.executable).parent)):  # a Python is there, not the engine
        lacks = subprocess.run(["/bin/bash", script], capture_output=True, text=True, env={"PATH": folders})
        name = target.package or target.program
        assert (lacks.returncode, lacks.stderr) == (
            1,
            f"{name}: not installed here; compose.yaml runs it in a container\n",
        )
    assert done.memory.plan.session_len == 100


def test_llama_cpp_on_a_gpu_has_its_makers_image_for_one(models: dict[str, Path], tmp_path: Path) -> None:
    for device, image in (("cpu", "llama.cpp:server"), ("cuda", "llama.cpp:server-cuda")):
        deploy(str(models["gguf"]), tmp_path / device, to="llama.cpp", asked=Deployment(device=device))
        server = read(tmp_path / device / "compose.yaml")[0]["services"]["server"]
        assert server["image"] == f"ghcr.io/ggml-org/{image}"
        assert ("reservations" in server["deploy"]["resources"]) == (device == "cuda")


def test_images_that_compute_on_gpus_alone_are_told_of(tiny_models: Any, tmp_path: Path) -> None:
    """llama.cpp's makers have one for each."""
    model = str(tiny_models("llama"))
    for name, asked in {
        "a": Deployment(device="cpu"),
        "b": Deployment(device="cpu", image="vllm:cpu"),
        "c": None,
    }.items():
        notes = deploy(model, tmp_path / name, to="vllm", asked=asked).notes
        told = [note for note in notes if note.startswith("vllm/vllm-openai:latest: ") and "--image" in note]
        assert len(told) == (name == "a")


@pytest.mark.parametrize("whole", [False, True])
def test_llama_cpp_is_told_what_the_model_sees_with(whole: bool, tiny_models: Any, tmp_path: Path) -> None:
    """It looks for no file beside the one that it is given, and answers as a blind model."""
    made = tmp_path / ("folder" if whole else "folder/see.gguf")
    made.parent.mkdir(exist_ok=True)
    rewrite(str(tiny_models("qwen2_vl")), made, to="gguf", gguf_type="q8_0", quiet=True)
    eyes = made / "mmproj.gguf" if whole else made.with_name("mmproj-see.gguf")
    deploy(str(made), tmp_path / "out", to="llama.cpp")
    outside = shlex.split((tmp_path / "out/run.sh").read_text().partition("exec ")[2].replace("\\\n", " "))
    assert outside[outside.index("--mmproj") + 1] == str(eyes) and eyes.is_file()
    inside = read(tmp_path / "out/compose.yaml")[0]["services"]["server"]["command"]
    assert inside[inside.index("--mmproj") + 1] == f"/model/{eyes.name}"


def test_dynamo_s_graph(models: dict[str, Path], tmp_path: Path) -> None:
    deploy(str(models["fp8"]), tmp_path / "out", to="dynamo", asked=Deployment(replicas=3, secret="hub"))
    (graph,) = read(tmp_path / "out/graph.yaml")
    front, worker = graph["spec"]["components"]
    assert (front["type"], worker["type"], worker["replicas"]) == ("frontend", "worker", 3)
    (container,) = worker["podTemplate"]["spec"]["containers"]
    assert container["name"] == "main" and container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["envFrom"] == [{"secretRef": {"name": "hub", "optional": True}}]
    spec = front["podTemplate"]["spec"]  # it has the tokenizer to read, by the path that workers tell it
    assert spec["volumes"] == worker["podTemplate"]["spec"]["volumes"]
    assert spec["containers"][0]["volumeMounts"] == container["volumeMounts"]


def test_a_format_that_is_not_read_there_says_which_is(models: dict[str, Path], tmp_path: Path) -> None:
    """And what it says is so: the conversion makes a model that can go there."""
    for form, to in (("w8a8", "vllm"), ("gguf", "sglang"), ("hf", "llama.cpp"), ("engine", "llama.cpp")):
        with pytest.raises(ToolkitError, match=r"reads .*`tool convert") as refused:
            deploy(str(models[form]), tmp_path / "out", to=to)
        source, best = re.findall(r"`tool convert (\S+) --to (\S+) --dst-path \S+`", str(refused.value))[0]
        made = tmp_path / f"{form}-for-{to}"
        rewrite(source, made, to=best, quiet=True)
        assert deploy(str(made), tmp_path / "out", to=to, overwrite=True).files
    for to, target in TARGETS.items():
        assert target.reads[0] in ("engine", "hf", "gguf"), f"{to}: a format that every model can be converted to"
    assert set(TURNED.values()) <= {"awq", "gptq", "compressed-tensors"}


def test_the_checkpoint_that_an_artifact_was_made_of_is_named_where_it_can_go_itself(
    models: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ToolkitError, match=f"not an engine artifact; deploy {models['hf']}, which it was made of$"):
        deploy(str(models["engine"]), tmp_path / "out", to="vllm")
    assert deploy(str(models["hf"]), tmp_path / "out", to="vllm").files


def test_a_device_that_an_artifact_is_not_packed_for(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ToolkitError, match=r"not packed for one.*`tool convert .* --target cpu --dst-path"):
        deploy(str(models["hf"]), tmp_path / "out", to="compose", asked=Deployment(device="cpu"))
    with pytest.raises(ToolkitError, match=f"packed for a CPU; deploy {models['hf']} instead"):
        deploy(str(models["engine"]), tmp_path / "out", to="compose", asked=Deployment(device="cuda"))
    made = deploy(str(models["hf"]), tmp_path / "out", to="k8s")
    (container,) = read(tmp_path / "out/server.yaml")[0]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "toolkit:cuda" and container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert made.memory.gpu == made.memory.plan.total


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--to", "nowhere"], "--to: expected one of docker, compose, k8s"),
        (["--to", "k8s", "--replicas", "1:3"], "Invalid value for '--replicas'"),
        (["--to", "k8s", "--replicas", "0"], "Invalid value for '--replicas'"),
        (["--to", "k8s", "--name", "A_b"], "--name: expected lower-case letters"),
        (["--to", "k8s", "--claim", "no"], "--claim: no is no text in YAML, which the files are in"),
        (["--to", "k8s", "--image", "a b"], "--image: expected the name of an image"),
        (["--to", "k8s", "--memory", "much"], "--memory: expected a size such as"),
        (["--to", "k8s", "--device", "tpu"], "--device: expected one of auto, cpu, cuda"),
        (["--to", "docker", "--replicas", "2"], "--replicas: docker has no use for it, k8s, kuberay, ray, dynamo have"),
        (["--to", "ray", "--claim", "mine"], "--claim: ray has no use for it, k8s, kuberay, dynamo have"),
        (["--to", "k8s", "--quant-policy", "auto"], "Invalid value for '--quant-policy'"),
        (
            ["--to", "k8s", "--quant-policy", "16"],
            "--quant-policy: turbomind's native runner does not run here: its KV",
        ),
        (
            ["--to", "lmdeploy", "--quant-policy", "8"],
            "--quant-policy: lmdeploy has no use for it, docker, compose, k8s",
        ),
        (["--to", "systemd", "--image", "a:b"], "--image: systemd has no use for it, docker, compose, k8s"),
        (["--to", "dynamo", "--server-port", "80"], "--server-port: dynamo has no use for it, docker"),
        (["--to", "dynamo", "--device", "cpu"], "--device: dynamo has no use for it, docker"),
    ],
)
def test_misuse(flags: list[str], message: str, engine: Path, tmp_path: Path, tool: Any) -> None:
    done = tool(engine, *flags, "--dst-path", tmp_path / "out")
    assert done.returncode == 2 and message in done.stderr and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("stem", "name"), [("Qwen3-0.6B", "qwen3-0-6b"), ("Yes", "model-yes"), ("7b", "model-7b")])
def test_a_directory_s_name_as_a_service_has_it(stem: str, name: str) -> None:
    assert name_of(stem) == name and yaml.safe_load(name) == name


def test_what_is_there_stays(engine: Path, tmp_path: Path, tool: Any) -> None:
    out = tmp_path / "out"
    assert tool(engine, "--to", "k8s", "--dst-path", out).returncode == 0
    manifest = read_manifest(out)
    assert manifest is not None and manifest.kind == "deployment" and manifest.parent["path"] == str(engine)
    assert "already there" in tool(engine, "--to", "k8s", "--dst-path", out).stdout
    assert "give --overwrite" in tool(engine, "--to", "compose", "--dst-path", out).stderr
    assert tool(engine, "--to", "compose", "--dst-path", out, "--overwrite").returncode == 0
    assert sorted(p.name for p in out.iterdir()) == ["compose.yaml", "manifest.json"]
    (out / "mine").touch()
    assert "never replaced" in tool(engine, "--to", "k8s", "--dst-path", out, "--overwrite").stderr
    with pytest.raises(UsageError, match="expected a model, found a deployment"):
        deploy(str(out), tmp_path / "other", to="k8s")


def test_a_model_that_was_moved_is_not_there_already(engine: Path, tmp_path: Path) -> None:
    """Its files mount where it was."""
    model, out = shutil.copytree(engine, tmp_path / "one" / "m"), tmp_path / "out"
    deploy(str(model), out, to="compose")
    model = model.rename(tmp_path / "m")
    with pytest.raises(UsageError, match="give --overwrite"):
        deploy(str(model), out, to="compose")
    deploy(str(model), out, to="compose", overwrite=True)
    assert f"{tmp_path}/m" in (out / "compose.yaml").read_text()
    assert deploy(str(model), out, to="compose").already_there


def test_paths_with_odd_characters(engine: Path, tmp_path: Path) -> None:
    """Spaces, quotes, dollars and per cents come through; what a mount cannot name is refused."""
    odd = tmp_path / "a b's $HOME 100%"
    shutil.copytree(engine, odd)
    for to in ("docker", "compose", "systemd"):
        made = deploy(str(odd), tmp_path / to, to=to)
        assert made.name == "a-b-s-home-100"
    command = shlex.split((tmp_path / "docker/run.sh").read_text().partition("exec ")[2].replace("\\\n", " "))
    assert f"type=bind,source={odd},target=/model,readonly" in command
    server = read(tmp_path / "compose/compose.yaml")[0]["services"]["server"]
    assert server["volumes"][0]["source"] == str(odd).replace("$", "$$")
    unit = (tmp_path / "systemd/a-b-s-home-100.service").read_text()
    assert str(odd).replace("$", "$$").replace("%", "%%") in unit
    with pytest.raises(UsageError, match="without ','"):
        bad = tmp_path / "a,b"
        shutil.copytree(engine, bad)
        deploy(str(bad), tmp_path / "none", to="docker")


def test_a_model_of_the_hub_s_cache_is_links_that_no_container_sees(models: dict[str, Path], tmp_path: Path) -> None:
    """It is called as on the hub, not by its commit, and runs where its files are."""
    folder = tmp_path / "models--acme--Tiny-1B"
    blobs, model = folder / "blobs", folder / "snapshots" / ("0" * 40)
    shutil.copytree(models["hf"], blobs)
    model.mkdir(parents=True)
    for file in blobs.iterdir():
        (model / file.name).symlink_to(f"../../blobs/{file.name}")
    for to in ("docker", "compose"):
        with pytest.raises(ToolkitError, match=r"is a link out of its folder, .*; `cp -rL \S+ COPY`, then deploy"):
            deploy(str(model), tmp_path / "out", to=to)
    for to, notes in (("vllm", 1), ("systemd", 0), ("k8s", 0)):
        made = deploy(str(model), tmp_path / to, to=to)
        assert made.name == "tiny-1b" and sum("is a link" in note for note in made.notes) == notes
    copy = shutil.copytree(model, tmp_path / "copy")
    assert deploy(str(copy), tmp_path / "out", to="docker").files


def test_a_unit_says_what_its_user_cannot_open(engine: Path, tmp_path: Path) -> None:
    """It is no user's home that others may not enter."""
    home = tmp_path / "home"
    model = shutil.copytree(engine, home / "engine")
    model.chmod(0o755)
    home.chmod(0o700)
    told = deploy(str(model), tmp_path / "out", to="systemd").notes
    assert any(note.startswith(f"{home}: ") and f"chmod o+rX {home}" in note for note in told)
    assert not any(str(home) in note for note in deploy(str(model), tmp_path / "other", to="compose").notes)


def test_a_unit_says_that_temporary_folders_are_hidden_from_it(
    tiny_models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PrivateTmp gives it empty ones."""
    model = tiny_models("llama")
    monkeypatch.setattr("toolkit.deploy.deploy.PRIVATE", (model.parent,))
    told = deploy(str(model), tmp_path / "out", to="systemd").notes
    assert any(note.startswith(f"{model}: the unit has a {model.parent} of its own") for note in told)
    monkeypatch.setattr("toolkit.deploy.deploy.PRIVATE", (tmp_path,))
    assert not any(" of its own, in which" in note for note in deploy(str(model), tmp_path / "b", to="systemd").notes)


@pytest.mark.parametrize("to", ["docker", "compose", "systemd", "vllm", "k8s"])
def test_weights_that_their_owner_alone_may_read(to: str, tiny_models: Any, tmp_path: Path) -> None:
    """As safetensors writes them: containers and units have other users. A claim of Kubernetes holds a copy."""
    model = shutil.copytree(tiny_models("llama"), tmp_path / "model")
    weights = model / "model.safetensors"
    for mode in (0o644, 0o600):
        weights.chmod(mode)
        notes = deploy(str(model), tmp_path / f"{mode}", to=to).notes
        told = [note for note in notes if note.startswith(f"{weights}: ")]
        assert len(told) == (mode == 0o600 and to != "k8s")
        assert all(f"chmod -R o+rX {model}`" in note for note in told)


@pytest.mark.parametrize("port", [443, 1024])
def test_a_unit_may_listen_at_its_port(port: int, tiny_models: Any, tmp_path: Path) -> None:
    """Below 1024 a user other than root needs a capability for it, and no other one."""
    deploy(str(tiny_models("llama")), tmp_path / "out", to="systemd", asked=Deployment(name="x", server_port=port))
    found = dict(
        re.findall(r"^(\w+Capabilities|CapabilityBoundingSet)=(.*)$", (tmp_path / "out/x.service").read_text(), re.M)
    )
    needed = "CAP_NET_BIND_SERVICE"
    low = {"AmbientCapabilities": needed, "CapabilityBoundingSet": needed}
    assert found == (low if port < 1024 else {"CapabilityBoundingSet": ""})


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_accepts_the_unit(engine: Path, tmp_path: Path) -> None:
    deploy(str(engine), tmp_path / "out", to="systemd")
    unit = tmp_path / "out/tiny-engine.service"
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    assert done.returncode == 0 and not [x for x in done.stderr.splitlines() if unit.name in x], done.stderr
    (probe,) = re.findall(r'^ExecStartPost="[^"]*" "-c" "(.*)"$', unit.read_text(), re.M)
    compile(probe.replace("\\n", "\n"), "probe", "exec")


def test_a_port_that_cannot_be() -> None:
    with pytest.raises(UsageError, match=r"^server_port: expected at most 65535, found 70000$"):
        Deployment(server_port=70000).check()
    with pytest.raises(UsageError, match=r"^server_port: expected at least 1, found 0$"):
        Deployment(server_port=0).check()
