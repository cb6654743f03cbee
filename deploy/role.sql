-- The role that ingestd connects as: what it needs on one database, and nothing else.
-- Run it in that database as a superuser; again for more tables, which are added to those that it was
-- run for before. To take one out: ALTER PUBLICATION ... DROP TABLE, and REVOKE SELECT ON ... FROM role.
--
--   psql -d shop -v tables='public.orders, public.customers' -f deploy/role.sql
--   psql -d shop -c '\password ingestd'
--
-- Variables, by -v NAME=VALUE:
--   tables       which it may read: names as in SQL with their schemas, separated by commas (none of
--                theirs has one).
--                With manage=false none is published whose own UPDATE and DELETE that would make
--                fail: one without replica identity. The script then says which, and does nothing
--   role         its name; ingestd
--   kind         of the source: wal, or polling, which needs SELECT alone; wal
--   manage       as in the config. false: publication and slot are made here, and ingestd alters
--                neither; its config says so, too. true: ingestd makes and alters them. PostgreSQL
--                lets only owners put tables into a publication, so it then has what `owner` has; false
--   owner        with manage=true: the role that owns the tables, which is no superuser
--   publication, slot   with manage=false: their names; ingestd_shop
\set ON_ERROR_STOP on
-- First of all: a role that may create functions or types in a schema of the path must not decide what the
-- statements below call, as the superuser who runs them.
SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false) AS path \gset
\if :{?role}
\else
  \set role ingestd
\endif
\if :{?kind}
\else
  \set kind wal
\endif
\if :{?manage}
\else
  \set manage false
\endif
\if :{?publication}
\else
  \set publication ingestd_shop
\endif
\if :{?slot}
\else
  \set slot ingestd_shop
\endif

SELECT :'kind' <> 'polling' AS streams,
       :'kind' <> 'polling' AND :'manage'::boolean AS manages,
       :'kind' <> 'polling' AND NOT :'manage'::boolean AS publishes,
       current_setting('server_version_num')::int >= 160000 AS has_set,
       NOT EXISTS (SELECT FROM pg_roles WHERE rolname = :'role') AS is_new \gset

BEGIN;
\if :is_new
CREATE ROLE :"role" LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOBYPASSRLS;
\endif
\if :streams
ALTER ROLE :"role" REPLICATION;
\endif

GRANT CONNECT ON DATABASE :"DBNAME" TO :"role";
SELECT DISTINCT format('GRANT USAGE ON SCHEMA %s TO %I', c.relnamespace::regnamespace, :'role')
  FROM string_to_table(:'tables', ',') AS t(name)
  JOIN pg_class c ON c.oid = trim(t.name)::regclass \gexec
SELECT format('GRANT SELECT ON TABLE %s TO %I', trim(name)::regclass, :'role')
  FROM string_to_table(:'tables', ',') AS t(name) \gexec

\if :manages
GRANT CREATE ON DATABASE :"DBNAME" TO :"role";
\if :has_set
GRANT :"owner" TO :"role" WITH INHERIT TRUE, SET FALSE;
\else
GRANT :"owner" TO :"role";
\endif
\endif

\if :publishes
-- The server refuses UPDATE and DELETE of a published table without replica identity, as its identity
-- is all that is sent of the old row. Of a partitioned table that is a matter of its partitions; tables
-- that inherit are published with their parent.
WITH RECURSIVE named(oid) AS (
  SELECT trim(name)::regclass::oid FROM string_to_table(:'tables', ',') AS t(name)
), published(oid) AS (
  SELECT oid FROM named
  UNION
  SELECT i.inhrelid FROM published JOIN pg_inherits i ON i.inhparent = published.oid
), broken AS (
  SELECT c.oid::regclass::text AS name FROM published JOIN pg_class c USING (oid)
   WHERE c.relkind = 'r' AND c.relreplident <> 'f' AND NOT EXISTS (
         SELECT FROM pg_index i
          WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
            AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                    WHEN 'i' THEN i.indisreplident ELSE false END)
)
SELECT format('DO $do$ BEGIN RAISE EXCEPTION USING MESSAGE = %L, HINT = %L; END $do$',
         'without replica identity, publishing would make their UPDATE and DELETE fail: '
           || string_agg(name, ', ' ORDER BY name),
         'leave them out of `tables`, or first, for each: '
           || string_agg(format('ALTER TABLE %s REPLICA IDENTITY FULL;', name), ' ' ORDER BY name)
           || ' (or add a primary key that is not deferrable, then REPLICA IDENTITY DEFAULT)')
  FROM broken HAVING count(*) > 0 \gexec

-- What it has already stays as it is: row filters and lists of columns, too.
SELECT format(
         CASE WHEN p.oid IS NOT NULL THEN 'ALTER PUBLICATION %I ADD TABLE %s'
              ELSE 'CREATE PUBLICATION %I FOR TABLE %s WITH ('
                || 'publish = ''insert, update, delete, truncate'', '
                || 'publish_via_partition_root = true)'
         END,
         :'publication', string_agg(DISTINCT t.oid::text, ', '))
  FROM (SELECT trim(name)::regclass FROM string_to_table(:'tables', ',') AS t(name)) AS t(oid)
  LEFT JOIN pg_publication p ON p.pubname = :'publication'
 WHERE NOT coalesce(p.puballtables, false)
   AND NOT EXISTS (SELECT FROM pg_publication_rel r WHERE r.prpubid = p.oid AND r.prrelid = t.oid)
 GROUP BY p.oid \gexec
\endif
COMMIT;

\if :publishes
-- Not in the transaction: a slot begins after what is being written.
SELECT pg_catalog.pg_create_logical_replication_slot(:'slot', 'pgoutput')
 WHERE NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = :'slot');
\endif
