"""lm-evaluation-harness against a server of ours: its command line, and our own tasks among its tasks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from toolkit.errors import ToolkitError, UsageError
from toolkit.eval.tasks import COUNT, TASKS, write_lm_eval

OURS = "toolkit_"  # how lm-eval's names of our tasks begin


def check_installed() -> None:
    """Raise UsageError where lm-eval is not."""
    if find_spec("lm_eval") is None:
        raise UsageError('tool eval lm_eval: lm-eval is not installed; pip install "lm-eval[api]"')


def run_lm_eval(
    url: str, model: str, tasks: Sequence[str], *, chat: bool, limit: int | None = None, more: Sequence[str] = ()
) -> None:
    """Run lm-eval's ``tasks`` on the server at ``url``, whose ``model`` it asks for; lm-eval prints the results.

    ``chat``: through the chat template, for tasks whose answers are written. ``more``: further arguments of lm-eval.
    Raises UsageError where lm-eval is not installed or a task of ours is unknown, ToolkitError where it fails.
    """
    check_installed()
    own = [name.removeprefix(OURS) for name in tasks if name.startswith(OURS)]
    for name in own:
        if name not in TASKS:
            raise UsageError(f"--tasks {OURS}{name}: expected one of {', '.join(OURS + t for t in TASKS)}")
        if (TASKS[name].judge is not None) != chat:
            raise UsageError(f"--tasks {OURS}{name}: {'leave --chat out' if chat else 'add --chat'} for this one")
    kind, path = ("local-chat-completions", "chat/completions") if chat else ("local-completions", "completions")
    with tempfile.TemporaryDirectory(prefix="lm-eval-") as folder:
        write_lm_eval(Path(folder), own, limit or COUNT)
        arguments = ["--model", kind, "--model_args", f"model={model},base_url={url}/v1/{path}"]
        arguments += ["--tasks", ",".join(tasks), "--include_path", folder]
        arguments += ["--apply_chat_template"] if chat else []
        arguments += [] if limit is None else ["--limit", str(limit)]
        done = subprocess.run([sys.executable, "-m", "lm_eval", "run", *arguments, *more])
    if done.returncode:
        raise ToolkitError(f"lm-eval ended with code {done.returncode}; what it wrote above says why")
