"""The table of the stages, and the orders that follow from it."""

from pipeline_lib.config.stages import STAGES, onwards, place_of, stage_of


def test_a_stage_reads_only_parts_of_stages_above_it() -> None:
    above: set[str] = set()
    for stage in STAGES.values():
        for part, read in stage.parts.items():
            assert set(read) <= above, stage.name
            above.add(part)


def test_a_part_is_an_instance_of_its_stage_and_an_unknown_one_of_its_name() -> None:
    assert stage_of("data.11") == stage_of("generation") == "download"
    assert stage_of("baseline") == "evaluate"
    assert stage_of("train") == "train"
    assert stage_of("gone") == "gone"


def test_parts_are_in_the_order_of_their_stages_and_sources_in_that_of_their_numbers() -> None:
    in_order = ["model", "data.2", "data.10", "shard", "baseline", "evaluate", "report", "gone"]

    assert sorted(reversed(in_order), key=place_of) == in_order


def test_what_follows_from_a_stage_is_what_reads_it() -> None:
    assert onwards("plan") == ("plan",), "the training does not read it"
    after = ("merge", "export", "evaluate", "benchmark", "report", "push")
    assert onwards("train") == ("train", *after)
    assert onwards("download") == tuple(STAGES)
