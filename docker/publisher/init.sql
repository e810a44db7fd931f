-- Run once by the postgres image, as the superuser, in a new cluster's database "app".
-- psql's backquotes and not \getenv: psql 14 has no \getenv.
\set password `printf %s "$SUBSCRIBER_PASSWORD"`

-- all a subscription needs of a publisher: REPLICATION for the slot, SELECT for the copy
CREATE ROLE subscriber LOGIN REPLICATION PASSWORD :'password';

\ir ../schema.sql
GRANT SELECT ON accounts, transfers TO subscriber;

INSERT INTO accounts (owner, balance)
SELECT 'owner ' || number, 1000
FROM generate_series(1, 10000) AS number;

CREATE PUBLICATION app FOR TABLE accounts, transfers;
