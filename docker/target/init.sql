-- Run once by the postgres image, as the superuser, in a new cluster.
-- One database a publisher version: their tables have the same names.
\set password `printf %s "$SUBSCRIBER_PASSWORD"`

CREATE ROLE subscriber LOGIN PASSWORD :'password';
-- replicated rows fire no triggers and check no foreign keys again
GRANT SET ON PARAMETER session_replication_role TO subscriber;

CREATE DATABASE from14 OWNER subscriber;
CREATE DATABASE from15 OWNER subscriber;
CREATE DATABASE from16 OWNER subscriber;
CREATE DATABASE from17 OWNER subscriber;
CREATE DATABASE from18 OWNER subscriber;

-- the tables belong to the role that writes them
\connect from14
SET ROLE subscriber;
\ir ../schema.sql
\connect from15
SET ROLE subscriber;
\ir ../schema.sql
\connect from16
SET ROLE subscriber;
\ir ../schema.sql
\connect from17
SET ROLE subscriber;
\ir ../schema.sql
\connect from18
SET ROLE subscriber;
\ir ../schema.sql
