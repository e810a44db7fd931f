"""The verbs about the program itself: its configuration, its help, a bundle for support."""
