"""What a script's job object says of its process' place in the job, whatever the front."""

from __future__ import annotations

from planaria.rank.settings import Settings


class Place:
    """A front's job is one of these."""

    settings: Settings

    @property
    def shards(self) -> int:
        """That make up the global batch of every step."""
        return self.settings.shards

    @property
    def group(self) -> int:
        return self.settings.born.group

    @property
    def seed(self) -> int:
        return self.settings.seed

    @property
    def alone(self) -> bool:
        """Whether the script runs without ``planaria run``: a job of one group, with the same bits."""
        return self.settings.socket is None
