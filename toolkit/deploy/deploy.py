"""Stage ``deploy``: what is needed to run an artifact in a given place, as a directory of files."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
import sysconfig
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from toolkit.artifacts.manifest import content_files, describe_parent, title
from toolkit.artifacts.output.stage import open_stage
from toolkit.artifacts.source import resolve_model
from toolkit.artifacts.weight_files.find import gguf_name
from toolkit.base.lazy_dataclass import dataclass
from toolkit.deploy import ray_serve
from toolkit.deploy.facts import GRACE, Artifact, Memory, form_at, open_artifact, plan_memory
from toolkit.deploy.options import Deployment, name_of
from toolkit.deploy.targets import OPTIONS, OURS, TARGETS, TURNED, Target
from toolkit.errors import ToolkitError, UsageError

USER = 10001  # of our images
IMAGES = {"cpu": "toolkit:cpu", "cuda": "toolkit:cuda"}  # as deploy/docker makes them
MOUNTED = "/model"
PRIVATE = (Path("/tmp"), Path("/var/tmp"))  # of the unit: PrivateTmp
MOUNTING = ("docker", "compose")  # where containers of this machine have the model's folder, and nothing else runs


@dataclass(frozen=True)
class Deployed:
    """``files``: their names in ``path``. ``start``: the command that runs it. ``notes``: one line each."""

    path: Path
    to: str
    name: str
    files: list[str]
    start: str
    memory: Memory
    notes: list[str]
    already_there: bool = False


def deploy(
    model: str, dst_path: Path | str, *, to: str, asked: Deployment | None = None, overwrite: bool = False
) -> Deployed:
    """Write what runs ``model`` at ``to`` (a name of ``TARGETS``) into ``dst_path``, whole or not at all.

    Raises UsageError for a wrong option, ToolkitError, one line that names what helps, where the artifact cannot run
    there or its memory plan does not fit.
    """
    asked = asked or Deployment()
    if to not in TARGETS:
        raise UsageError(f"--to: expected one of {', '.join(TARGETS)}, found {to!r}")
    asked.check()
    for field, places in OPTIONS.items():
        if to not in places and getattr(asked, field) != getattr(Deployment, field):
            raise UsageError(f"{field}: {to} has no use for it, {', '.join(places)} have; leave it out")
    target = TARGETS[to]
    path = resolve_model(model).absolute()
    artifact = open_artifact(path)
    _check_path(artifact.file)
    if artifact.form not in target.reads:
        raise ToolkitError(_elsewhere(artifact, to, target))
    outside = _outside(artifact)
    if outside and to in MOUNTING:
        raise ToolkitError(outside)
    device = _device(artifact, asked.device, target)
    memory = plan_memory(artifact, asked, device)
    name = asked.name or name_of(title(path))
    out = Path(dst_path)
    known = _facts(artifact, target, asked, device, memory, name)
    written = {shown.format(name=name): _render(template, known) for shown, template in target.files.items()}
    # they say more than the options: where the model is, and what this machine's plan is
    digest = hashlib.sha256(json.dumps(written).encode()).hexdigest()
    options = {"to": to, **asdict(asked), "files": f"sha256:{digest}"}
    where = {"out": shlex.quote(str(out)), "absolute": shlex.quote(str(out.absolute()))}
    start = target.next.format(name=name, **where)
    notes = list(memory.plan.notices)
    if device == "cpu" and target.image and not target.on_gpu and asked.image is None:
        notes.append(f"{target.image}: computes on GPUs alone, and compose.yaml has it; --image names one for CPUs")
    if outside and "compose.yaml" in written:  # beside what runs here
        notes.append(outside)
    if to == "systemd":
        tool = Path(known["tool"])
        notes += [*_closed(artifact.file, "the unit"), *_closed_way(artifact.file), *_closed_way(tool)]
    elif to in MOUNTING or "compose.yaml" in written:
        notes += _closed(artifact.file, "the container")
    done = Deployed(out, to, name, list(written), start, memory, notes)
    parent = describe_parent(path)
    with open_stage(
        out, kind="deployment", stage="deploy", parent=parent, options=options, overwrite=overwrite
    ) as stage:
        if stage.already_there:
            return replace(done, already_there=True)
        for file, text in written.items():
            (stage.dir / file).write_text(text, encoding="utf-8")
            if file.endswith(".sh"):
                (stage.dir / file).chmod(0o755)
        stage.finish()
    return done


def _check_path(path: Path) -> None:
    if bad := sorted({c for c in str(path) if c in ',"' or not c.isprintable()}):
        raise UsageError(f"{str(path)!r}: expected a path without {' '.join(map(repr, bad))}, which mounts cannot name")


def _outside(artifact: Artifact) -> str:
    """Why a container that has the model's folder lacks its files, as with those of the hub's cache; "" where it does
    not."""
    folder = artifact.file if artifact.file.is_dir() else artifact.file.parent
    linked = (file for file in content_files(artifact.file) if not file.resolve().is_relative_to(folder.resolve()))
    if (file := next(linked, None)) is None:
        return ""
    return (
        f"{file}: is a link out of its folder, which a container does not see; "
        f"`cp -rL {shlex.quote(str(folder))} COPY`, then deploy COPY"
    )


def _closed(model: Path, who: str) -> list[str]:
    """A note where another user cannot read a file of the model."""
    own = (model,) if model.is_dir() else ()
    if (closed := next((one for one in (*own, *content_files(model)) if not _open(one)), None)) is None:
        return []
    return [f"{closed}: {who} has a user of its own, which may not open it: `chmod -R o+rX {shlex.quote(str(model))}`"]


def _closed_way(path: Path) -> list[str]:
    """A note where the unit does not come to ``path``."""
    path = path.resolve()
    notes = [
        f"{path}: the unit has a {place} of its own, in which it is not; move it elsewhere"
        for place in PRIVATE
        if path.is_relative_to(place)
    ]
    if closed := next((one for one in filter(Path.exists, path.parents) if not _open(one)), None):
        told = f"chmod o+rX {shlex.quote(str(closed))}"
        notes.append(f"{closed}: the unit has a user of its own, which may not open it: `{told}`, or move it")
    return notes


def _open(path: Path) -> bool:
    """Whether everybody may read a file, or enter a directory."""
    wanted = 0o001 if path.is_dir() else 0o004
    return path.stat().st_mode & wanted == wanted


def _device(artifact: Artifact, asked: str, target: Target) -> str:
    """cpu or cuda. Raises ToolkitError where the artifact is not for the one asked for."""
    packed = artifact.target
    if target.command and target.program == "llama-server":
        return "cpu" if asked == "auto" else asked
    if target.reads is not OURS:
        return "cuda" if asked == "auto" else asked
    if asked == "auto":
        return "cpu" if packed == "cpu" else "cuda"
    if asked == "cpu" and packed != "cpu":
        source = artifact.path if packed is None else artifact.source or "MODEL"
        engine = f"{artifact.path.name}-engine"
        raise ToolkitError(
            f"--device cpu: {artifact.path} is not packed for one, and the image for CPUs has no torch; "
            f"`tool convert {source} --target cpu --dst-path {engine}` packs it, then deploy {engine}"
        )
    if asked == "cuda" and packed == "cpu":
        raise ToolkitError(
            f"--device cuda: {artifact.path} is packed for a CPU; deploy {artifact.source or 'its checkpoint'} instead"
        )
    return asked


def _elsewhere(artifact: Artifact, to: str, target: Target) -> str:
    """Why the artifact cannot run there, and what helps."""
    reads = ", ".join(target.reads)
    if artifact.form == "engine":
        source = artifact.source
        if source is None:
            return f"{artifact.path}: {to} reads {reads}, not an engine artifact; deploy the checkpoint it was made of"
        if form_at(source) in target.reads:
            return f"{artifact.path}: {to} reads {reads}, not an engine artifact; deploy {source}, which it was made of"
        best = target.reads[0]
        name = f"{name_of(artifact.path.name)}-{best}"
        return (
            f"{artifact.path}: {to} reads {reads}, not an engine artifact; "
            f"`tool convert {source} --to {best} --dst-path {name}` makes one of its source, then deploy {name}"
        )
    best = TURNED.get(artifact.form, "")
    best = target.reads[0] if best not in target.reads else best
    name = f"{Path(gguf_name(artifact.path)).stem if artifact.path.is_file() else artifact.path.name}-{best}"
    return (
        f"{artifact.path}: {to} reads {reads}, found {artifact.form}; "
        f"`tool convert {artifact.path} --to {best} --dst-path {name}` makes it so, then deploy {name}"
    )


def _facts(
    artifact: Artifact, target: Target, asked: Deployment, device: str, memory: Memory, name: str
) -> dict[str, Any]:
    """What templates may name."""
    plan = memory.plan
    inside = f"{MOUNTED}/{artifact.file.name}" if artifact.file.is_file() else MOUNTED
    sizes = ["--session-len", plan.session_len, "--max-batch-size", plan.max_batch_size]
    sizes += ["--cache-max-entry-count", memory.blocks] if memory.gpu is None else []
    sizes += ["--quant-policy", asked.quant_policy] if asked.quant_policy else []
    served = ["--server-port", asked.server_port, "--model-name", name, *sizes, "--grace-period", GRACE]
    image = target.image + (target.on_gpu if device == "cuda" else "")
    words = {
        "name": name, "port": asked.server_port, "length": plan.session_len, "batch": plan.max_batch_size,
        "context": plan.session_len * plan.max_batch_size,
    }  # fmt: skip
    return {
        **words,
        "target": target,
        "image": asked.image or image or IMAGES[device] + target.tag,
        "gpu": device == "cuda",
        "user": USER,
        "grace": GRACE,
        "cpus": asked.cpus,
        "mib": memory.host >> 20,
        "gpu_mib": None if memory.gpu is None else memory.gpu >> 20,
        "replicas": asked.replicas,
        "secret": asked.secret,
        "claim": asked.claim,
        "source": str(artifact.file),
        "folder": str(artifact.path if artifact.path.is_dir() else artifact.path.parent),
        "mounted": inside,
        "args": [str(x) for x in ["serve", "api_server", inside, "--server-name", "0.0.0.0", *served]]
        + ["--log-format", "json"],
        "local_args": [str(x) for x in ["serve", "api_server", artifact.file, "--server-name", "0.0.0.0", *served]],
        "plan": plan.table()[:-1],
        "peer": {
            where: [word.format(model=model, **words) for word in target.command] + sees
            for where, model, sees in (
                ("outside", str(artifact.file), _sees(artifact, target, "")),
                ("inside", inside, _sees(artifact, target, MOUNTED)),
            )
        },
        "ray": ray_serve.facts(artifact, asked, device, memory, name, inside),
        "tool": str(Path(sysconfig.get_path("scripts")) / "tool"),
        "python": sys.executable,
    }


def _sees(artifact: Artifact, target: Target, mounted: str) -> list[str]:
    """Words for the file that the model sees with: where this machine has it, or ``mounted``."""
    eyes = artifact.eyes
    return [] if eyes is None or not target.eyes else [target.eyes, f"{mounted}/{eyes.name}" if mounted else str(eyes)]


def _render(template: str, known: dict[str, Any]) -> str:
    from jinja2 import Environment, StrictUndefined

    made = Environment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    made.filters |= {
        "json": _json,
        "lines": _lines,
        "shell": _shell,
        "unit": _unit,
        "dollars": lambda text: text.replace("$", "$$"),
    }
    text = files("toolkit.deploy").joinpath("files", f"{template}.jinja").read_text(encoding="utf-8")
    return made.from_string(text).render(known)


def _json(value: Any) -> str:
    """A value as YAML has it, for JSON is YAML."""
    return json.dumps(value, ensure_ascii=False)


def _lines(value: Any) -> str:
    """The same, to be read by people too."""
    return json.dumps(value, ensure_ascii=False, indent=2)


def _shell(words: list[str]) -> str:
    """A command for a shell, one option a line."""
    lines: list[str] = []
    for word in words:
        if lines and not (word.startswith("--") or word == "-m"):
            lines[-1] += f" {shlex.quote(word)}"
        else:
            lines.append(shlex.quote(word))
    return " \\\n  ".join(lines)


def _unit(words: list[str]) -> str:
    """A command as systemd reads it: quoted, % and $ doubled."""
    return " ".join('"' + w.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$") + '"' for w in words)
