"""Predict runs that others have published, and write the page that shows both (docs/outside.md).

    mdcs outside
    mdcs outside --out page.md

Nothing is measured. A run is described by its model, batch, devices and network, in experiments/published.yaml, and planned and
replayed as any job.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

if __name__ == "__main__":  # as a script, from any folder and without being installed
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    from launch.place import require_alone

    require_alone(Path(__file__).name)

from experiments.outside_page import page

PAGE = Path(__file__).resolve().parents[1] / "docs" / "outside.md"


def main() -> int:
    parser = argparse.ArgumentParser(prog="mdcs outside", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=PAGE, help="file of the page (default: docs/outside.md)")
    out: Path = parser.parse_args().out
    out.write_text(page(), encoding="utf-8")
    print(f"the page is in {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
