"""What happened to a run and why, from the records that it leaves in its directory: ``planaria explain``."""
