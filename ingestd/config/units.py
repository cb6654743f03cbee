"""Durations, sizes and addresses in a config file."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import Annotated

from pydantic import BeforeValidator

_NUMBER_UNIT = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([A-Za-z]+)\Z")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_ADDRESS = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+)):(\d{1,5})\Z")
_MAX_PORT = 65535


def seconds(text: object) -> float:
    """Parse ``500ms``, ``5s``, ``1m``, ``2h``, ``7d`` into seconds above 0. Raises ValueError."""
    match = _NUMBER_UNIT.match(text) if isinstance(text, str) else None
    if match is None or match[2] not in _SECONDS or float(match[1]) <= 0:
        msg = "not a duration; write a number above 0 with ms, s, m, h or d, like '5s'"
        raise ValueError(msg)
    return float(match[1]) * _SECONDS[match[2]]


def size_bytes(text: object) -> int:
    """Parse ``64MB`` (10^6), ``64MiB`` (2^20) and so on into bytes above 0. Raises ValueError."""
    match = _NUMBER_UNIT.match(text) if isinstance(text, str) else None
    unit = None if match is None else _BYTES.get(match[2].lower())
    if match is None or unit is None or (found := int(float(match[1]) * unit)) <= 0:
        msg = "not a size; write a number above 0 with B, kB, MB, GB, KiB, MiB or GiB, like '64MB'"
        raise ValueError(msg)
    return found


@dataclass(frozen=True, slots=True)
class Address:
    """A listening address. Port 0: chosen by the system."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(text: object) -> Address | None:
    """Parse ``host:port`` or ``[v6]:port``; ``off`` is None. Raises ValueError."""
    if text == "off":
        return None
    match = _ADDRESS.match(text) if isinstance(text, str) else None
    if match is None or int(match[3]) > _MAX_PORT:
        msg = "not an address; write 'host:port', like '127.0.0.1:9464', or 'off'"
        raise ValueError(msg)
    return Address(match[1] or match[2], int(match[3]))


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's loopback."""
    if host.lower().rstrip(".") == "localhost":
        return True
    try:
        found = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def size_or_zero(text: object) -> int:
    """Parse a size as `size_bytes` does, or ``0`` (number or text). Raises ValueError."""
    return 0 if text in ("0", 0) and not isinstance(text, bool) else size_bytes(text)


def seconds_or_zero(text: object) -> float:
    """Parse a duration as `seconds` does, or ``0`` (number or text). Raises ValueError."""
    return 0.0 if text in ("0", 0) and not isinstance(text, bool) else seconds(text)


def seconds_or_off(text: object) -> float | None:
    """Parse a duration as `seconds` does; ``off`` is None. Raises ValueError."""
    try:
        return None if text == "off" else seconds(text)
    except ValueError as error:
        raise ValueError(f"{error}, or 'off'") from None


Seconds = Annotated[float, BeforeValidator(seconds)]
SecondsOrZero = Annotated[float, BeforeValidator(seconds_or_zero)]
SecondsOrOff = Annotated[float | None, BeforeValidator(seconds_or_off)]
SizeBytes = Annotated[int, BeforeValidator(size_bytes)]
SizeOrZero = Annotated[int, BeforeValidator(size_or_zero)]
