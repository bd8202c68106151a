"""python -m moestream: the command line."""

import sys

from moestream.cli import main

if __name__ == "__main__":
    sys.exit(main())
