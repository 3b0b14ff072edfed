"""``python -m upgd``: the same as the command ``upgd``."""

from upgd.cli import main

if __name__ == "__main__":
    main()
