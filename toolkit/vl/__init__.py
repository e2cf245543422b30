"""LMDeploy's names for pictures: ``load_image``, ``constants.IMAGE_TOKEN``, ``utils.encode_image_base64``."""

from toolkit.vl.utils import load_image

__all__ = ["load_image"]
