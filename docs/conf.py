"""Sphinx: the pages of this folder, with the reference of options made from conf/ and the schema that checks it.

The pages are Markdown that is read as well without Sphinx; `make docs` builds them, and warnings are errors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import options_reference  # noqa: E402  # beside this file

from analysis.report import run_notebooks  # noqa: E402

project = "mdcs"
author = "the mdcs authors"
extensions = ["myst_nb", "sphinx.ext.autodoc"]
nb_execution_mode = "off"  # `setup` has run them
exclude_patterns = ["_build", "dev"]
html_theme = "furo"
html_title = "mdcs"
html_show_copyright = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"


def setup(app: Any) -> None:
    """Make the generated pages before pages are read."""
    (HERE / "options.md").write_text(options_reference.page(), encoding="utf-8")
    left_out = [f"{path.name}: {reason}" for path, reason in run_notebooks(None, HERE / "notebooks") if reason]
    assert not left_out, left_out
