"""`make bench`: the whole suite, with the peers that need a compiler.

    python benchmarks/full.py --json FILE [the options of python -m convt_reduce bench]

The protocol, the cases and the other peers are the package's. Run it from a folder that holds no
convt_reduce, so that the installed one is measured.
"""

import argparse
import sys
from pathlib import Path

import native_peers
import torch

from convt_reduce._bench import _cli

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> int:
    """Runs every case unless --filter picks some."""
    parser = argparse.ArgumentParser(prog="benchmarks/full.py", description=__doc__)
    _cli.add_arguments(parser)
    options = parser.parse_args()
    options.full = True
    if options.device == "cpu" or options.list or not torch.cuda.is_available():
        return _cli.main(options, repository=REPOSITORY)
    builds = native_peers.Builds()
    try:
        return _cli.main(
            options,
            more_peers=native_peers.peers(builds),
            # While the compilers work, nothing that the host's speed could change is measured.
            last=lambda case: case.group in ("headline", "training", "small", "host", "cpu"),
            repository=REPOSITORY,
            notes=lambda: {"build_s": builds.seconds()},
        )
    finally:
        builds.stop()


if __name__ == "__main__":
    sys.exit(main())
