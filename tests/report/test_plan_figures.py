"""What the figures of the plan are drawn from: every part, on an axis that holds what it has to."""

from typing import Any

import pytest
from bokeh.models.annotations import Span

from pipeline_lib.records.plan import PlanDocument
from pipeline_lib.report.charts import Chart
from pipeline_lib.report.plan_figures import memory_figure, phases_figure, timeline_figure
from tests.complete import record
from tests.report.fake_plans import GIB, gpu_plan, plan, plan_without_times


def read(content: dict[str, Any]) -> PlanDocument:
    return record(PlanDocument, content)


def totals(chart: Chart | None) -> dict[str, float]:
    """Where each bar ends."""
    ends: dict[str, float] = {}
    for renderer in chart.plot.renderers if chart else ():
        data = renderer.data_source.data
        for name, right in zip(
            data["bar" if "bar" in data else "lane"], data["right"], strict=True
        ):
            ends[name] = max(ends.get(name, 0.0), float(right))
    return ends


def limits(chart: Chart | None) -> list[float]:
    return [span.location for span in chart.plot.select(type=Span)] if chart else []


def test_memory_is_drawn_with_its_reserve_against_that_of_the_gpu() -> None:
    made = gpu_plan(10)
    chart = memory_figure(read(made))
    expected = {name: one["total_bytes"] / GIB for name, one in made["memory"].items()}
    expected["fsdp, chosen"] = expected.pop("fsdp")
    assert totals(chart) == pytest.approx(expected)
    assert chart is not None
    assert limits(chart) == [80.0]
    assert next(iter(reversed(chart.plot.y_range.factors))) == "fsdp, chosen"
    assert chart.plot.xaxis.axis_label == "memory of one rank (GiB)"


def test_a_limit_above_every_bar_is_on_the_axis_and_one_far_away_is_not_drawn() -> None:
    made = gpu_plan(10)
    made["memory"] = {"fsdp": made["memory"]["fsdp"]}
    chart = memory_figure(read(made))
    assert chart is not None
    assert chart.plot.x_range.end > 80 > totals(chart)["fsdp, chosen"]
    made["machine"]["gpu_memory_bytes"] = 2000 * GIB
    assert limits(memory_figure(read(made))) == []


def test_cpus_have_neither_a_limit_nor_a_reserve() -> None:
    made = plan(10)
    made["memory"]["ddp"]["reserve_bytes"] = 2**31
    chart = memory_figure(read(made))
    assert totals(chart)["ddp, chosen"] == pytest.approx(20_480_000 / 2**20)
    assert limits(chart) == []
    assert totals(memory_figure(read(plan_without_times(10)))) == totals(
        memory_figure(read(plan(10)))
    )


def test_the_bars_of_a_step_end_where_the_step_does() -> None:
    measured = {
        "forward_s": 1.0,
        "backward_s": 2.0,
        "update_s": 0.2,
        "step_s": 3.5,
        "data_wait_s": 0.1,
    }
    found = totals(phases_figure(read(gpu_plan(10)), measured))
    assert found == pytest.approx(
        {"predicted, by cause": 3.41, "predicted, by phase": 3.41, "measured, by phase": 3.6}
    )
    alone = phases_figure(read(plan(10)), {})
    assert totals(alone) == pytest.approx({"predicted, by cause": 400, "predicted, by phase": 400})
    assert alone is not None
    assert alone.plot.xaxis.axis_label == "time of one optimizer step (ms)"


def test_the_time_line_holds_every_segment_in_its_lane() -> None:
    made = gpu_plan(10)
    chart = timeline_figure(read(made))
    ends: dict[str, float] = {}
    for one in made["prediction"]["segments"]:
        lane = "communication" if one["lane"] == "exchange" else one["lane"]
        ends[lane] = max(ends.get(lane, 0.0), one["start_s"] + one["duration_s"])
    assert totals(chart) == pytest.approx(ends)
    assert chart is not None
    assert [name for _, name in chart.legend] == [
        *("forward", "all-gather of weights", "backward", "reduce-scatter of gradients", "update"),
    ]


def test_a_plan_without_times_has_none_to_draw() -> None:
    assert phases_figure(read(plan_without_times(10)), {"step_s": 1.0, "forward_s": 0.4}) is None
    assert timeline_figure(read(plan_without_times(10))) is None
    assert memory_figure(None) is None
