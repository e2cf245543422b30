"""What a model on disk is: its record, its lineage, and what its headers tell. Reads no weights."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from toolkit.artifacts.cache_cost import read_cost
from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.engine.artifact import EngineArtifact, rank_file
from toolkit.artifacts.engine.files import open_engine
from toolkit.artifacts.manifest import Manifest, check_files, hub_origin, read_manifest
from toolkit.artifacts.weight_files.find import PICKLED, gguf_parts
from toolkit.base.figures import rise, written
from toolkit.base.lazy_dataclass import dataclass
from toolkit.models.eyes.vision import VisionSpec
from toolkit.models.registry import language_fields

_LONGEST_LINEAGE = 64
GGUF = "model.gguf"  # of a directory that lite or convert has written so


@dataclass(frozen=True)
class Inspection:
    """``record``: the manifest's keys (None where a plain checkpoint has nothing to say). ``facts``: (label, text).
    ``lineage``: one text a step, this artifact first, its source last; where a step measured what it cost in quality, a
    second line says that. ``checked``: what is known of the files, None where nothing was recorded of them.
    ``checkpoint``: what was opened, None for an engine artifact.
    """

    record: dict[str, Any]
    facts: list[tuple[str, str]]
    lineage: list[str]
    checked: str | None = None
    checkpoint: Checkpoint | None = None


def inspect(path: Path, verify: bool = False) -> Inspection:
    """Describe a checkpoint directory, a GGUF file or an artifact of ours; headers are validated on the way.

    ``verify``: read every file and compare it with the digest that the manifest records. Raises ToolkitError, one line,
    for a broken artifact, a file that is missing or of another size, and for a wrong digest.
    """
    manifest = read_manifest(path) if path.is_dir() else None
    checkpoint = _checkpoint(path, None if manifest is None else manifest.kind)
    facts = [] if checkpoint is None else _checkpoint_facts(checkpoint)
    facts += _engine_facts(path) if manifest is not None and manifest.kind == "engine" else []
    if manifest is None:
        return Inspection(_plain_record(path), facts, _plain_lineage(path), None, checkpoint)
    check_files(path, manifest, verify)
    count = f"{len(manifest.files)} files"
    checked = f"verified: {count} as recorded, byte for byte" if verify else f"{count} there, of the recorded sizes"
    if verify and (unknown := [entry.name for entry in manifest.files if entry.digest is None]):
        checked += f", but for {', '.join(unknown)}, which was not compared: it is not known to be on disk yet"
    return Inspection(manifest.to_json(), facts, _lineage(path, manifest), checked, checkpoint)


def _checkpoint(path: Path, kind: str | None) -> Checkpoint | None:
    """What there is to open, which may be a GGUF file in a directory; None for what is no checkpoint."""
    if kind in ("engine", "calibration", "deployment"):
        return None
    inside = path / GGUF
    alone = kind is not None and inside.is_file() and not (path / "config.json").is_file()
    return open_checkpoint(inside if alone else path)


def _plain_record(path: Path) -> dict[str, Any]:
    inside = gguf_parts(path) if path.is_file() else sorted(path.iterdir())
    members = [file for file in inside if file.is_file()]
    files = [{"name": file.name, "size": file.stat().st_size, "sha256": None} for file in members]
    hub_id, revision = hub_origin(path)
    parent = {"path": hub_id, "hub_id": hub_id, "revision": revision, "digest": None, "manifest": None}
    return {
        "kind": "checkpoint",
        "stage": None,
        "schema_version": None,
        "tool_version": None,
        "created": None,
        "parent": parent if hub_id else None,
        "options": {},
        "quality": {},
        "files": files,
        "size_bytes": sum(file.stat().st_size for file in members),
    }


def _checkpoint_facts(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    config = checkpoint.config
    architectures = config.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    dtypes = Counter(info.dtype for info in checkpoint.infos.values())
    old = any(file.suffix in PICKLED for file in checkpoint.files.values())
    language = language_fields(config)
    return [
        ("architecture", str(name)),
        *([("parts", f"language ({language.get('model_type')}), vision")] if language is not config else []),
        ("context", str(language.get("max_position_embeddings"))),
        ("quantization", _quantization(checkpoint.quantization)),
        ("tensors", ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())),
        *([("weights", "files of torch.save, read as data: no code in them runs")] if old else []),
    ]


def _quantization(quantization: dict[str, Any] | None) -> str:
    if quantization is None:
        return "none"
    told = ("quant_algo", "bits", "group_size", "quant_dtype")
    details = {key: quantization[key] for key in told if key in quantization}
    text = ", ".join(f"{key} {value}" for key, value in details.items())
    return f"{quantization['quant_method']}" + (f": {text}" if text else "")


def _engine_facts(path: Path) -> list[tuple[str, str]]:
    artifact, known = open_engine(path), read_cost(path)
    spec = artifact.spec
    forms = Counter(_form(entry) for entry in artifact.params.values())
    return [
        ("family", spec.family),
        ("context", str(spec.max_position)),
        ("layers", str(len(spec.layers))),
        *([] if spec.vision is None else [("vision", _vision(spec.vision))]),
        ("target", artifact.target),
        *([] if artifact.ranks == 1 else [("ranks", _ranks(artifact))]),
        ("weights", ", ".join(f"{count} {form}" for form, count in forms.most_common())),
        *([] if known is None else [(f"KV cache, {what}", told) for what, told in known.rows()]),
    ]


def _ranks(artifact: EngineArtifact) -> str:
    files = [artifact.path / rank_file(rank, artifact.ranks) for rank in range(artifact.ranks)]
    sizes = ", ".join(f"{file.stat().st_size / 2**20:.1f}" if file.is_file() else "none" for file in files)
    return f"{artifact.ranks}, a file each ({sizes} MiB); it runs with --tp {artifact.ranks}"


def _vision(spec: VisionSpec) -> str:
    tower = spec.tower
    return f"{tower.taken} layers of {tower.hidden}, patches of {tower.patch} x {tower.patch} pixels"


def _form(entry: Any) -> str:
    if not isinstance(entry, dict):
        return "unknown"
    form = str(entry.get("form"))
    return f"{form} ({entry['bits']} bits, groups of {entry.get('group_size')})" if "bits" in entry else form


def _lineage(path: Path, manifest: Manifest) -> list[str]:
    steps = [f"{path}  ({_made(manifest.to_json())}){_cost(manifest.to_json())}"]
    parent: Any = manifest.parent
    for _ in range(_LONGEST_LINEAGE):
        if not isinstance(parent, dict):
            break
        record = parent.get("manifest")
        revision = f" at {parent['revision']}" if parent.get("revision") else ""
        made = f"  ({_made(record)}){_cost(record)}" if isinstance(record, dict) else ""
        steps.append(f"{parent.get('path')}{revision}{made}")
        parent = record.get("parent") if isinstance(record, dict) else None
    return steps


def _made(record: dict[str, Any]) -> str:
    options = record.get("options")
    pairs = options.items() if isinstance(options, dict) else ()
    text = ", ".join(f"{key} {value}" for key, value in pairs if value is not None)
    made = f"{record.get('kind')}, made by {record.get('stage')} {record.get('created')}"
    return f"{made}: {text}" if text else made


def _cost(record: dict[str, Any]) -> str:
    """What a stage measured of the quality, as a line of its own; empty where it measured nothing."""
    found = record.get("quality")
    quality: dict[str, Any] = found if isinstance(found, dict) else {}
    before, after, kl = (_number(quality.get(name)) for name in ("perplexity_before", "perplexity_after", "kl"))
    parts = []
    if before and after:
        parts.append(f"perplexity {written(before)} → {written(after)} ({rise(after / before - 1, 1)})")
    if (cosine := _number(quality.get("cosine"))) is not None:
        parts.append(f"cosine {cosine:.5f} to the vectors of before")
    if kl is not None:
        parts.append(f"KL {kl:.4f} nats")
    head = quality.get("head")
    ratio = _number(head.get("perplexity_ratio")) if isinstance(head, dict) else None
    if ratio is not None and isinstance(head, dict):
        parts.append(f"perplexity {rise(ratio - 1)} by a head of {head.get('bits')} bits")
    tokens = _number(quality.get("tokens") or (head.get("tokens") if isinstance(head, dict) else None))
    return "\n" + ", ".join(parts) + (f", on {tokens:,.0f} tokens" if tokens else "") if parts else ""


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _plain_lineage(path: Path) -> list[str]:
    hub_id, revision = hub_origin(path)
    return [str(path)] + ([f"{hub_id} at {revision}"] if hub_id else [])
