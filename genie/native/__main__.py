"""`python -m genie.native [LIBRARY ...]`: compiles the C++ libraries before their first use."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from genie.errors import NativeBuildError
from genie.native.libraries import LIBRARIES, NO_COMPILER_EXIT_CODE, BuildCache, find_compiler


def main(arguments: Sequence[str] = ()) -> int:
    """Compile the named libraries, or all of them. Returns the exit code: 0 if all are built."""
    parser = argparse.ArgumentParser(
        prog="python -m genie.native", description="Compile the C++ libraries that are missing."
    )
    names_help = f"one of {', '.join(LIBRARIES)} (default: all)"
    parser.add_argument("libraries", nargs="*", metavar="library", help=names_help)
    names = parser.parse_args(arguments).libraries or list(LIBRARIES)
    unknown = [name for name in names if name not in LIBRARIES]
    if unknown:
        parser.error(f"unknown library {unknown[0]!r}")
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        BuildCache.of_this_installation().build_all(names)
    except NativeBuildError as error:
        sys.stderr.write(f"{error}\n")
        return NO_COMPILER_EXIT_CODE if find_compiler() is None else 1
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; finished object files are kept\n")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
