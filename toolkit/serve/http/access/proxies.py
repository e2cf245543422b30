"""Which machines are proxies of ours, by address."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from toolkit.configs.option import spelled
from toolkit.errors import UsageError


class Proxies:
    """Addresses whose word is taken for whose a request is. Raises UsageError for what is none."""

    def __init__(self, given: Sequence[str]) -> None:
        self._networks = []
        for text in given:
            try:
                self._networks.append(ipaddress.ip_network(text, strict=False))
            except ValueError:
                told = f"expected an address such as 10.0.0.5 or 10.0.0.0/24, found {text!r:.60}"
                raise UsageError(f"{spelled('trusted_proxy')}: {told}") from None

    def __bool__(self) -> bool:
        return bool(self._networks)

    def __contains__(self, client: object) -> bool:
        try:
            address = ipaddress.ip_address(str(client))
        except ValueError:
            return False
        return any(address in network for network in self._networks)
