# Stands in for python:3.13-slim-bookworm: CPython of Debian, as `python` with pip in /usr/local.
ARG BASE
FROM ${BASE}
ENV DEBIAN_FRONTEND=noninteractive
RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3.13 python3.13-dev python3.13-venv \
    && rm -rf /var/lib/apt/lists/* \
    && python3.13 -m venv /usr/local
# how this machine reaches the package index; the official image has no such file
COPY pip.conf /etc/pip.conf
CMD ["python3"]
