"""Whole control planes in one process, under a seeded scheduler and a virtual clock.

The state machines of ``planaria.core`` are the real ones. Around them, everything that can go wrong is modelled:
links (``network``), the coordinator's shell and its store (``coordinator``), the agents (``supervisor``), the ranks
with their training loop (``trainer``) and the communicators between them (``fabric``). ``invariants`` holds the
promise that every run is checked against. ``python -m planaria.sim --seeds 2000`` runs many seeds.
"""
