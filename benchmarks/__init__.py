"""The authors' own evaluation: scripts that measure or predict, and write pages of docs/ (`make help`)."""

from pathlib import Path


def page(name: str, **parts: object) -> str:
    """Fill the braces of a template of `benchmarks/pages/`. Return the page."""
    return Path(__file__).with_name("pages").joinpath(f"{name}.md").read_text(encoding="utf-8").format(**parts)
