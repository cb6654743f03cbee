-- ddl_log = "event_trigger": event triggers that write DDL into the WAL, in order with the changes.
-- Run this script in the captured database as a role that can create event triggers (a superuser; on
-- managed services the administrator's role). Run it again for a newer version, or if `ingestd check`
-- asks for it; it is safe to run at any time. To remove everything, see the end.
--
--   ingestd check --config FILE      -- prints the script if it is missing
--   psql -d shop -f ddl_log.sql
--
-- It creates, all in the schema ingestd_ddl:
--   command_end, dropped, rewritten   functions of event triggers, ENABLE ALWAYS
--   truncating                        function of a statement trigger, ENABLE ALWAYS, on the root and the
--                                     partitions of each partitioned table in a publication. For later
--                                     ones command_end creates the trigger, as the role that creates them
-- Each event is one transactional logical message with the prefix 'ingestd.ddl'. A rolled back command
-- leaves none. The functions run with the privileges of the role whose command fires them, and need no
-- privilege on this schema. Every error in them is caught and logged by the server: the command continues.
BEGIN ISOLATION LEVEL READ COMMITTED;
SET LOCAL search_path = pg_catalog, pg_temp;
SET LOCAL lock_timeout = '2s';

-- First: if another role altered their functions, these would run in the commands below.
DROP EVENT TRIGGER IF EXISTS ingestd_ddl_command_end;
DROP EVENT TRIGGER IF EXISTS ingestd_ddl_dropped;
DROP EVENT TRIGGER IF EXISTS ingestd_ddl_rewritten;

DO $ingestd$
DECLARE
  other text;
BEGIN
  -- The owner of the schema or of a function in it controls code that runs in the commands of all roles.
  SELECT pg_catalog.pg_get_userbyid(owner) INTO other
    FROM (SELECT nspowner FROM pg_catalog.pg_namespace WHERE nspname = 'ingestd_ddl'
          UNION ALL
          SELECT p.proowner FROM pg_catalog.pg_proc p
            JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace AND n.nspname = 'ingestd_ddl'
         ) AS found(owner)
   WHERE owner <> current_user::regrole
     AND NOT (SELECT rolsuper FROM pg_catalog.pg_roles WHERE oid = owner)
   LIMIT 1;
  IF other IS NOT NULL THEN
    RAISE EXCEPTION USING
      MESSAGE = pg_catalog.format('schema ingestd_ddl, or a function in it, belongs to role %I', other),
      HINT = 'DROP EVENT TRIGGER IF EXISTS ingestd_ddl_command_end; '
             'DROP EVENT TRIGGER IF EXISTS ingestd_ddl_dropped; '
             'DROP EVENT TRIGGER IF EXISTS ingestd_ddl_rewritten; '
             'DROP SCHEMA ingestd_ddl CASCADE; and run this script again';
  END IF;
END $ingestd$;

CREATE SCHEMA IF NOT EXISTS ingestd_ddl;
REVOKE CREATE ON SCHEMA ingestd_ddl FROM PUBLIC;
GRANT USAGE ON SCHEMA ingestd_ddl TO PUBLIC;  -- for CREATE TRIGGER on partitions, by their owners
COMMENT ON SCHEMA ingestd_ddl IS 'ingestd ddl_log version 1';

CREATE OR REPLACE FUNCTION ingestd_ddl.command_end() RETURNS event_trigger
LANGUAGE plpgsql SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $ingestd$
DECLARE
  relation record;
  is_published boolean;
BEGIN
  BEGIN
    -- A column of a parent changes in its children, too, of which the server names none here.
    PERFORM pg_catalog.pg_logical_emit_message(true, 'ingestd.ddl', pg_catalog.json_strip_nulls(
        pg_catalog.json_build_object(
          'v', 1, 'kind', e.tag, 'what', e.what, 'oid', e.oid::bigint,
          'schema', n.nspname, 'name', c.relname,
          'root', CASE WHEN c.relispartition THEN pg_catalog.pg_partition_root(c.oid)::oid::bigint END,
          'types', CASE WHEN e.tag = 'ALTER TABLE' AND NOT c.relispartition THEN (
            SELECT pg_catalog.json_object_agg(a.attnum, a.atttypid::bigint)
              FROM pg_catalog.pg_attribute a
             WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) END,
          'leaves', CASE WHEN e.tag = 'ALTER TABLE' AND c.relkind = 'p' THEN (
            WITH RECURSIVE tree(oid, relkind) AS (
              SELECT r.oid, r.relkind FROM pg_catalog.pg_class r
               WHERE r.oid = pg_catalog.pg_partition_root(c.oid)
              UNION ALL
              SELECT k.oid, k.relkind FROM tree t
                JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid
                JOIN pg_catalog.pg_class k ON k.oid = i.inhrelid)
            SELECT coalesce(pg_catalog.json_agg(t.oid::bigint), '[]') FROM tree t
             WHERE t.relkind <> 'p') END))::text)
      FROM (WITH RECURSIVE altered(oid, tag, what) AS (
              SELECT d.objid, d.command_tag, d.object_type
                FROM pg_catalog.pg_event_trigger_ddl_commands() d
               WHERE d.classid = 'pg_catalog.pg_class'::regclass
                 AND d.object_type IN ('table', 'table column')
                 AND d.schema_name IS DISTINCT FROM 'pg_temp'
              UNION
              SELECT i.inhrelid, a.tag, a.what FROM altered a
                JOIN pg_catalog.pg_inherits i ON i.inhparent = a.oid
                JOIN pg_catalog.pg_class k ON k.oid = i.inhrelid AND NOT k.relispartition)
            SELECT * FROM altered) AS e
      JOIN pg_catalog.pg_class c ON c.oid = e.oid AND c.relpersistence <> 't'
      JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace;

    PERFORM pg_catalog.pg_logical_emit_message(true, 'ingestd.ddl', pg_catalog.json_strip_nulls(
        pg_catalog.json_build_object(
          'v', 1, 'kind', e.tag, 'what', e.what, 'oid', e.oid::bigint,
          'schema', n.nspname, 'name', t.typname,
          'labels', (SELECT pg_catalog.json_object_agg(l.oid::bigint, l.enumlabel)
                       FROM pg_catalog.pg_enum l WHERE l.enumtypid = t.oid)))::text)
      FROM (SELECT coalesce(c.reltype, d.objid), d.command_tag, d.object_type
              FROM pg_catalog.pg_event_trigger_ddl_commands() d
              LEFT JOIN pg_catalog.pg_class c
                     ON d.classid = 'pg_catalog.pg_class'::regclass AND c.oid = d.objid
             WHERE d.command_tag = 'ALTER TYPE' AND d.schema_name IS DISTINCT FROM 'pg_temp'
           ) AS e(oid, tag, what)
      JOIN pg_catalog.pg_type t ON t.oid = e.oid
      JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace;

    IF tg_tag IN ('ALTER SCHEMA', 'CREATE PUBLICATION', 'ALTER PUBLICATION') THEN
      PERFORM pg_catalog.pg_logical_emit_message(true, 'ingestd.ddl',
        pg_catalog.json_build_object('v', 1, 'kind', tg_tag, 'what', 'command', 'oid', 0)::text);
    END IF;
  EXCEPTION WHEN OTHERS THEN
    RAISE LOG 'ingestd_ddl.command_end: %', SQLERRM;
  END;

  IF pg_catalog.current_setting('ingestd.making_triggers', true) = 'on' THEN
    RETURN;  -- this is its own ALTER TABLE
  END IF;
  BEGIN
    PERFORM pg_catalog.set_config('ingestd.making_triggers', 'on', true);
    FOR relation IN
      WITH RECURSIVE below(oid) AS (
        SELECT * FROM (
          SELECT d.objid FROM pg_catalog.pg_event_trigger_ddl_commands() d
           WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.object_type = 'table'
             AND d.schema_name IS DISTINCT FROM 'pg_temp'
          UNION
          SELECT c.oid FROM pg_catalog.pg_class c
           WHERE tg_tag IN ('CREATE PUBLICATION', 'ALTER PUBLICATION')
             AND c.relkind = 'p' AND NOT c.relispartition) AS concerned
        UNION
        SELECT i.inhrelid FROM below JOIN pg_catalog.pg_inherits i ON i.inhparent = below.oid)
      SELECT c.oid, n.nspname, c.relname, NOT c.relispartition AS is_root,
             pg_catalog.pg_partition_root(c.oid)::oid AS root
        FROM (SELECT oid FROM below UNION
              SELECT pg_catalog.pg_partition_root(oid)::oid FROM below) AS b
        JOIN pg_catalog.pg_class c ON c.oid = b.oid AND c.relpersistence <> 't'
        JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
       WHERE CASE WHEN c.relispartition THEN c.relkind = 'r' ELSE c.relkind = 'p' END
         AND (SELECT count(*) FROM pg_catalog.pg_trigger g
               WHERE g.tgrelid = c.oid AND NOT g.tgisinternal  -- one that is disabled stays so
                 AND g.tgname IN ('ingestd_ddl_truncate', 'ingestd_ddl_truncated')
             ) < CASE WHEN c.relispartition THEN 1 ELSE 2 END
    LOOP
      is_published := EXISTS (SELECT FROM pg_catalog.pg_publication WHERE puballtables)
        OR EXISTS (SELECT FROM pg_catalog.pg_publication_rel WHERE prrelid = relation.root);
      IF NOT is_published AND pg_catalog.current_setting('server_version_num')::int >= 150000 THEN
        is_published := EXISTS (
          SELECT FROM pg_catalog.pg_publication_namespace s
            JOIN pg_catalog.pg_class r ON r.relnamespace = s.pnnspid AND r.oid = relation.root);
      END IF;
      CONTINUE WHEN NOT is_published;
      BEGIN
        -- Never wait, nor be waited for: a table that is in use gets its trigger another time.
        EXECUTE pg_catalog.format('LOCK TABLE ONLY %I.%I IN SHARE ROW EXCLUSIVE MODE NOWAIT',
                                  relation.nspname, relation.relname);
        EXECUTE pg_catalog.format(
          'CREATE OR REPLACE TRIGGER ingestd_ddl_truncate BEFORE TRUNCATE ON %I.%I '
          'FOR EACH STATEMENT EXECUTE FUNCTION ingestd_ddl.truncating()',
          relation.nspname, relation.relname);
        IF relation.is_root THEN
          EXECUTE pg_catalog.format(
            'CREATE OR REPLACE TRIGGER ingestd_ddl_truncated AFTER TRUNCATE ON %I.%I '
            'FOR EACH STATEMENT EXECUTE FUNCTION ingestd_ddl.truncating()',
            relation.nspname, relation.relname);
        END IF;
        EXECUTE pg_catalog.format(
          'ALTER TABLE ONLY %I.%I ENABLE ALWAYS TRIGGER ingestd_ddl_truncate%s',
          relation.nspname, relation.relname,
          CASE WHEN relation.is_root THEN ', ENABLE ALWAYS TRIGGER ingestd_ddl_truncated' END);
      EXCEPTION WHEN OTHERS THEN
        RAISE LOG 'ingestd_ddl.command_end: no trigger on %.%: %',
          relation.nspname, relation.relname, SQLERRM;
      END;
    END LOOP;
    PERFORM pg_catalog.set_config('ingestd.making_triggers', '', true);
  EXCEPTION WHEN OTHERS THEN
    RAISE LOG 'ingestd_ddl.command_end: %', SQLERRM;
  END;
END $ingestd$;

CREATE OR REPLACE FUNCTION ingestd_ddl.dropped() RETURNS event_trigger
LANGUAGE plpgsql SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $ingestd$
BEGIN
  PERFORM pg_catalog.pg_logical_emit_message(true, 'ingestd.ddl', pg_catalog.json_build_object(
      'v', 1, 'kind', tg_tag,
      'what', CASE WHEN d.objsubid = 0 THEN 'dropped table' ELSE 'dropped column' END,
      'oid', d.objid::bigint, 'schema', d.address_names[1], 'name', d.address_names[2])::text)
    FROM (SELECT DISTINCT objid, least(objsubid, 1) AS objsubid, address_names[1:2] AS address_names
            FROM pg_catalog.pg_event_trigger_dropped_objects()
           WHERE object_type IN ('table', 'table column') AND NOT is_temporary) AS d;
EXCEPTION WHEN OTHERS THEN
  RAISE LOG 'ingestd_ddl.dropped: %', SQLERRM;
END $ingestd$;

CREATE OR REPLACE FUNCTION ingestd_ddl.rewritten() RETURNS event_trigger
LANGUAGE plpgsql SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $ingestd$
BEGIN
  PERFORM pg_catalog.pg_logical_emit_message(true, 'ingestd.ddl', pg_catalog.json_strip_nulls(
      pg_catalog.json_build_object(
        'v', 1, 'kind', tg_tag, 'what', 'rewrite', 'oid', c.oid::bigint,
        'schema', n.nspname, 'name', c.relname,
        'root', CASE WHEN c.relispartition THEN pg_catalog.pg_partition_root(c.oid)::oid::bigint END,
        'why', pg_catalog.pg_event_trigger_table_rewrite_reason()))::text)
    FROM pg_catalog.pg_class c
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
   WHERE c.oid = pg_catalog.pg_event_trigger_table_rewrite_oid() AND c.relpersistence <> 't';
EXCEPTION WHEN OTHERS THEN
  RAISE LOG 'ingestd_ddl.rewritten: %', SQLERRM;
END $ingestd$;

-- The stream already contains a TRUNCATE of the root, so its partitions must not write a message: a
-- setting names the root from its BEFORE trigger until its AFTER trigger.
CREATE OR REPLACE FUNCTION ingestd_ddl.truncating() RETURNS trigger
LANGUAGE plpgsql SECURITY INVOKER SET search_path = pg_catalog, pg_temp AS $ingestd$
DECLARE
  root oid := pg_catalog.pg_partition_root(tg_relid);
BEGIN
  IF tg_when = 'AFTER' THEN
    PERFORM pg_catalog.set_config('ingestd.truncating', '', true);
  ELSIF root = tg_relid THEN
    PERFORM pg_catalog.set_config('ingestd.truncating', root::text, true);
  ELSIF pg_catalog.current_setting('ingestd.truncating', true) IS DISTINCT FROM root::text THEN
    PERFORM pg_catalog.pg_logical_emit_message(true, 'ingestd.ddl', pg_catalog.json_build_object(
      'v', 1, 'kind', 'TRUNCATE', 'what', 'truncate', 'oid', tg_relid::bigint,
      'schema', tg_table_schema, 'name', tg_table_name, 'root', root::bigint)::text);
  END IF;
  RETURN NULL;
EXCEPTION WHEN OTHERS THEN
  RAISE LOG 'ingestd_ddl.truncating: %', SQLERRM;
  RETURN NULL;
END $ingestd$;

DO $ingestd$
DECLARE
  other text;
BEGIN
  -- Again, as another role may have created the schema since then, and a replaced function keeps its owner.
  SELECT pg_catalog.pg_get_userbyid(owner) INTO other
    FROM (SELECT nspowner FROM pg_catalog.pg_namespace WHERE nspname = 'ingestd_ddl'
          UNION ALL
          SELECT p.proowner FROM pg_catalog.pg_proc p
            JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace AND n.nspname = 'ingestd_ddl'
         ) AS found(owner)
   WHERE owner <> current_user::regrole
     AND NOT (SELECT rolsuper FROM pg_catalog.pg_roles WHERE oid = owner)
   LIMIT 1;
  IF other IS NOT NULL THEN
    RAISE EXCEPTION USING
      MESSAGE = pg_catalog.format('schema ingestd_ddl, or a function in it, belongs to role %I', other),
      HINT = 'DROP EVENT TRIGGER IF EXISTS ingestd_ddl_command_end; '
             'DROP EVENT TRIGGER IF EXISTS ingestd_ddl_dropped; '
             'DROP EVENT TRIGGER IF EXISTS ingestd_ddl_rewritten; '
             'DROP SCHEMA ingestd_ddl CASCADE; and run this script again';
  END IF;
END $ingestd$;

CREATE EVENT TRIGGER ingestd_ddl_command_end ON ddl_command_end
  WHEN TAG IN ('ALTER PUBLICATION', 'ALTER SCHEMA', 'ALTER TABLE', 'ALTER TYPE', 'CREATE PUBLICATION',
               'CREATE SCHEMA', 'CREATE TABLE', 'CREATE TABLE AS', 'SELECT INTO')
  EXECUTE FUNCTION ingestd_ddl.command_end();
ALTER EVENT TRIGGER ingestd_ddl_command_end ENABLE ALWAYS;
CREATE EVENT TRIGGER ingestd_ddl_dropped ON sql_drop EXECUTE FUNCTION ingestd_ddl.dropped();
ALTER EVENT TRIGGER ingestd_ddl_dropped ENABLE ALWAYS;
CREATE EVENT TRIGGER ingestd_ddl_rewritten ON table_rewrite EXECUTE FUNCTION ingestd_ddl.rewritten();
ALTER EVENT TRIGGER ingestd_ddl_rewritten ENABLE ALWAYS;
COMMIT;

-- Triggers on existing tables. Writes to a table wait while its trigger is created. So the script waits
-- only briefly for locks: a table that stays locked is skipped with a warning.
DO $ingestd$
DECLARE
  relation record;
  is_published boolean;
BEGIN
  PERFORM pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', true);
  PERFORM pg_catalog.set_config('lock_timeout', '100ms', true);
  -- psql continues after an error: the function may be that of another role.
  IF NOT EXISTS (
    SELECT FROM pg_catalog.pg_proc p
      JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
      JOIN pg_catalog.pg_roles f ON f.oid = p.proowner AND (f.rolsuper OR f.rolname = current_user)
      JOIN pg_catalog.pg_roles s ON s.oid = n.nspowner AND (s.rolsuper OR s.rolname = current_user)
     WHERE p.oid = pg_catalog.to_regprocedure('ingestd_ddl.truncating()')) THEN
    RAISE EXCEPTION 'no triggers on tables: ingestd_ddl.truncating() is missing, or is not this role''s'
      USING HINT = 'see the error before this one';
  END IF;
  FOR relation IN
    WITH RECURSIVE tree(oid, root) AS (
      SELECT oid, oid FROM pg_catalog.pg_class WHERE relkind = 'p' AND NOT relispartition
      UNION ALL
      SELECT i.inhrelid, t.root FROM tree t JOIN pg_catalog.pg_inherits i ON i.inhparent = t.oid)
    SELECT n.nspname, c.relname, NOT c.relispartition AS is_root, t.root, r.relnamespace
      FROM tree t
      JOIN pg_catalog.pg_class r ON r.oid = t.root
      JOIN pg_catalog.pg_class c ON c.oid = t.oid AND c.relpersistence <> 't'
      JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
     WHERE CASE WHEN c.relispartition THEN c.relkind = 'r' ELSE c.relkind = 'p' END
       AND (SELECT count(*) FROM pg_catalog.pg_trigger g
             WHERE g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgenabled = 'A' AND g.tgqual IS NULL
               AND g.tgtype = CASE g.tgname WHEN 'ingestd_ddl_truncate' THEN 34   -- BEFORE TRUNCATE
                                            WHEN 'ingestd_ddl_truncated' THEN 32 END  -- AFTER TRUNCATE
               AND g.tgfoid = 'ingestd_ddl.truncating'::regproc
           ) < CASE WHEN c.relispartition THEN 1 ELSE 2 END
  LOOP
    is_published := EXISTS (SELECT FROM pg_catalog.pg_publication WHERE puballtables)
      OR EXISTS (SELECT FROM pg_catalog.pg_publication_rel WHERE prrelid = relation.root);
    IF NOT is_published AND pg_catalog.current_setting('server_version_num')::int >= 150000 THEN
      is_published := EXISTS (SELECT FROM pg_catalog.pg_publication_namespace
                               WHERE pnnspid = relation.relnamespace);
    END IF;
    CONTINUE WHEN NOT is_published;
    BEGIN
      EXECUTE pg_catalog.format(
        'CREATE OR REPLACE TRIGGER ingestd_ddl_truncate BEFORE TRUNCATE ON %I.%I '
        'FOR EACH STATEMENT EXECUTE FUNCTION ingestd_ddl.truncating()',
        relation.nspname, relation.relname);
      IF relation.is_root THEN
        EXECUTE pg_catalog.format(
          'CREATE OR REPLACE TRIGGER ingestd_ddl_truncated AFTER TRUNCATE ON %I.%I '
          'FOR EACH STATEMENT EXECUTE FUNCTION ingestd_ddl.truncating()',
          relation.nspname, relation.relname);
      END IF;
      EXECUTE pg_catalog.format(
        'ALTER TABLE ONLY %I.%I ENABLE ALWAYS TRIGGER ingestd_ddl_truncate%s',
        relation.nspname, relation.relname,
        CASE WHEN relation.is_root THEN ', ENABLE ALWAYS TRIGGER ingestd_ddl_truncated' END);
    EXCEPTION WHEN OTHERS THEN
      RAISE WARNING 'no trigger on %.%: %', relation.nspname, relation.relname, SQLERRM
        USING HINT = 'run this script again';
    END;
  END LOOP;
END $ingestd$;

-- To remove everything, with the triggers (this waits for sessions that use the tables); the event
-- triggers first, so that none of them runs:
--   DROP EVENT TRIGGER IF EXISTS ingestd_ddl_command_end;
--   DROP EVENT TRIGGER IF EXISTS ingestd_ddl_dropped;
--   DROP EVENT TRIGGER IF EXISTS ingestd_ddl_rewritten;
--   DROP SCHEMA ingestd_ddl CASCADE;
