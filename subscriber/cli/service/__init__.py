"""What the program needs as a service: its configuration file, its log, and its words with systemd."""
