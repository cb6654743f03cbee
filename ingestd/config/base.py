"""Base class of every table of the config file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, PrivateAttr, SecretStr

from ingestd.config.redaction import MASK

if TYPE_CHECKING:
    from collections.abc import Iterable


def _not_empty(value: SecretStr) -> SecretStr:
    if not value.get_secret_value().strip():
        msg = "is empty"
        raise ValueError(msg)
    return value


Secret = Annotated[SecretStr, AfterValidator(_not_empty)]


class Section(BaseModel):
    """A table of the config file: strict types, no unknown keys, no secrets in its repr."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)
    _hidden: set[str] = PrivateAttr(default_factory=set)

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        """Yield the fields of the repr. Values from env: or file: references are masked."""
        for name, value in super().__repr_args__():
            yield name, MASK if name in self._hidden else value
