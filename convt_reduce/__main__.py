"""``python -m convt_reduce info | demo | bench``."""

import argparse
import sys


def main(arguments: list[str] | None = None) -> int:
    """Runs one subcommand; returns the exit status."""
    # The benchmark has options of its own, and what they are is known where it is.
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(prog="python -m convt_reduce", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="versions, the build, and whether each GPU is covered")
    commands.add_parser("demo", help="KernelBench level 2 problem 44, PyTorch against this package")
    bench = commands.add_parser("bench", help="times against the memory's and against other ways")
    # Imported late, so that a wrong command line answers at once.
    if arguments[:1] == ["bench"]:
        from convt_reduce._bench import _cli

        _cli.add_arguments(bench)
        return _cli.main(parser.parse_args(arguments))
    command = parser.parse_args(arguments).command
    if command == "info":
        from convt_reduce import _info

        return _info.main()
    from convt_reduce import _demo

    return _demo.main()


if __name__ == "__main__":
    sys.exit(main())
