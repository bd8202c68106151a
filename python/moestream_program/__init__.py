"""The program `moestream`: the command line of the package of that name.

A package of its own, because everything is imported inside the try: Ctrl-C ends the program without a traceback during
the imports, too, which take most of its first moments. Imports nothing else by itself.
"""


def main() -> int:
    """Runs one command; returns the exit status, 130 where it was interrupted."""
    try:
        from moestream.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130
