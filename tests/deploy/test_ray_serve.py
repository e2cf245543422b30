"""``tool deploy --to ray`` and ``kuberay``: what Ray Serve is told is what ``tool serve ray`` would tell it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from toolkit.configs.engine import TurbomindEngineConfig
from toolkit.convert.convert import convert
from toolkit.convert.options import Packing
from toolkit.deploy.deploy import deploy
from toolkit.deploy.options import Deployment
from toolkit.deploy.ray_serve import OWN_MIB, VERSION
from toolkit.errors import ToolkitError
from toolkit.serve.ray.plan import Plan

ROOT = Path(__file__).parents[2]
ASKED = Deployment(session_len=128, max_batch_size=3, server_port=8123, replicas=2, cpus=2, quant_policy=8)


@pytest.fixture(scope="module")
def engine(tiny_models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packed") / "tiny"
    convert(str(tiny_models("llama")), path, Packing(target="cpu", dtype="float32", head_bits=16), quiet=True)
    return path


def planned(config: dict[str, Any]) -> Plan:
    """What a cluster makes of a file. Raises where anything is not as ``tool serve ray`` writes it."""
    (application,) = config["applications"]
    plan = Plan.of_json(application["args"])
    written = json.loads(plan.config_file())
    written["applications"][0]["args"] = application["args"]  # without defaults there
    assert written == config
    return plan


def test_serve_deploy_gets_the_plan_of_the_server(engine: Path, tmp_path: Path) -> None:
    done = deploy(str(engine), tmp_path / "out", to="ray", asked=ASKED)
    plan = planned(yaml.safe_load((tmp_path / "out/serve.yaml").read_text()))
    (model,) = plan.models
    assert (model.name, model.model) == ("tiny", str(engine))
    config = model.engine
    assert isinstance(config, TurbomindEngineConfig)
    assert (config.session_len, config.max_batch_size, config.threads, int(config.quant_policy)) == (128, 3, 2, 8)
    assert config.cache_max_entry_count == done.memory.blocks
    settings = plan.settings
    assert (settings.bounds, settings.cpus, settings.gpus, settings.server_port) == ((2, 2), 2, 0, 8123)
    model.check_files()
    shutil.copytree(engine, tmp_path / "tiny")
    deploy(str(tmp_path / "tiny"), tmp_path / "other", to="ray", asked=ASKED)
    (other,) = planned(yaml.safe_load((tmp_path / "other/serve.yaml").read_text())).models
    other.check_files()
    with (tmp_path / "tiny/config.json").open("a") as file:
        file.write("\n")
    with pytest.raises(ToolkitError, match="fingerprint"):
        other.check_files()


def test_kuberay_gets_a_pod_a_replica(engine: Path, tmp_path: Path) -> None:
    done = deploy(str(engine), tmp_path / "out", to="kuberay", asked=ASKED)
    service = yaml.safe_load((tmp_path / "out/service.yaml").read_text())
    plan = planned(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert plan.models[0].model == "/model"
    cluster = service["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    assert cluster["authOptions"] == {"mode": "token"} and cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"] == 2
    assert float(group["rayStartParams"]["num-cpus"]) == plan.settings.cpus  # so that a pod has room for one
    for pod in (cluster["headGroupSpec"]["template"]["spec"], group["template"]["spec"]):
        (container,) = pod["containers"]
        assert container["image"] == "toolkit:cpu-ray"
        assert container["envFrom"] == [{"secretRef": {"name": "toolkit-keys"}}]
        assert {"name": "serve", "containerPort": 8123} in container["ports"]
        assert container["volumeMounts"] == [{"name": "model", "mountPath": "/model", "readOnly": True}]
        assert pod["securityContext"]["runAsUser"] == 10001
    memory = int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"].removesuffix("Mi"))
    assert memory == (done.memory.host >> 20) + OWN_MIB
    assert cluster["rayVersion"] == VERSION
    assert f"=={VERSION}" in (ROOT / "deploy/docker/ray.Dockerfile").read_text()


def test_a_gpu_is_asked_for(tiny_models: Any, tmp_path: Path) -> None:
    deploy(str(tiny_models("llama")), tmp_path / "out", to="kuberay")
    service = yaml.safe_load((tmp_path / "out/service.yaml").read_text())
    plan = planned(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert plan.settings.gpus == 1
    assert "threads" not in plan.models[0].config and "cache_max_entry_count" not in plan.models[0].config
    (group,) = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["image"] == "toolkit:cuda-ray" and container["resources"]["limits"]["nvidia.com/gpu"] == 1
    head = service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert "nvidia.com/gpu" not in head["resources"]["limits"]
