"""A sweep as one HTML page that needs nothing beside it: opened from a disk, without a network or a server.

`contents` says what is in it, `figures` are Plotly's; `page.html`, `page.css` and `page.js` are what the browser gets, with
Plotly's own JavaScript, which is most of the file.
"""

from __future__ import annotations

import html
from pathlib import Path
from string import Template

import pandas as pd

from analysis.page.contents import contents

_HERE = Path(__file__).resolve().parent


def write_page(frame: pd.DataFrame, path: str | Path, title: str = "sweep") -> Path:
    """Write the page of the runs in `frame` (:func:`analysis.runs`) and return its path.

    Raises ModuleNotFoundError without the plotly package.
    """
    try:
        from plotly.io.json import to_json_plotly
        from plotly.offline import get_plotlyjs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("the page is drawn by Plotly: pip install plotly") from error
    path = Path(path)
    page, css, js = (_HERE.joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    data = to_json_plotly(contents(frame))  # which writes what is not finite as null, and no "<"
    text = Template(page).substitute(title=html.escape(title), css=css, js=js, plotly=get_plotlyjs(), data=data)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
