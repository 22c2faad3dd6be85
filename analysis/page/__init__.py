"""A sweep as one HTML page that needs nothing beside it: opened from a disk, without a network or a server.

`contents` says what is in it, `figures` are Plotly's; `page.html`, `page.css` and `page.js` are what the browser gets, with
Plotly's own JavaScript, which is most of the file.
"""

from __future__ import annotations

import html
import json
import math
from pathlib import Path
from string import Template
from typing import Any

import pandas as pd

from analysis.page.contents import contents

_HERE = Path(__file__).resolve().parent


def write_page(frame: pd.DataFrame, path: str | Path, title: str = "sweep") -> Path:
    """Write the page of the runs in `frame` (:func:`analysis.runs`) and return its path.

    Raises ModuleNotFoundError without the plotly package.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the page is drawn by Plotly: pip install plotly") from error
    path = Path(path)
    text = Template(_read("page.html")).substitute(
        title=html.escape(title),
        css=_read("page.css"),
        js=_read("page.js"),
        plotly=get_plotlyjs(),
        data=json.dumps(_plain(contents(frame)), separators=(",", ":"), allow_nan=False).replace("</", r"<\/"),
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _read(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _plain(value: Any) -> Any:
    """Containers and numbers that JSON has: what is not finite is null, floats have six digits."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, pd.Series)):
        return [_plain(each) for each in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
