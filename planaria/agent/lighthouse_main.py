"""``python -m planaria.agent.lighthouse_main AGENT_PID BIND STORE [HTTP]``: a lighthouse that ends with its agent."""

from __future__ import annotations

import sys

from planaria.agent.parent import die_with_parent
from planaria.errors import PlanariaError
from planaria.lighthouse import server


def main(argv: list[str]) -> int:
    die_with_parent(int(argv[0]))
    try:
        server.run(server.Options(argv[1], argv[2], argv[3] if len(argv) > 3 else None))
    except PlanariaError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
