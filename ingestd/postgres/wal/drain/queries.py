"""The queries of a drain: rows of messages, in the server's order or with commits ahead.

`{changes}`: a call of pg_logical_slot_get_binary_changes (lsn, xid, data), `CHANGES`.
"""

from __future__ import annotations

from psycopg import sql

# A scan of one function returns its rows in its own order.
SINGLE = sql.SQL("SELECT data FROM {changes}")
CHANGES = sql.SQL(
    "pg_catalog.pg_logical_slot_get_binary_changes({slot}, {upto}, {most},"
    " {options}, 'publication_names', {publication})"
)
OPTIONS = sql.SQL("'proto_version', '1'")
OPEN_OPTIONS = sql.SQL("'proto_version', '2', 'streaming', 'on'")
WITH_MESSAGES = sql.SQL(", 'messages', 'true'")
"""With the logical messages that `decode/pgoutput/messages.py` reads."""
COMMITS_AHEAD = sql.SQL(r"""
SELECT message.data
FROM (VALUES (0), (1)) AS pass(n),
LATERAL (
  SELECT 0 AS kind, '0'::xid AS xid, ''::bytea AS top, 0::bigint AS low, 0::bigint AS high,
    NULL::xid[] AS streamed
  WHERE pass.n = 0
  UNION ALL
  SELECT kind, xid, top, low, high, streamed FROM (
    SELECT kind, xid, pg_catalog.xidsend(xid) AS top,
      pg_catalog.lag(high, 2, 0::bigint) OVER (ORDER BY n, kind) AS low, high,
      pg_catalog.string_to_array(
        pg_catalog.current_setting('ingestd.streamed', true), ',')::xid[] AS streamed,
      pg_catalog.max(n) OVER () AS count
    FROM (
      SELECT pg_catalog.split_part(pair, ':', 1)::bigint AS high,
        pg_catalog.split_part(pair, ':', 2)::xid AS xid, n
      FROM pg_catalog.unnest(pg_catalog.string_to_array(
        CASE WHEN pass.n = 1
        THEN pg_catalog.current_setting('ingestd.commits', true) || '9223372036854775807:0' END,
        ','
      )) WITH ORDINALITY AS commits(pair, n)
    ) AS commits, (VALUES (1), (2)) AS kinds(kind)
    WHERE pass.n = 1 AND (kind = 1 OR xid <> '0'::xid)
    ORDER BY n, kind
  ) AS spans
  WHERE count <= {most} + 1
) AS span,
LATERAL (
  SELECT pg_catalog.decode('003c', 'hex')
    || CASE span.kind WHEN 1 THEN pg_catalog.xidsend('0'::xid) ELSE span.top END
    || pg_catalog.int8send(span.low) || pg_catalog.int8send(span.high) AS data
  WHERE span.kind > 0
  UNION ALL
  SELECT CASE WHEN span.kind = 0 THEN pg_catalog.decode('00', 'hex') || data ELSE data END
  FROM (
    SELECT data FROM {changes} WITH ORDINALITY AS change(lsn, xid, data, number)
    WHERE CASE span.kind
      WHEN 1 THEN number > span.low AND number < span.high AND NOT xid = ANY (span.streamed)
      WHEN 2 THEN xid = span.xid OR (pg_catalog.get_byte(data, 0) = pg_catalog.ascii('A')
        AND pg_catalog.substr(data, 2, 4) = span.top)
      ELSE CASE pg_catalog.get_byte(data, 0)
        WHEN pg_catalog.ascii('c') THEN pg_catalog.set_config('ingestd.commits',
          pg_catalog.concat(
            pg_catalog.current_setting('ingestd.commits', true), number, ':', xid, ','), true
          ) IS NOT NULL
        WHEN pg_catalog.ascii('S') THEN CASE WHEN pg_catalog.get_byte(data, 5) = 0 THEN true
          ELSE pg_catalog.set_config('ingestd.streamed', pg_catalog.concat_ws(',',
            NULLIF(pg_catalog.current_setting('ingestd.streamed', true), ''), xid), true
          ) IS NOT NULL END
        WHEN pg_catalog.ascii('A') THEN true
        WHEN pg_catalog.ascii('E') THEN true
        WHEN pg_catalog.ascii('R') THEN true
        ELSE false
      END
    END
    OFFSET 0
  ) AS found
) AS message
""")
"""The query that `reordered_drain.py` reads: one call of the function, its result scanned again.

Pass 0 returns the messages that come ahead. It records the Stream Commits, and the transactions
that have segments, in two settings, which must be empty before. Pass 1 has a span for the messages
between two of those commits that are in no segment, and one for each of those transactions; a
header before its messages identifies a span. Nothing reads the settings too early: each join is
LATERAL, the window functions separate the spans and `OFFSET 0` the messages, and results are not
cached for equal parameters (enable_memoize, off). The function takes no parameter from the joins,
so its result is rescanned, not computed again.
"""
CLEAR_SETTINGS = sql.SQL(
    "SELECT pg_catalog.set_config('ingestd.commits', '', false),"
    " pg_catalog.set_config('ingestd.streamed', '', false)"
)
