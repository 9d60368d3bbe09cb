"""The report stage: the sealed results of all stages become one page, a row of numbers and the curves."""

from typing import Any

from pipeline_lib.base.fsio import write_json, write_text
from pipeline_lib.base.stage import Job
from pipeline_lib.data.chat.calling import how_to_call
from pipeline_lib.publish.curves import curves_csv, curves_of
from pipeline_lib.publish.facts import read_facts
from pipeline_lib.publish.page import render
from pipeline_lib.publish.summary import summary_of

REPORT_NAME, SUMMARY_NAME, CURVES_NAME = "report.html", "summary.json", "curves.csv"


def run(job: Job) -> dict[str, Any]:
    """Write report.html, summary.json and curves.csv from the sealed inputs; see DESIGN.md for what they hold."""
    facts = read_facts(str(job.spec.settings["experiment"]), job.inputs)
    curves = curves_of(facts.steps)
    page = render(facts, curves)
    write_text(job.out / REPORT_NAME, page)
    write_json(job.out / SUMMARY_NAME, summary_of(facts))
    write_text(job.out / CURVES_NAME, curves_csv(curves))
    size_bytes = len(page.encode())
    job.say(f"report: {facts.evaluation.verdict.text}")
    for line in how_to_call(facts.modes):
        job.say(f"report: {line}")
    job.say(f"report: {REPORT_NAME} is {size_bytes / 1e6:.1f} MB; open it in any browser, it needs no network")
    return {"page_bytes": size_bytes, "steps": len(facts.steps), "points": len(curves.step)}
