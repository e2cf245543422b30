"""LMDeploy's names: ``load_image``, ``load_video``, ``constants.IMAGE_TOKEN``, ``utils.encode_image_base64``."""

from toolkit.vl.utils import load_image, load_video

__all__ = ["load_image", "load_video"]
