"""The verbs, with one module for each: those of a subscription here, the others in packages.

A verb's module has ``add_arguments(parser)``. It adds the arguments and sets ``execute``, a coroutine function that takes the parsed
arguments and returns the exit status.
"""
