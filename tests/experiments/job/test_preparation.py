"""Downloads and tokenization, which may take longer than a step may."""

import pytest

from launch import elastic


@pytest.mark.slow
def test_one_rank_prepares_data_for_the_others_and_is_not_ended_as_hung(tmp_path):
    timeout_s = 8.0
    cluster = elastic.Cluster(2, timeout_s, startup_s=1)
    arguments = [str(tmp_path), str(timeout_s)]
    outcome = elastic.run(tmp_path, cluster, {}, module="tests.experiments.preparing_worker", arguments=arguments)
    assert outcome == elastic.Outcome(True) and (tmp_path / "order").read_text() == "01"
