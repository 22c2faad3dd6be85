"""The map of best shares: the page is made of its data, the data is what is predicted, and work that was ended goes on."""

import json
from pathlib import Path

import pytest

import benchmarks
from benchmarks import shares

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def document():
    return json.loads((DOCS / "shares.json").read_text(encoding="utf-8"))


def test_the_page_is_made_of_its_data(document):
    assert shares.page(document) == benchmarks.part(DOCS, "shares"), "make shares writes another page"
    assert document["settings"] == json.loads(json.dumps(shares.SETTINGS))
    assert [each["point"] for each in document["points"]] == shares.points()


def test_the_data_is_what_is_predicted(document):
    """One cell of 420: equal blocks, with the ratio and about the budget of `make sweep`."""
    point = {"model": "12 equal blocks", "ratio": 1.5, "budget": 0.35}
    [kept] = [each for each in document["points"] if each["point"] == point]
    assert shares.curve(**point)["step_s"] == pytest.approx(kept["step_s"], rel=1e-3)
    where, share, gain = shares.best(kept)
    assert where == "inside" and 0 < share < 1 and gain > 0.1


@pytest.mark.parametrize(
    ("steps", "where"),
    [
        ([2, 1, 1, 1.5], ("inside", 0.125, 0.5)), ([1, 1, 2, 3], ("strategies", 0.0, 0.0)),
        ([3, 2, 1, 1], ("schedule", 0.25, 0.0)),
        ([1.005, 1, 1, 1.004], ("any", 0.125, 0.0)), ([None, 1, 1, 1.5], ("inside", 0.125, 0.5)),
    ],
)  # fmt: skip
def test_where_the_best_share_is(steps, where):
    assert shares.best({"step_s": steps}) == where


def test_work_that_was_ended_goes_on_and_other_settings_begin_anew(tmp_path):
    done = []

    def square(number):
        if number == 3 and len(done) == 2:
            raise KeyboardInterrupt
        done.append(number)
        return {"square": number**2}

    path, points = tmp_path / "of/data.json", [{"number": number} for number in (1, 2, 3)]
    with pytest.raises(KeyboardInterrupt):
        benchmarks.resumed(path, {"a": 1}, points, square)
    done.append("again")
    document = benchmarks.resumed(path, {"a": 1}, points, square)
    assert done == [1, 2, "again", 3] and document == json.loads(path.read_text())
    assert [each["square"] for each in document["points"]] == [1, 4, 9]
    benchmarks.resumed(path, {"a": 2}, points, square)
    assert done[4:] == [1, 2, 3]
