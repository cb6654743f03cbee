"""The kinds of capture by the config's `kind`. A new kind needs a module and a line here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from ingestd.ports import ConnectorFactory


def _wal() -> ConnectorFactory:
    from ingestd.postgres.wal.connector import WalFactory  # noqa: PLC0415

    return WalFactory()


def _polling() -> ConnectorFactory:
    from ingestd.postgres.polling.connector import PollingFactory  # noqa: PLC0415

    return PollingFactory()


class _Factories(Mapping[str, ConnectorFactory]):
    """Imports a kind's modules on first use, so that a daemon loads only what it needs."""

    def __init__(self, **makers: Callable[[], ConnectorFactory]) -> None:
        self._makers = makers

    def __getitem__(self, kind: str) -> ConnectorFactory:
        return self._makers[kind]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)


FACTORIES: Mapping[str, ConnectorFactory] = _Factories(wal=_wal, polling=_polling)
