-- Creates the role that ingestd connects as, with the least privileges for one database.
-- Run it in that database as a superuser. Run it again to add tables to those of earlier runs. To remove
-- a table: ALTER PUBLICATION ... DROP TABLE, and REVOKE SELECT ON ... FROM role.
--
--   psql -d shop -v tables='public.orders, public.customers' -f deploy/role.sql
--   psql -d shop -c '\password ingestd'
--
-- Variables, set by -v NAME=VALUE:
--   tables       the tables to read: names as in SQL, with their schemas, separated by commas (names
--                that contain a comma are not supported).
--                With manage=false, a table without replica identity is not published, because the
--                server would then refuse its UPDATE and DELETE: the script names it and changes nothing
--   role         the role's name; default ingestd
--   kind         the source's kind: wal, or polling, which needs only SELECT; default wal
--   manage       as in the config. false: the script creates publication and slot, and ingestd alters
--                neither; set manage = false in its config too. true: ingestd creates and alters them.
--                Only a table's owner can add it to a publication, so the role then becomes a member of
--                `owner`; default false
--   owner        with manage=true: the role that owns the tables; not a superuser
--   publication, slot   with manage=false: their names; default ingestd_shop
\set ON_ERROR_STOP on
-- Must come first: otherwise a role that can create functions or types in a schema of the search path
-- could make the statements below call them, with the privileges of the superuser.
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
-- The server refuses UPDATE and DELETE of a published table without replica identity, as only the
-- identity of the old row is sent. For a partitioned table its partitions count; tables that inherit are
-- published with their parent.
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
         'remove them from `tables`, or first, for each: '
           || string_agg(format('ALTER TABLE %s REPLICA IDENTITY FULL;', name), ' ' ORDER BY name)
           || ' (or add a primary key that is not deferrable, then REPLICA IDENTITY DEFAULT)')
  FROM broken HAVING count(*) > 0 \gexec

-- Tables already in the publication are not changed, nor are their row filters and column lists.
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
-- Outside the transaction: PostgreSQL refuses to create a logical slot in one that has written.
SELECT pg_catalog.pg_create_logical_replication_slot(:'slot', 'pgoutput')
 WHERE NOT EXISTS (SELECT FROM pg_replication_slots WHERE slot_name = :'slot');
\endif
