"""Groups as actors of Ray Core."""
