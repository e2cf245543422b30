"""Where work is done that need not be done by this process, once: flags of ``tool batch`` and ``tool lite``."""

from __future__ import annotations

from toolkit.base.lazy_dataclass import dataclass
from toolkit.base.ray import check_ray
from toolkit.configs.option import option, spelled
from toolkit.errors import UsageError

_PANEL = {"rich_help_panel": "On a cluster"}


@dataclass(frozen=True, kw_only=True)
class OnRay:
    """``cpus``, ``gpus``: as Ray counts them."""

    ray: int | None = option(None, "Workers on a Ray cluster that share the work.", min=1, **_PANEL)
    ray_address: str | None = option(
        None, "Cluster to use: auto, or HOST:PORT. Default: one of its own, on this machine.", **_PANEL
    )
    cpus: float = option(1.0, "With --ray: cores of each worker.", min=0, **_PANEL)
    gpus: float = option(0.0, "With --ray: GPUs of each.", min=0, **_PANEL)

    def check_ray(self) -> None:
        """Raise UsageError for what does not go together, or where there is no Ray."""
        if self.ray is not None:
            check_ray("--ray")
            return
        for name in ("ray_address", "cpus", "gpus"):
            if getattr(self, name) != getattr(OnRay, name):
                raise UsageError(f"{spelled(name)}: only with --ray, the number of workers")
