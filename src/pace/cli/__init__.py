"""The command line, `pace`: it parses, calls the library, and keeps a record of every run."""


def main() -> None:
    """The entry point of `pace` and of ``python -m pace``."""
    import sys

    try:
        from pace.cli.app import app
    except KeyboardInterrupt:  # while the modules load; later ones are the app's own to end
        sys.exit(130)
    app(prog_name="pace")
