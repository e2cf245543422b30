"""Replicas of a model on Ray Serve: ``run.serve`` deploys them, and so does ``serve deploy`` with a file whose
``import_path`` is ``toolkit.serve.ray:build``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def build(args: dict[str, Any]) -> Application:
    """What a config file's ``args`` say (``plan.Plan``, as ``tool serve ray --write-config`` writes it), as an
    application of Ray Serve. Raises UsageError."""
    from toolkit.serve.ray.application import application
    from toolkit.serve.ray.plan import Plan

    return application(Plan.of_json(args))
