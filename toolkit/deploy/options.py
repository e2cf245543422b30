"""What a deployment is told: flags of ``tool deploy``, and what Python callers pass."""

from __future__ import annotations

import re

from toolkit.base.lazy_dataclass import dataclass
from toolkit.configs.option import check_ranges, option, read_size
from toolkit.errors import UsageError

DEVICES = ("auto", "cpu", "cuda")
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,51}[a-z0-9])?")  # a name of Kubernetes that a suffix may follow
_NO_TEXT = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))  # to who reads YAML


@dataclass(frozen=True)
class Deployment:
    """How an artifact is to be run elsewhere. Sizes that are None are chosen from the model's own."""

    name: str | None = option(None, "Of the service, and of the model to its clients. Default: as DIR is called.")
    server_port: int = option(23333, "Port that clients ask.", min=1, max=65535)
    image: str | None = option(None, "Container image. Default: ours, or the one that the engine's makers publish.")
    device: str = option("auto", "auto (as DIR was packed), cpu or cuda.")
    cpus: int = option(4, "Cores of a replica.", min=1)
    memory: str | None = option(
        None, "What a replica may take, such as 8GiB. Default: what the plan below needs for these requests."
    )
    session_len: int | None = option(
        None, "Tokens of a request, prompt and answer together. Default: the model's, 8192 at most.", min=1
    )
    max_batch_size: int | None = option(None, "Requests at a time. Default: 8, or what --memory holds.", min=1)
    quant_policy: int = option(
        0, "KV cache of our server: 0 (as --dtype), 8 bits, 4 (keys 6), 44 (4, keys too); on GPUs 16, 17 (float8) too."
    )
    replicas: int = option(1, "How many run (k8s, kuberay, ray, dynamo).", min=1)
    secret: str = option("toolkit-keys", "Secret of Kubernetes whose TOOLKIT_API_KEYS are the clients' keys.")
    claim: str = option("toolkit-model", "Volume claim of Kubernetes on which the model lies.")

    def check(self) -> None:
        """Raise UsageError for the first value that cannot be."""
        check_ranges(self)
        if self.device not in DEVICES:
            raise UsageError(f"device: expected one of {', '.join(DEVICES)}, found {self.device!r}")
        for field in ("name", "secret", "claim"):
            value = getattr(self, field)
            if value is not None and not _NAME.fullmatch(value):
                told = "lower-case letters, digits and dashes, a letter first, 53 at most"
                raise UsageError(f"{field}: expected {told}, found {value!r:.80}")
            if value in _NO_TEXT:
                raise UsageError(f"{field}: {value} is no text in YAML, which the files are in; choose another name")
        if self.image is not None and not re.fullmatch(r"[A-Za-z0-9][\w.:/@-]*", self.image):
            raise UsageError(f"image: expected the name of an image, found {self.image!r:.80}")
        _ = self.memory_bytes

    @property
    def memory_bytes(self) -> int | None:
        return None if self.memory is None else read_size("memory", self.memory)


def name_of(stem: str) -> str:
    """A directory's name as a service can have it."""
    plain = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")[:52].strip("-")
    fits = _NAME.fullmatch(plain) and plain not in _NO_TEXT
    return plain if fits else f"model-{plain}"[:52].strip("-")
