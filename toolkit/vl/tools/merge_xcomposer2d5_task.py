"""``python -m toolkit.vl.tools.merge_xcomposer2d5_task HF_MODEL WORK_DIR --task web``: XComposer 2.5 for one task.

Its files hold low-rank parts for tasks beside every linear of the language model, which are added to the weights here,
as LMDeploy has it: of "web" ``lora_web``, of "write" ``lora_sft`` and ``lora_dpo``, W + B·A each, in float32. All of
them are left out of what is written; the parts for tokens of pictures stay.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.artifacts.checkpoint import Checkpoint, open_checkpoint
from toolkit.artifacts.manifest import describe_parent
from toolkit.artifacts.output.checkpoint_writer import write_checkpoint
from toolkit.artifacts.output.stage import open_stage
from toolkit.artifacts.source import resolve_model
from toolkit.base import extras
from toolkit.errors import ToolkitError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

TASKS = {"web": ("web",), "write": ("sft", "dpo")}
PARTS = tuple(f".lora_{part}_{side}.weight" for parts in TASKS.values() for part in parts for side in "AB")


@extras.named()
def merge(model: str, target: Path, task: str, overwrite: bool = False) -> int:
    """Write the model with its weights for ``task`` to ``target``; how many linears have changed.

    Raises UsageError for a task that is none or a target that is not empty, ToolkitError for a model without such
    parts.
    """
    if task not in TASKS:
        raise UsageError(f"--task: expected {' or '.join(TASKS)}, found {task!r}")
    path = resolve_model(model)
    checkpoint = open_checkpoint(path)
    names = checkpoint.names()
    first = f".lora_{TASKS[task][0]}_A.weight"
    bases = {name.removesuffix(first) for name in names if name.endswith(first)}
    if not bases:
        raise ToolkitError(f"{path}: expected tensors ending in {first}, as XComposer 2.5 has them, found none")
    options = {"task": task}
    with open_stage(
        target,
        kind="checkpoint",
        stage="merge_xcomposer2d5_task",
        parent=describe_parent(path),
        options=options,
        overwrite=overwrite,
    ) as stage:
        if not stage.already_there:
            write_checkpoint(stage.dir, checkpoint, _merged(checkpoint, bases, TASKS[task]), lambda config: config)
            stage.finish({"merged_linears": len(bases)})
    return len(bases)


def _merged(checkpoint: Checkpoint, bases: set[str], parts: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    for name in checkpoint.names():
        if name.endswith(PARTS):
            continue
        found, base = checkpoint.tensor(name), name.removesuffix(".weight")
        if base in bases and name != base:
            whole = found.float()
            for part in parts:
                a, b = (checkpoint.tensor(f"{base}.lora_{part}_{side}.weight").float() for side in "AB")
                whole = whole + b @ a
            found = whole.to(found.dtype)
        yield name, found


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    parser = argparse.ArgumentParser(
        prog="merge_xcomposer2d5_task", description="Make XComposer 2.5 a model for a task."
    )
    parser.add_argument("model", help="local directory or hub id")
    parser.add_argument("work_dir", type=Path, help="directory to write")
    parser.add_argument("--task", required=True, help="web, or write")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    told = parser.parse_args(arguments)
    try:
        count = merge(told.model, told.work_dir, told.task, told.overwrite)
    except ToolkitError as error:
        sys.stderr.write(f"{error}\n")
        return 2 if isinstance(error, UsageError) else 1
    sys.stdout.write(f"{told.work_dir}: {count} linears changed for {told.task}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
