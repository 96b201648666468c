"""``python -m autospec`` is ``autospec``."""

from autospec.cli import main

if __name__ == "__main__":
    main()
