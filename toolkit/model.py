"""LMDeploy's path of chat templates written in Python."""

from toolkit.chat.custom import MODELS, BaseChatTemplate

__all__ = ["MODELS", "BaseChatTemplate"]
