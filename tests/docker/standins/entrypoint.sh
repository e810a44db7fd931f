#!/bin/bash
# Does what the entry point of the official postgres image is documented to do, as far as docker/ and the tests use it.
set -euo pipefail

if [ "${1:0:1}" = - ]; then
    set -- postgres "$@"
fi
if [ "$1" != postgres ]; then
    exec "$@"
fi

if [ "$(id -u)" = 0 ]; then
    mkdir -p "$PGDATA"
    chown -R postgres:postgres "$PGDATA"
    chmod 700 "$PGDATA"
    exec setpriv --reuid=postgres --regid=postgres --init-groups -- "$0" "$@"
fi

if [ ! -s "$PGDATA/PG_VERSION" ]; then
    user=${POSTGRES_USER:-postgres}
    database=${POSTGRES_DB:-$user}
    if [ -z "${POSTGRES_PASSWORD:-}" ] && [ "${POSTGRES_HOST_AUTH_METHOD:-}" != trust ]; then
        echo 'Error: Database is uninitialized and superuser password is not specified.' >&2
        exit 1
    fi
    # shellcheck disable=SC2086 # several arguments in one variable, as in the official image
    initdb --pgdata="$PGDATA" --username="$user" --encoding=UTF8 --locale=C.UTF-8 \
        --pwfile=<(printf '%s\n' "${POSTGRES_PASSWORD:-}") ${POSTGRES_INITDB_ARGS:-}
    printf '\nhost all all all %s\n' "${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}" >> "$PGDATA/pg_hba.conf"
    # while the scripts run, only the socket is there
    pg_ctl --pgdata="$PGDATA" --options="$(printf '%q ' "${@:2}" -c listen_addresses='')" --wait start
    sql=(psql --set=ON_ERROR_STOP=1 --no-psqlrc --no-password --username="$user")
    if [ "$database" != postgres ]; then
        "${sql[@]}" --dbname=postgres --set=name="$database" <<< 'CREATE DATABASE :"name";'
    fi
    for script in /docker-entrypoint-initdb.d/*; do
        case $script in
            *.sh) if [ -x "$script" ]; then "$script"; else . "$script"; fi ;;
            *.sql) "${sql[@]}" --dbname="$database" --file="$script" ;;
            *.sql.gz) gunzip --stdout "$script" | "${sql[@]}" --dbname="$database" ;;
        esac
    done
    pg_ctl --pgdata="$PGDATA" --mode=fast --wait stop
    echo 'PostgreSQL init process complete; ready for start up.'
fi
exec "$@"
