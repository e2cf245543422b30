"""LMDeploy's path of the check whether a model can be read."""

from __future__ import annotations

from toolkit.artifacts.checkpoint import open_checkpoint
from toolkit.artifacts.json_file import read_json_object
from toolkit.artifacts.source import resolve_model
from toolkit.models.registry import build, load_spec
from toolkit.models.spec import DecoderSpec


def check_model(model_path: str, trust_remote_code: bool = False, device_type: str = "auto") -> DecoderSpec:
    """What the config of the model at ``model_path`` means; of a directory config.json alone is read.

    ``model_path`` is what ``pipeline`` takes. The other two are LMDeploy's and change nothing: a model's own code is
    never run, and a config means the same on every device. Raises ToolkitError or UsageError, one line, for a config
    that cannot be parsed.
    """
    path = resolve_model(model_path)
    if path.is_dir():
        file = path / "config.json"
        return build(read_json_object(file), str(file))[0]
    return load_spec(open_checkpoint(path))[0]
