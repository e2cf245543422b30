"""The files in deploy/ against the command that they start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from toolkit.commands.serve import app

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = ["compose.yaml", "kubernetes/server.yaml", "helm/toolkit/templates/deployment.yaml"]


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


def test_compose_mounts_files_that_are_there() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for service in services.values() for volume in service["volumes"]]
    assert all((DEPLOY / path).exists() for path in mounted if path.startswith("./")) and len(mounted) == 4
    assert (DEPLOY / services["server"]["build"]["dockerfile"].removeprefix("deploy/")).exists()


def test_compose_sets_keys_only_where_the_user_has() -> None:
    """An empty list of keys is refused by the server."""
    server = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["server"]
    assert server["environment"] == ["TOOLKIT_API_KEYS"]
