"""``python -m planaria.train CONFIG.toml [--section.key value]``: one rank of the training, or all of it alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from planaria.errors import PlanariaError, UsageError
from planaria.train.config import load


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        raise UsageError("python -m planaria.train needs a configuration: CONFIG.toml [--section.key value]")
    config = load(Path(sys.argv[1]), sys.argv[2:])
    from planaria.train.loop import train  # torch: not before the configuration is known to be good

    train(config)


if __name__ == "__main__":
    try:
        main()
    except PlanariaError as error:
        if "PLANARIA_SOCKET" in os.environ:
            raise  # the rank's process tells it, and writes it down
        print(f"planaria: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
