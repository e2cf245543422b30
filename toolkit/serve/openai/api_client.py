"""LMDeploy's path of the client; it lives in ``toolkit.serve.client``."""

from toolkit.serve.client import APIClient

__all__ = ["APIClient"]
