"""The files in deploy/ against the command that they start."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

from toolkit.commands.serve import app

DEPLOY = Path(__file__).parents[2] / "deploy"
GPU_POD = "kubernetes/server-gpu.yaml"
FILES = [
    "compose.yaml",
    "compose.gpu.yaml",
    "kubernetes/server.yaml",
    GPU_POD,
    "helm/toolkit/templates/deployment.yaml",
]


@pytest.mark.parametrize("name", [*FILES, "docker/cpu.Dockerfile", "docker/cuda.Dockerfile"])
def test_options_are_the_server_s(name: str) -> None:
    import typer

    command = typer.main.get_command(app).commands["api_server"]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    lines = re.findall(r".*serve.*|.*--server-name.*|.*--grace-period.*|.*--log-format.*", (DEPLOY / name).read_text())
    used = set(re.findall(r"(--[a-z-]+)[\"=]", "\n".join(line for line in lines if "FROM" not in line)))
    assert "--server-name" in used and used <= known


def test_kubernetes_gives_requests_the_time_to_end() -> None:
    deployment = next(yaml.safe_load_all((DEPLOY / "kubernetes/server.yaml").read_text()))
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    grace = int(container["args"][container["args"].index("--grace-period") + 1])
    assert pod["terminationGracePeriodSeconds"] > grace + container["lifecycle"]["preStop"]["sleep"]["seconds"] + 2


def test_a_pod_on_a_gpu_fetches_its_model_into_a_claim_by_a_token() -> None:
    claim, deployment, service = yaml.safe_load_all((DEPLOY / GPU_POD).read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {"name": "toolkit-hub", "optional": True} in [source["secretRef"] for source in container["envFrom"]]
    named = {v["name"]: v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v}
    home = next(m["name"] for m in container["volumeMounts"] if m["mountPath"] == "/home/toolkit/.cache")
    assert named[home] == claim["metadata"]["name"] and claim["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
    assert deployment["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
    grace = int(container["args"][container["args"].index("--grace-period") + 1])
    assert pod["terminationGracePeriodSeconds"] > grace + container["lifecycle"]["preStop"]["sleep"]["seconds"] + 2


def test_volumes_belong_to_the_image_s_user() -> None:
    """A new volume takes its owner from the folder of the image that it is mounted on, if there is one."""
    server = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]["server"]
    mounted = {volume.rpartition(":")[2] for volume in server["volumes"]}
    for name in ("cuda", "cpu"):
        text = (DEPLOY / f"docker/{name}.Dockerfile").read_text()
        owned = re.findall(r"install --directory --owner=toolkit --group=toolkit (.*)", text)[0].split()
        assert mounted <= set(owned) and text.index("useradd") < text.index("install --directory") < text.index(
            "\nUSER "
        )
    assert "HF_TOKEN" in server["environment"]


def test_compose_mounts_files_that_are_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert all((DEPLOY / path).exists() for path in mounted if path.startswith("./")) and len(mounted) == 4
    assert (DEPLOY / services["server"]["build"]["dockerfile"].removeprefix("deploy/")).exists()


def test_compose_sets_keys_only_where_the_user_has() -> None:
    """An empty list of keys is refused by the server."""
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
    assert server["environment"] == ["TOOLKIT_API_KEYS"]


def test_what_is_baked_is_there_and_every_image_has_its_tags() -> None:
    text = (DEPLOY / "docker-bake.hcl").read_text()
    targets = dict(re.findall(r'^target "(\w+)" \{\n(.*?)^\}', text, re.MULTILINE | re.DOTALL))
    assert set(re.findall(r'"(\w+)"', text.split("targets =")[1].split("\n")[0])) == set(targets)
    for body in targets.values():
        (file,) = re.findall(r'dockerfile = "(.*)"', body)
        dockerfile = (DEPLOY.parent / file).read_text()
        given = {name for args in re.findall(r"args = \{(.*)\}", body) for name in re.findall(r"(\w+) =", args)}
        assert given <= set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
        tags = re.findall(r'"\$\{REGISTRY\}:([^"]*)"', body)
        assert any("${VERSION}" in tag for tag in tags) and any("${VERSION}" not in tag for tag in tags)
    assert '"${REGISTRY}:latest"' in targets["cu13"] and '"${REGISTRY}:latest-cu12"' in targets["cu12"]


@pytest.mark.parametrize("name", ["InternVL", "Qwen2VL"])
def test_images_for_models_that_see_have_what_seeing_needs(name: str) -> None:
    needed = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vision"]
    (line,) = re.findall(r"^RUN pip install (.*)", (DEPLOY / f"docker/{name}_Dockerfile").read_text(), re.MULTILINE)
    assert re.findall(r'"(.*?)"', line) == [one for one in needed if not one.startswith("toolkit")]  # it is there


def test_cuda_versions_are_stages() -> None:
    dockerfile = (DEPLOY / "docker/cuda.Dockerfile").read_text()
    default = re.findall(r"^ARG CUDA_VERSION=(\w+)", dockerfile, re.MULTILINE)[0]
    assert (
        {"cu12", "cu13"} == set(re.findall(r"^FROM nvidia/\S+ AS (\w+)", dockerfile, re.MULTILINE)) > {default} - {""}
    )
    compose = yaml.safe_load((DEPLOY / "compose.gpu.yaml").read_text())["services"]["server"]
    assert compose["build"]["args"]["CUDA_VERSION"] == f"${{CUDA_VERSION:-{default}}}"
    (device,) = compose["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]} and compose["ipc"] == "host"


@pytest.mark.parametrize("name", ["host-path", "shared"])
def test_volumes_hold_the_claim_that_the_server_mounts(name: str) -> None:
    volume, claim = yaml.safe_load_all((DEPLOY / f"kubernetes/volumes/{name}.yaml").read_text())
    pod = next(yaml.safe_load_all((DEPLOY / "kubernetes/server.yaml").read_text()))["spec"]["template"]["spec"]
    wanted = next(v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if v["name"] == "model")
    chart = yaml.safe_load((DEPLOY / "helm/toolkit/values.yaml").read_text())
    assert claim["metadata"]["name"] == wanted == chart["model"]["claim"] == volume["spec"]["claimRef"]["name"]
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadOnlyMany"]
