"""Faults at random, for a given time: ``python -m tests.chaos`` (``make chaos``).

A round takes an empty publisher and an empty target, lets ``subscriber run`` copy and follow the mixed load, and causes faults:
in the network (:mod:`tests.support.proxy`, :mod:`tests.chaos.network`), in messages (:mod:`tests.chaos.forgeries`), by errors of the
servers (:mod:`tests.chaos.refusals`), and in the process. Storms alternate with calms. In a calm the subscription must make progress
until it has caught up. At the end of a round all rows must be equal.
"""
