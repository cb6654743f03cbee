"""Servers that lie where COPYs and streams are read from their sockets (I9)."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import psutil
import psycopg
import pytest
from psycopg import sql

from ingestd.decode.copy.rows import CopyRows
from ingestd.decode.pgoutput.decoder import PgoutputDecoder
from ingestd.decode.pgoutput.relation import table_of
from ingestd.decode.pgoutput.streamed_transactions import StreamedTransactions
from ingestd.model.errors import IngestdError, OperatorError, ProtocolError, TransientError
from ingestd.model.lsn import Lsn
from ingestd.postgres.connection.session import connect
from ingestd.postgres.transport.copy_out import CopyOut
from ingestd.postgres.wal.block_decoder import BlockDecoder
from ingestd.postgres.wal.replication_stream import StreamLimits, open_stream
from tests.harness import lying_messages as honest
from tests.harness.databases import query_server_id
from tests.harness.lies import lying_scripts, written
from tests.harness.lying_server import COPY, STREAM, LyingServer, message
from tests.unit.decode.test_streamed_transactions import MemorySpool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ingestd.testing.embedded.postgres import PostgresServer
    from tests.harness.databases import Database

pytestmark = pytest.mark.attack("server")
LIMIT_S = 60.0
FEW = 12
ROW_LIMIT_BYTES = 1 << 20
GROWTH_BYTES = 50_000_000
SAID_BYTES = 2500
"""With where it was: host, port, database and user."""
VALUES = (b"7", b"a note", None)
TWO_GB = (1 << 31) - 5


@pytest.fixture(scope="module")
def liar(postgres: PostgresServer) -> Iterator[LyingServer]:
    with LyingServer(postgres.port) as server:
        yield server


def script() -> honest.Script:
    return honest.copied(VALUES, (b"8", None, b"x"), (b"9", b"y", b""))


def truth() -> bytes:
    return b"".join(written(told) for _, told in script())


async def copied(liar: LyingServer, database: Database, sent: bytes) -> int | Exception:
    """Return how many rows are read of what is sent as a COPY, or what ended it."""
    liar.answer = lambda query: sent if query.startswith(COPY) else None
    connection = await connect(liar.dsn(database.dsn))
    copy = CopyOut(connection, limit_bytes=ROW_LIMIT_BYTES)
    rows = CopyRows("public.t", len(VALUES))
    count, is_last = 0, False
    try:
        async with asyncio.timeout(LIMIT_S):
            await copy.start(sql.SQL("COPY (SELECT) TO STDOUT (FORMAT binary)").format())
            while not is_last:
                block = await copy.read_block()
                is_last = block.is_last
                found = rows.feed(block.buffer, block.starts, block.ends)
                count += 0 if found is None else found.count
            rows.finish()
    except (psycopg.Error, ProtocolError) as error:
        return error
    finally:
        liar.answer = lambda _: None
        await copy.close()
    return count


async def test_the_truth_is_taken(liar: LyingServer, database: Database) -> None:
    beside = b"".join(written(told) for _, told in honest.beside()[2:5])
    first, *others = (written(told) for _, told in script())
    for sent in (truth(), beside + first + beside.join(others)):
        assert await copied(liar, database, sent) == 3


async def assert_held(
    liar: LyingServer, database: Database, told: Iterator[tuple[str, bytes]]
) -> None:
    """All rows of a COPY are returned, or it ends with an error."""
    refused = 0
    for name, sent in told:
        try:
            found = await copied(liar, database, sent)
            assert isinstance(found, Exception) or found == 3 or "row" in name
            assert len(str(found).encode()) < SAID_BYTES
        except BaseException as error:
            error.add_note(name)
            raise
        refused += isinstance(found, Exception)
    assert refused


async def test_a_few_lies_in_a_copy_end_it(
    liar: LyingServer, database: Database, seed: int
) -> None:
    told = [*lying_scripts(script())]
    await assert_held(liar, database, iter(random.Random(seed).sample(told, FEW)))


@pytest.mark.thorough
async def test_every_lie_in_a_copy_ends_it_or_is_harmless(
    liar: LyingServer, database: Database
) -> None:
    await assert_held(liar, database, lying_scripts(script()))


ORDERS = {
    "no response": ("first row", "row", "row", "trailer", "CopyDone", "ReadyForQuery"),
    "no CommandComplete": (
        *("CopyOutResponse", "first row", "row", "row", "trailer"),
        *("CopyDone", "ReadyForQuery"),
    ),
    "two CopyDone": (
        *("CopyOutResponse", "first row", "row", "row", "trailer"),
        *("CopyDone", "CopyDone", "CommandComplete", "ReadyForQuery"),
    ),
    "a row after CopyDone": (
        *("CopyOutResponse", "first row", "row", "CopyDone", "row", "trailer"),
        *("CommandComplete", "ReadyForQuery"),
    ),
    "ready at once": ("ReadyForQuery",),
    "another response": ("CopyBothResponse", "first row", "trailer", "CopyDone", "ReadyForQuery"),
}


@pytest.mark.parametrize("order", ORDERS)
async def test_messages_in_another_order_are_a_protocol_error(
    liar: LyingServer, database: Database, order: str
) -> None:
    """While the connection stays open: no further data is awaited."""
    known = {**dict(script()), "CopyBothResponse": honest.copy_response("W")}
    liar.then_ends = False
    try:
        found = await copied(
            liar, database, b"".join(written(known[name]) for name in ORDERS[order])
        )
    finally:
        liar.then_ends = True
    assert isinstance(found, ProtocolError)


# --- sizes -----------------------------------------------------------------------------------

RESPONSE = written(honest.copy_response("H", len(VALUES)))
STATES = {
    "before": b"",
    "begun": RESPONSE,
    "in rows": RESPONSE + written(script()[1][1]),
    "done": truth()[: -len(written(honest.ready()))],
}
KINDS = b"dHcCZENSAW"


@pytest.mark.parametrize("state", STATES)
async def test_bounded_a_frame_of_two_gigabytes_ends_a_copy(
    liar: LyingServer, database: Database, state: str
) -> None:
    """In any state: the header is enough, the content is not awaited."""
    liar.then_ends = False
    process = psutil.Process()
    try:
        for kind in KINDS:
            before = process.memory_info().rss
            sent = STATES[state] + message(bytes([kind]), b"x" * 1000, TWO_GB)
            found = await copied(liar, database, sent)
            assert isinstance(found, ProtocolError), bytes([kind])
            assert "has an invalid length" in str(found)
            assert process.memory_info().rss < before + GROWTH_BYTES
    finally:
        liar.then_ends = True


async def test_an_error_of_any_bytes_is_reported_briefly(
    liar: LyingServer, database: Database
) -> None:
    for letter in "CMFDHWSVPqL":
        fields = letter.encode() + b"\xff\xfe" * 50_000 + b"\0" + b"C\xff\xff\0" + b"\0"
        for sent in (message(b"E", fields), RESPONSE + message(b"E", fields)):
            found = await copied(liar, database, sent)
            assert isinstance(found, psycopg.Error)
            assert len(str(found).encode()) < SAID_BYTES


# --- the stream ------------------------------------------------------------------------------


async def streamed(liar: LyingServer, database: Database, sent: bytes) -> IngestdError | None:
    """Return what ends a stream of which this is sent, before its connection ends."""
    liar.answer = lambda query: sent if query.startswith(STREAM) else None
    decoder, order = PgoutputDecoder(table_of), StreamedTransactions(MemorySpool())
    try:
        async with asyncio.timeout(LIMIT_S):
            stream = await open_stream(
                liar.dsn(database.dsn),
                "slot",
                "publication",
                Lsn(7),
                Lsn(7),
                queried_id=await query_server_id(liar.dsn(database.dsn)),
                streams_in_progress=True,
                messages=True,
                where="source shop, stream",
                limits=StreamLimits(1 << 20, linger_s=0.0, row_limit_bytes=ROW_LIMIT_BYTES),
            )
            try:
                while True:
                    decoding = BlockDecoder(decoder, order, await stream.receive())
                    while not decoding.is_done:
                        decoding.decode_some()
                    if decoding.ended is not None:
                        return stream.fault(decoding.ended)
            finally:
                await stream.close()
    except (TransientError, OperatorError, ProtocolError) as error:
        return error
    finally:
        liar.answer = lambda _: None


def stream_script() -> honest.Script:
    return [*honest.transaction(), *honest.beside()[1:]]


async def assert_stream_ends(
    liar: LyingServer, database: Database, told: Iterator[tuple[str, bytes]]
) -> None:
    for name, sent in told:
        try:
            found = await streamed(liar, database, sent)
            assert found is not None
            assert len(str(found).encode()) < SAID_BYTES
        except BaseException as error:
            error.add_note(name)
            raise


async def test_a_few_lies_in_a_stream_end_it(
    liar: LyingServer, database: Database, seed: int
) -> None:
    told = [*lying_scripts(stream_script())]
    await assert_stream_ends(liar, database, iter(random.Random(seed).sample(told, FEW)))


@pytest.mark.thorough
async def test_lies_about_all_that_surrounds_a_stream_end_it(
    liar: LyingServer, database: Database
) -> None:
    """Lies in pgoutput messages are tested at the decoder (`tests/unit/decode/test_lies.py`)."""
    await assert_stream_ends(liar, database, lying_scripts(honest.beside()))


async def test_bounded_a_frame_of_two_gigabytes_ends_a_stream(
    liar: LyingServer, database: Database
) -> None:
    begun = written(honest.copy_response("W"))
    begun_transaction = b"".join(written(told) for _, told in honest.transaction()[1:5])
    process = psutil.Process()
    liar.then_ends = False
    try:
        for state in (b"", begun, begun + begun_transaction):
            for kind in KINDS:
                before = process.memory_info().rss
                sent = state + message(bytes([kind]), b"w" * 1000, TWO_GB)
                found = await streamed(liar, database, sent)
                assert isinstance(found, ProtocolError), bytes([kind])
                assert "has an invalid length" in str(found)
                assert process.memory_info().rss < before + GROWTH_BYTES
    finally:
        liar.then_ends = True
