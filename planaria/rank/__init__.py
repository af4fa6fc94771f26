"""What every rank has whatever it trains with: its link to the agent, its membership, the words of a step, its traces.

A front (``planaria.torch``, ``planaria.jax``) brings what is in ``front.py``.
"""
