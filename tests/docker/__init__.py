"""Containers: ``make test-docker``. Nothing here runs with other commands."""
