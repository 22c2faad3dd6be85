"""The command line of the programs that have no job to compose, and run in one process."""

from __future__ import annotations

import argparse

from launch.place import require_alone


def parser(program: str, about: str | None) -> argparse.ArgumentParser:
    """A parser of flags, whose help begins with the program's docstring. Exits as one of several ranks."""
    require_alone(f"mdcs {program}")
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog=f"mdcs {program}", description=about, formatter_class=form)
