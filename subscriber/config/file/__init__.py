"""The configuration file: its keys (``sections``), how it is read (``configuration``), and its JSON schema for editors (``json_schema``).

Pure: the text of the file is given, and what its references name (``env:NAME``, ``file:PATH``) is read by the caller. Import names from
the modules: each start of the program needs the sections, but few starts read a file.
"""
