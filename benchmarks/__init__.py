"""The authors' own evaluation: scripts that measure or predict, and write pages of docs/ (`make help`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"


def parser(about: str | None) -> argparse.ArgumentParser:
    """Return the parser of a script's command line, with `--out`, the folder of what it writes."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--out", type=Path, default=DOCS, help="folder of the page and its data (default: docs)")
    return made


def page(name: str, **parts: object) -> str:
    """Fill the braces of a template of `benchmarks/pages/`. Return the page."""
    return Path(__file__).with_name("pages").joinpath(f"{name}.md").read_text(encoding="utf-8").format(**parts)


def percent(fraction: float) -> str:
    """A difference, with its sign."""
    return f"{fraction * 100:+.1f} %"


def write(path: Path, text: str) -> None:
    """Write a file, and say so."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {path}")


def part(folder: Path, name: str) -> str:
    """Return the part of predictions.md that a script writes, without the comment that begins it. Empty without one."""
    path = folder / "predictions.md"
    _, *parts = path.read_text(encoding="utf-8").split("\n<!-- make ") if path.exists() else [""]
    return {begins: text for begins, _, text in (each.partition(" -->\n\n") for each in parts)}.get(name, "")


def write_part(folder: Path, name: str, text: str) -> None:
    """Replace a script's part of predictions.md. Append it where there is none."""
    path, before = folder / "predictions.md", part(folder, name)
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    write(path, page.replace(before, text) if before else f"{page}\n<!-- make {name} -->\n\n{text}")


def resumed(
    path: Path, settings: dict[str, Any], points: Sequence[dict[str, Any]], compute: Callable[..., dict[str, Any]]
) -> dict[str, Any]:
    """Compute a result for each point, as `compute(**point)`, and keep it in a JSON file after each one. Return the
    document: `settings`, and `points`, each with its result. A repeated call computes only what the file does not have
    yet; a file of other settings begins anew.
    """
    known: dict[str, Any] = {}
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        if before["settings"] == json.loads(json.dumps(settings)):
            known = {json.dumps(each["point"]): each for each in before["points"]}
    for point in points:
        key = json.dumps(point)
        if key not in known:
            known[key] = {"point": point, **compute(**point)}
            print(f"{point}: done", flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            rows = ",\n".join(json.dumps(each) for each in known.values())
            path.write_text(f'{{"settings": {json.dumps(settings)},\n"points": [\n{rows}\n]}}\n', encoding="utf-8")
    return {"settings": settings, "points": [known[json.dumps(point)] for point in points]}
