"""The line that a user is told when something is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toolkit.errors import ToolkitError


def refusing(usual: type[ToolkitError] | None = None) -> Callable[..., str]:
    """``refused(call, kind)`` -> the text of the error that ``call`` raises, of exactly ``kind``. Left out it is the
    ``usual`` one; None: any ToolkitError."""

    def refused(call: Callable[[], object], kind: type[ToolkitError] | None = usual) -> str:
        with pytest.raises(ToolkitError) as error:
            call()
        assert kind is None or type(error.value) is kind
        return str(error.value)

    return refused
