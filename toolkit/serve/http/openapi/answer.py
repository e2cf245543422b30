"""What the classes are built on that describe answers."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Pydantic makes what checks values once there are some: for most kinds of answers a server never has any."""

    model_config = ConfigDict(defer_build=True)
