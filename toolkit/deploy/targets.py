"""Where an artifact can go, as data: what each place reads, how its server is started, and which files are written."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass

OURS = ("engine", "hf", "awq", "gptq", "gptq_v2", "auto_round", "compressed-tensors", "modelopt", "bitsandbytes",
        "mlx", "w8a8", "fp8", "mxfp4", "trellis", "gguf")  # fmt: skip


@dataclass(frozen=True)
class Target:
    """``reads``: weight formats, as `tool convert --to` calls them. ``files``: name to write → template; "{name}" is
    the service's. ``next``: the command that starts it, {out} being the directory, {absolute} its whole path.

    Of another engine ``image``; ``on_gpu``: what stands behind its name where a GPU computes; ``program``: what has to
    be installed; ``command``: its words, in which {model}, {name}, {port}, {length} and {batch} stand for the
    deployment's, {context} for length × batch. ``eyes``: the option of the file that a GGUF file's model sees with.
    ``key``: the environment variable of the clients' key; ``key_option``:
    where the engine takes it as an option alone.
    ``package``: of Python, what has to be installed where ``program`` is Python itself.
    ``python``: whether its image has that. ``tag``: of our image, behind the device's.
    """

    reads: tuple[str, ...]
    files: dict[str, str]
    next: str
    image: str = ""
    on_gpu: str = ""
    program: str = ""
    package: str = ""
    command: tuple[str, ...] = ()
    eyes: str = ""
    key: str = "TOOLKIT_API_KEYS"
    key_option: str = ""
    python: bool = True
    tag: str = ""


_PEER = {"run.sh": "run.sh", "compose.yaml": "peer-compose.yaml"}
_COMPOSE = "docker compose -f {out}/compose.yaml up -d"
# What vLLM, SGLang and LMDeploy load is what their registries of quantization methods name; llama.cpp loads GGUF.
_VLLM = ("hf", "awq", "gptq", "gptq_v2", "auto_round", "compressed-tensors", "modelopt", "bitsandbytes", "fp8", "mxfp4")

TARGETS: dict[str, Target] = {
    "docker": Target(OURS, {"Dockerfile": "Dockerfile", "run.sh": "docker-run.sh"}, "bash {out}/run.sh"),
    "compose": Target(OURS, {"compose.yaml": "compose.yaml"}, _COMPOSE),
    "k8s": Target(OURS, {"server.yaml": "k8s.yaml"}, "kubectl apply -f {out}/server.yaml"),
    "kuberay": Target(OURS, {"service.yaml": "kuberay.yaml"}, "kubectl apply -f {out}/service.yaml", tag="-ray"),
    "ray": Target(OURS, {"serve.yaml": "serve.yaml"}, "serve deploy {out}/serve.yaml"),
    "systemd": Target(OURS, {"{name}.service": "systemd.service"}, "systemctl enable --now {absolute}/{name}.service"),
    "vllm": Target(
        _VLLM, _PEER, "bash {out}/run.sh", image="vllm/vllm-openai:latest", program="vllm", key="VLLM_API_KEY",
        command=("vllm", "serve", "{model}", "--served-model-name", "{name}", "--host", "0.0.0.0", "--port", "{port}",
                 "--max-model-len", "{length}", "--max-num-seqs", "{batch}"),
    ),
    "sglang": Target(
        tuple(name for name in _VLLM if name != "gptq_v2"), _PEER, "bash {out}/run.sh",
        image="lmsysorg/sglang:latest", program="python3", package="sglang",
        key="SGLANG_API_KEY", key_option="--api-key",
        command=("python3", "-m", "sglang.launch_server", "--model-path", "{model}", "--served-model-name", "{name}",
                 "--host", "0.0.0.0", "--port", "{port}", "--context-length", "{length}",
                 "--max-running-requests", "{batch}"),
    ),
    "lmdeploy": Target(
        ("hf", "awq", "gptq", "compressed-tensors", "w8a8", "fp8", "mxfp4"), _PEER, "bash {out}/run.sh",
        image="openmmlab/lmdeploy:latest", program="lmdeploy", key="LMDEPLOY_API_KEY", key_option="--api-keys",
        command=("lmdeploy", "serve", "api_server", "{model}", "--model-name", "{name}", "--server-name", "0.0.0.0",
                 "--server-port", "{port}", "--session-len", "{length}", "--max-batch-size", "{batch}"),
    ),
    "llama.cpp": Target(
        ("gguf",), _PEER, "bash {out}/run.sh", image="ghcr.io/ggml-org/llama.cpp:server", on_gpu="-cuda",
        program="llama-server", eyes="--mmproj", key="LLAMA_API_KEY", python=False,
        command=("llama-server", "--model", "{model}", "--alias", "{name}", "--host", "0.0.0.0", "--port", "{port}",
                 "--ctx-size", "{context}", "--parallel", "{batch}", "--metrics"),
    ),
    "dynamo": Target(
        _VLLM, {"graph.yaml": "dynamo.yaml"}, "kubectl apply -f {out}/graph.yaml",
        image="nvcr.io/nvidia/ai-dynamo/vllm-runtime:1.3.1",
    ),
}  # fmt: skip

# Options that these places alone have a use for.
OPTIONS = {
    "replicas": ("k8s", "kuberay", "ray", "dynamo"),
    "secret": ("k8s", "kuberay", "dynamo"),
    "claim": ("k8s", "kuberay", "dynamo"),
    "quant_policy": tuple(to for to, target in TARGETS.items() if target.reads is OURS),
    "image": tuple(to for to in TARGETS if to not in ("ray", "systemd")),
    "server_port": tuple(to for to in TARGETS if to != "dynamo"),
    "device": tuple(to for to in TARGETS if to != "dynamo"),
}
# Where a place does not read a format: the one to convert to, if the place reads that, else "hf".
TURNED = {
    "gptq_v2": "gptq",
    "auto_round": "gptq",
    "gptq": "awq",
    "compressed-tensors": "awq",
    "w8a8": "compressed-tensors",
}
