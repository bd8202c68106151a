"""python -m moestream: the command line."""

import sys

from moestream_program import main

if __name__ == "__main__":
    sys.exit(main())
