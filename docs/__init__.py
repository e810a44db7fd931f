"""The pages, and the programs that make a site of them (``make docs``)."""
