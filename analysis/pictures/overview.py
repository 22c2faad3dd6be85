"""The picture of a whole sweep: the trade-off curve beside step time over budget."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import questions as ask
from analysis.pictures import budget, setting, style
from analysis.pictures import schedule_share as tradeoff


@style.styled
def overview(frame: pd.DataFrame, model: str | None = None) -> Figure:
    """Left the trade-off curve over schedule_share, right step time over budget; one of them if the sweep varies
    only one, and step time over another number if it varies that alone. Raises ValueError if there is nothing to draw."""
    workload, rows = budget.choose_workload(frame, model)
    curves = ask.share_curves(rows)
    if not curves and not ask.has_budget_axis(rows) and ask.setting_axis(rows) is not None:
        return setting.step_time_over_setting(rows)
    if not curves:
        return budget.step_time_over_budget(rows)
    if not ask.has_budget_axis(rows):
        return tradeoff.tradeoff_curve(rows)

    curve = curves[0]
    looks = style.look(ask.series(pd.concat([ask.drawn(rows), curve])))
    figure = style.new_figure(11.2, 5.6, workload.title)
    grid = figure.add_gridspec(3, 2, height_ratios=(2.2, 1, 1), width_ratios=(1.15, 1))
    left = figure.add_subplot(grid[0, 0])
    panels = [left, *(figure.add_subplot(grid[i, 0], sharex=left) for i in (1, 2))]
    for panel in panels[:-1]:
        panel.tick_params(labelbottom=False)
    tradeoff.draw_curve(panels, curve, looks)
    panels[0].set_title(f"time per iteration, {ask.budget_words(curve['budget_bytes'].iloc[0])}")
    budget.draw_budgets(figure.add_subplot(grid[:, 1]), rows, looks)
    notes = budget.missing_notes(rows, width=170)
    handles = style.series_handles(looks) + tradeoff.curve_handles(curve)
    style.legend_below(figure, handles + budget.budget_handles(rows)[-1:], notes=notes)
    return figure
