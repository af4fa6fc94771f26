"""``python -m planaria`` is the ``planaria`` command."""

from planaria.cli.main import main

if __name__ == "__main__":
    main()
