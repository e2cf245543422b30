"""What a chat template says of messages that it does not take."""

from __future__ import annotations


class TemplateRefusal(Exception):
    """The template itself called ``raise_exception``: it does not take these messages."""
