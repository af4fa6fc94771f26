"""To be deleted once ``agent.py`` imports it from its place."""

from planaria.core.told import Told as Told
