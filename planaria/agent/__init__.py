"""The per-node supervisor: starts, watches and replaces the ranks, and links them to the lighthouse."""
