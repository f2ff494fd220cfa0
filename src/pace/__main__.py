"""``python -m pace`` is `pace`."""

from pace.cli import main

if __name__ == "__main__":
    main()
