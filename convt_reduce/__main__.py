"""``python -m convt_reduce info | demo``."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m convt_reduce", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, the build, and whether each GPU is covered")
    commands.add_parser("demo", help="KernelBench level 2 problem 44, PyTorch against this package")
    command = parser.parse_args(arguments).command
    # Imported late, so that a wrong command line answers at once.
    if command == "info":
        from convt_reduce import _info

        return _info.main()
    from convt_reduce import _demo

    return _demo.main()


if __name__ == "__main__":
    sys.exit(main())
