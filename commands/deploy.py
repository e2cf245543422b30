"""``tool deploy``: what is needed to run an artifact in another place."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import typer

from toolkit.base.lazy_dataclass import dataclass
from toolkit.commands.options import with_flags
from toolkit.commands.output import say, stdout, table, write_json
from toolkit.configs.option import option
from toolkit.deploy.options import Deployment


@dataclass(frozen=True)
class DeployFlags(Deployment):
    overwrite: bool = option(False, "Replace what an earlier run wrote to --dst-path.")
    json: str | None = option(None, "Write what was made as JSON to this file (- = standard output).")

    def deployment(self) -> Deployment:
        return Deployment(**{f.name: getattr(self, f.name) for f in fields(Deployment)})


@with_flags("flags", DeployFlags)
def run(
    model: Annotated[str, typer.Argument(metavar="DIR", help="Artifact, checkpoint directory, .gguf file, or demo.")],
    to: Annotated[
        str,
        typer.Option(
            help="docker, compose, k8s, kuberay, ray, systemd; or another engine: vllm, sglang, lmdeploy, "
            "llama.cpp, dynamo."
        ),
    ],
    dst_path: Annotated[str, typer.Option(help="Directory to write to.")],
    flags: DeployFlags,
) -> None:
    """Write what runs DIR somewhere else: with the memory it needs, its probes, and its secrets by reference.

    Example: tool deploy demo-engine --to k8s --dst-path k8s --replicas 2
    """
    from toolkit.artifacts.output.result_file import check_json
    from toolkit.deploy.deploy import deploy

    check_json("--json", flags.json, ("files", "start"))
    done = deploy(model, dst_path, to=to, asked=flags.deployment(), overwrite=flags.overwrite)
    memory = done.memory
    write_json(
        flags.json,
        {
            "path": str(done.path),
            "to": done.to,
            "name": done.name,
            "files": done.files,
            "start": done.start,
            "memory_bytes": memory.host,
            "gpu_memory_bytes": memory.gpu,
            "session_len": memory.plan.session_len,
            "max_batch_size": memory.plan.max_batch_size,
            "notes": done.notes,
        },
    )
    if flags.json == "-":
        return
    if done.already_there:
        say(f"{done.path}: already there", stdout())
        return
    rows = [
        ("files", ", ".join(f"{done.path}/{name}" for name in done.files)),
        ("requests", f"{memory.plan.max_batch_size} of up to {memory.plan.session_len} tokens"),
        ("memory", f"{memory.host >> 20:,} MiB"),
        *([] if memory.gpu is None else [("memory of the GPU", f"{memory.gpu >> 20:,} MiB")]),
        *(("note", note) for note in done.notes),
        ("start it", done.start),
    ]
    stdout().print(table(f"{done.name} for {done.to}", ("", "value"), rows))
