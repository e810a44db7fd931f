# Stands in for postgres:VERSION-bookworm. The context has the server that the tests install, in server/, and the client programs, in client/.
ARG BASE
FROM ${BASE}
ARG VERSION
ARG RELEASE
LABEL org.opencontainers.image.title="stand-in for postgres:${VERSION}-bookworm" org.opencontainers.image.version="${RELEASE}"
# what the official image has: its user, its directories, its entry point's variables
RUN groupadd --system --gid 999 postgres \
    && useradd --system --gid postgres --uid 999 --home-dir /var/lib/postgresql --shell /bin/bash postgres \
    && install --directory --owner=postgres --group=postgres --mode=1777 /var/lib/postgresql /var/lib/postgresql/data \
    && install --directory --owner=postgres --group=postgres --mode=3777 /var/run/postgresql \
    && mkdir /docker-entrypoint-initdb.d
COPY server /usr/lib/postgresql/server
COPY client /usr/lib/postgresql/client
RUN server=$(find /usr/lib/postgresql/server -path '*bin/postgres') \
    && client=$(find /usr/lib/postgresql/client -path '*bin/psql') \
    && mkdir /usr/lib/postgresql/${VERSION} \
    && ln -s "$(dirname "$server")" /usr/lib/postgresql/${VERSION}/bin \
    && ln -s "$client" "$(dirname "$client")/pg_isready" /usr/local/bin/ \
    && sed --in-place "s/^#listen_addresses = 'localhost'/listen_addresses = '*'/" \
        "$(find /usr/lib/postgresql/server -name postgresql.conf.sample)"
COPY entrypoint.sh /usr/local/bin/docker-entrypoint.sh
ARG DATA
ARG VOLUME
ENV PATH=/usr/lib/postgresql/${VERSION}/bin:$PATH \
    LANG=C.UTF-8 \
    PG_MAJOR=${VERSION} \
    PGDATA=${DATA}
VOLUME ${VOLUME}
STOPSIGNAL SIGINT
EXPOSE 5432
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["postgres"]
