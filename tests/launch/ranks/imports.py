"""Ranks that write who forked them and whether a module is there already (`told{rank}`), and then change their process."""

import os
import sys
from pathlib import Path

there = "wave" in sys.modules
import wave  # noqa: E402, F401

changed = os.environ.get("MDCS_CHANGED", "")
os.environ["MDCS_CHANGED"] = "yes"
Path(sys.argv[1], f"told{os.environ['RANK']}").write_text(f"{os.getppid()} {there} {changed or 'no'}")
