"""Host names that a request may address.

A browser that is made to resolve a foreign name to this machine (DNS rebinding) sends that name in the Host header. A
name in the header is therefore accepted only if it is known to belong to this server.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address

from vitral.errors import VitralError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class AllowedHosts:
    """names: lower-case host names and addresses; `*` allows any host, `*.example` all names that end in `.example`.

    any_address: IP addresses are allowed. A foreign site cannot use one, because its pages are addressed by name.
    """

    names: tuple[str, ...] = LOCAL_HOSTS
    any_address: bool = False

    def allows(self, host_header: str) -> bool:
        host = normalise_host(host_header)
        if host is None:
            return "*" in self.names
        if self.any_address and _parse_address(host) is not None:
            return True
        return any(name in ("*", host) or (name.startswith("*.") and host.endswith(name[1:])) for name in self.names)


def normalise_host(host_header: str) -> str | None:
    """The host in lower case, without port, brackets and final dot; None if the header is malformed."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9_.-]+))(?::[0-9]{0,5})?", host_header)
    if match is None:
        return None
    if match[1] is None:
        return match[2].lower().removesuffix(".")
    address = _parse_address(match[1])
    return None if address is None else str(address)


def _parse_address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(host)
    except ValueError:
        return None


def allowed_hosts(bind_host: str, names: Sequence[str] = ()) -> AllowedHosts:
    """This machine's own names, the bound address and `names`.

    A server that listens on all interfaces is reached by addresses that it cannot know (port forwarding, a cluster's
    service address), so it allows all addresses.
    """
    address = _parse_address(bind_host)
    any_address = address is not None and address.is_unspecified
    own_name = socket.gethostname() if any_address else str(address or bind_host)
    return AllowedHosts((*LOCAL_HOSTS, own_name.lower(), *map(_check_name, names)), any_address)


def _check_name(name: str) -> str:
    if name == "*":
        return name
    bracketed = f"[{name}]" if ":" in name and not name.startswith("[") else name
    host = None if ":" in bracketed.rpartition("]")[2] else normalise_host(bracketed.removeprefix("*."))
    if host is None:
        hint = "Pass names without scheme and port, such as --allowed-hosts vitral.example,*.internal, or * for any"
        raise VitralError(f"invalid host name {name!r}", hint)
    return f"*.{host}" if name.startswith("*.") else host
