"""The picture of a whole sweep: the trade-off curve beside step time over memory."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from analysis import questions as ask
from analysis.pictures import schedule_share, setting, step_time, style


@style.styled
def overview(frame: pd.DataFrame, model: str | None = None, looks: style.Looks | None = None) -> Figure:
    """Left the trade-off curve over schedule_share, right step time over memory; one of them if the sweep varies
    only one, and step time over another number if it varies that alone. Raises ValueError if there is nothing to draw."""
    workload, rows = step_time.choose_workload(frame, model)
    looks, curves = looks or style.looks(rows), ask.share_curves(rows)
    if not curves and not ask.has_memory_axis(rows) and ask.setting_axis(rows) is not None:
        return setting.step_time_over_setting(rows, looks=looks)
    if not curves:
        return step_time.step_time_over_memory(rows, looks=looks)
    if not ask.has_memory_axis(rows):
        return schedule_share.tradeoff_curve(rows, looks=looks)

    curve = curves[0]
    figure = style.new_figure(12, 5.8, workload.title)
    grid = figure.add_gridspec(3, 2, height_ratios=(2.2, 1, 1), width_ratios=(1, 1))
    left = figure.add_subplot(grid[0, 0])
    panels = [left, *(figure.add_subplot(grid[i, 0], sharex=left) for i in (1, 2))]
    for panel in panels[:-1]:
        panel.tick_params(labelbottom=False)
    schedule_share.draw_curve(panels, curve, looks, 5.6, f", {ask.budget_words(curve['budget_bytes'].iloc[0])}")
    shown = step_time.draw_steps(figure.add_subplot(grid[:, 1]), rows, looks, 5.6)
    handles = style.series_handles(looks, [*shown, *ask.series(curve)]) + schedule_share.curve_handles(curve)
    style.legend_below(figure, handles + step_time.handles(rows)[-2:], notes=step_time.missing_notes(rows, width=170))
    return figure
