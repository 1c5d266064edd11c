"""Names of tasks of other tools, and keys of tasks."""

import pytest

from halfbyte.config import load_config
from halfbyte.config.methods import TASKS
from halfbyte.utils.errors import ConfigError

REQUIRED = {"model_name_or_path": "m", "dataset": "d"}


@pytest.mark.parametrize(
    ("key", "value", "method"),
    [
        *(("task", task, task) for task in TASKS),
        ("task", "sequence-classification", "sequence_classification"),
        ("task_type", "SEQ_CLS", "sequence_classification"),
        ("task_type", "TaskType.TOKEN_CLS", "token_classification"),
        ("task_type", "FEATURE_EXTRACTION", "embedding"),
        ("task_type", "CAUSAL_LM", "sft"),
        ("lora_task_type", "seq_cls", "sequence_classification"),
        ("reward_model", True, "reward"),
        ("process_reward_model", True, "prm"),
        ("task", "mmlu_test", "sft"),
    ],
)
def test_tasks_by_other_names(key, value, method):
    assert load_config(None, {**REQUIRED, key: value}).method == method


@pytest.mark.parametrize("value", ["generative_reranker", "SEQ_2_SEQ_LM", "clasification"])
def test_other_tasks_are_refused_by_name(value):
    with pytest.raises(ConfigError, match=value):
        load_config(None, {**REQUIRED, "task": value})


def test_a_task_and_another_method():
    with pytest.raises(ConfigError, match="method"):
        load_config(None, {**REQUIRED, "task": "embedding", "method": "dpo"})


def test_values_by_other_names():
    config = load_config(None, {**REQUIRED, "task": "embedding", "pooling": "lasttoken", "loss_type": "infonce"})
    assert (config.pooling, config.loss_type) == ("last", "multiple_negatives_ranking")
    assert load_config(None, {**REQUIRED, "task": "sequence_classification", "labels": [1, 2]}).labels == ["1", "2"]
    assert load_config(None, {**REQUIRED, "task": "sequence_classification"}).learning_rate == 1e-4
