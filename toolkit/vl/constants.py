"""What stands in a prompt where a picture is to stand."""

from toolkit.vision.parts import IMAGE_TOKEN

__all__ = ["IMAGE_TOKEN"]
