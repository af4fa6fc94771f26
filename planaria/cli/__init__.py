"""The ``planaria`` command line."""
