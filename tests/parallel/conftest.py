"""Gloo ranks, one set of two and one of four for all tests of a process."""

from pathlib import Path

import pytest
from ranks import Ranks

HERE = Path(__file__).parent

# Whole runs and whole families whose machinery a cheaper test here holds, too: left to `make test-all`.
LONG = (
    "test_failures.py::test_what_one_rank_meets",
    "test_killed.py",
    "test_launch.py::test_what_all_say_is_said_once",
    "test_launch.py::test_a_restart_on_the_devices",
    "test_training.py::test_resume_on_another_number",
    "test_training.py::test_rows_of_several_documents",
    "test_training.py::test_dropout_differs",
    "test_shard_training.py::test_slices_of_two_replicas",
    "test_shard.py::test_families",
    "test_shard.py::test_every_activation_level[offload_",
    "test_shard.py::test_every_activation_level[recompute_mlp",
    "test_shard.py::test_patched_before_or_after",
    "test_shard.py::test_three_steps[stays1",
    "test_shard.py::test_three_steps[stays2",
    "test_agreement.py::test_other_keys",
    "test_planned.py::test_a_share_is_as_planned[Gemma2",
    "test_pipeline.py::test_what_stages_do_not_train",
    "test_launch.py::test_the_cause_is_said",
    "test_shard.py::test_four_ranks[layout1]",
    "test_tensor_training.py::test_with_slices_of_bytes",
    "test_tensor_training.py::test_resumed_by_one",
    "test_tensor_training.py::test_refusals[keys2",
    "test_tensor_training.py::test_refusals[keys3",
    "test_tensor_training.py::test_refusals[keys4",
    "test_context.py::test_beside_another_axis",
    "test_context.py::test_a_run_is_that_of_one_process[False]",
    "test_context.py::test_rows_are_divided_too",
    "test_loading.py::test_every_format",
    "test_loading.py::test_what_was_quantized_before",
    "test_loading.py::test_experts_towers",
    "test_pipeline.py::test_stages_and_rows",
    "test_pipeline.py::test_resume_with_and_without_stages",
    "test_pipeline.py::test_a_run_in_stages[interleaved]",
    "test_pipeline.py::test_four_processes",
    "test_fp8.py::test_stages_leave_the_scales",
    "test_preference_ranks.py::test_two_ranks_are_one_process[reward",
    "test_preference_ranks.py::test_two_ranks_are_one_process[dpo of",
)


def pytest_collection_modifyitems(items):
    """All tests of one set of ranks go to one process of xdist: ranks cost more to start than to ask."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("ranks"))
            if any(name in item.nodeid for name in LONG):
                item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four():
    ranks = Ranks(4)
    yield ranks
    ranks.close()
