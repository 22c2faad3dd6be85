"""A folder of a checkpoint counts when it is whole, and only then."""

from __future__ import annotations

from pathlib import Path

import pytest

from mdcs.checkpoint import directory


def write(root: Path, step: int) -> Path:
    partial = directory.begin(directory.folder_of(root, step))
    for name in ("a", "b"):
        (partial / name).write_bytes(f"{name} of {step}".encode() * 100)
    return directory.finish(directory.folder_of(root, step), ["a", "b"])


def test_a_folder_counts_with_its_manifest(tmp_path):
    partial = directory.begin(directory.folder_of(tmp_path, 3))
    (partial / "a").write_bytes(b"data")
    assert directory.complete_checkpoints(tmp_path) == []
    made = directory.finish(directory.folder_of(tmp_path, 3), ["a"])
    assert directory.complete_checkpoints(tmp_path) == [made] and directory.find_problem(made) is None


def test_what_a_rank_has_written_elsewhere_does_not_count(tmp_path):
    directory.begin(directory.folder_of(tmp_path, 3))
    with pytest.raises(directory.CheckpointError, match="step-00000003.partial: a is missing: all ranks must see one folder"):
        directory.finish(directory.folder_of(tmp_path, 3), ["a"])
    assert directory.complete_checkpoints(tmp_path) == []


def test_the_newest_is_first_and_the_last_are_kept(tmp_path):
    made = {step: write(tmp_path, step) for step in (9, 10, 100)}
    assert directory.complete_checkpoints(tmp_path) == [made[100], made[10], made[9]]
    directory.keep_last(tmp_path, 2)
    assert directory.complete_checkpoints(tmp_path) == [made[100], made[10]] and len([*tmp_path.iterdir()]) == 2


def test_a_step_that_is_written_again_takes_the_place_of_the_first(tmp_path):
    write(tmp_path, 1)
    made = write(tmp_path, 1)
    assert directory.complete_checkpoints(tmp_path) == [made] == [*tmp_path.iterdir()] and directory.find_problem(made) is None


def test_what_was_left_half_written_goes_with_the_next(tmp_path):
    (directory.begin(directory.folder_of(tmp_path, 5)) / "a").write_bytes(b"half")
    write(tmp_path, 6)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]


def cut(made: Path) -> None:
    (made / "a").write_bytes((made / "a").read_bytes()[:-1])


def cut_manifest(made: Path) -> None:
    (made / directory.MANIFEST).write_text((made / directory.MANIFEST).read_text()[:-20])


HARM = {
    cut: "a has 599 bytes, not the 600 that were written",
    cut_manifest: "manifest.json is damaged",
    lambda made: (made / "a").unlink(): "a is missing",
    lambda made: (made / directory.MANIFEST).unlink(): "it has no manifest.json: it was not finished",
}


@pytest.mark.parametrize("harm", HARM)
def test_what_is_not_as_it_was_written_is_named(tmp_path, harm):
    made = write(tmp_path, 1)
    harm(made)
    assert directory.find_problem(made) == HARM[harm]
