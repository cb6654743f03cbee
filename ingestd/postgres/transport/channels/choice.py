"""Chooses the channel of a connection: plain, through TLS, or by libpq."""

from __future__ import annotations

from ingestd.postgres.connection.liveness import LivenessCheckedConnection
from ingestd.postgres.transport.channels.channel import Channel
from ingestd.postgres.transport.channels.libpq import LibpqChannel, is_encrypted_by_kerberos
from ingestd.postgres.transport.channels.plain import PlainChannel
from ingestd.postgres.transport.channels.tls import tls_channel


class Channels:
    """Opens the channels of a connection, one after another, each while libpq is idle."""

    def __init__(self, connection: LivenessCheckedConnection) -> None:
        self._connection = connection
        self._by_kerberos: bool | None = None

    async def open(self) -> Channel:
        """Return the next channel. Raises psycopg.Error."""
        connection = self._connection
        if connection.pgconn.ssl_in_use:
            return tls_channel(connection) or LibpqChannel(connection)
        if self._by_kerberos is None:
            self._by_kerberos = await is_encrypted_by_kerberos(connection)
        return LibpqChannel(connection) if self._by_kerberos else PlainChannel(connection)
