"""Rows of preference and RL training: their layouts, ids and masks, and refused rows."""

import copy
import json
import re

import numpy as np
import pytest
from tokenizers import normalizers

from halfbyte.data.prepare import prepare
from halfbyte.data.prepare_answers import prepare_answers
from halfbyte.methods import method_of
from halfbyte.methods.gkd import given_answer
from halfbyte.utils import notices
from halfbyte.utils.errors import DataError

QUESTION = {"role": "user", "content": "What is 1 + 1?"}
GOOD, BAD = {"role": "assistant", "content": "It is 2."}, {"role": "assistant", "content": "Hm, 3!"}
TURNS = [QUESTION, GOOD]
PAIR = {"prompt": [QUESTION], "chosen": [GOOD], "rejected": [BAD]}
ALL_PAIRS = {
    "explicit": PAIR,
    "implicit": {"chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "with its prompt in the answers": {**PAIR, "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "a text and whole conversations": {"prompt": "1 + 1", "chosen": [QUESTION, GOOD], "rejected": [QUESTION, BAD]},
    "a text and turns": {"prompt": QUESTION["content"], "chosen": [GOOD], "rejected": [BAD]},
    "texts": {"prompt": QUESTION["content"], "chosen": GOOD["content"], "rejected": BAD["content"]},
    "alpaca": {"instruction": QUESTION["content"], "input": "", "chosen": GOOD["content"], "rejected": BAD["content"]},
    "ranking": {
        "conversations": [{"from": "human", "value": QUESTION["content"]}],
        "chosen": {"from": "gpt", "value": GOOD["content"]},
        "rejected": {"from": "gpt", "value": BAD["content"]},
    },
    "v1": {
        f"{name}_messages": [
            {"role": turn["role"], "content": [{"type": "text", "value": turn["content"]}]}
            for turn in (QUESTION, answer)
        ]
        for name, answer in (("chosen", GOOD), ("rejected", BAD))
    },
    "dialogues": {
        name: f"\n\nHuman: {QUESTION['content']}\n\nAssistant: {answer['content']}"
        for name, answer in (("chosen", GOOD), ("rejected", BAD))
    },
    "dialogues with a prompt": {
        "prompt": f"\n\nHuman: {QUESTION['content']}\n\nAssistant:", "chosen": " It is 2.", "rejected": " Hm, 3!"
    },
}  # fmt: skip
ALL_LABELLED = {
    "turns": {"prompt": [QUESTION], "completion": [GOOD], "label": True},
    "texts": {"prompt": QUESTION["content"], "completion": GOOD["content"], "label": True},
    "kto_tag": {"messages": TURNS, "kto_tag": True},
    "whole conversation": {"completion": TURNS, "label": True},
    "alpaca": {"instruction": QUESTION["content"], "input": "", "output": GOOD["content"], "label": True},
}
STEPS = {"prompt": QUESTION["content"], "completions": ["1 + 1", "That is 3."], "labels": [True, False]}


def token_ids(row, name="chosen"):
    return row["prompt_ids"] + row[f"{name}_ids"]


def labels(row, name="chosen"):
    trained = zip(row[f"{name}_ids"], row[f"{name}_mask"], strict=True)
    return [-100] * len(row["prompt_ids"]) + [token if mask else -100 for token, mask in trained]


def supervised(config, write, tokenizer, rows, **keys):
    return list(prepare(config(write(rows, "sft.jsonl"), **keys), tokenizer).train)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ALL_PAIRS)
@pytest.mark.parametrize("template", ["plain", "marked"])
def test_pair_has_the_tokens_of_supervised_fine_tuning(name, template, config, write, make_tokenizer):
    tokenizer = make_tokenizer(template)
    [row] = prepare_answers(config(write([ALL_PAIRS[name]])), tokenizer, "pairs").train
    as_texts = supervised(config, write, tokenizer, [{"messages": [QUESTION, answer]} for answer in (GOOD, BAD)])
    for side, expected in zip(("chosen", "rejected"), as_texts, strict=True):
        assert token_ids(row, side) == expected["input_ids"]
        assert labels(row, side) == expected["labels"]
    assert tokenizer.decode(row["prompt_ids"]).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("name", ALL_LABELLED)
def test_labelled_answer_has_the_tokens_of_supervised_fine_tuning(name, config, write, make_tokenizer):
    tokenizer = make_tokenizer("plain")
    undesirable = {"label": False, "kto_tag": False}
    wrong = ALL_LABELLED[name] | {key: value for key, value in undesirable.items() if key in ALL_LABELLED[name]}
    good, bad = prepare_answers(config(write([ALL_LABELLED[name], wrong])), tokenizer, "unpaired").train
    [expected] = supervised(config, write, tokenizer, [{"messages": TURNS}])
    assert (token_ids(good, "completion"), labels(good, "completion")) == (expected["input_ids"], expected["labels"])
    assert good["label"] is True
    assert bad == {**good, "label": False}


def test_only_assistant_turns_of_an_answer_are_trained(config, write, make_tokenizer):
    tokenizer = make_tokenizer("plain")
    later_turns = [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
    path = write([{"prompt": [QUESTION], "chosen": [GOOD, *later_turns], "rejected": [BAD]}])
    [row] = prepare_answers(config(path), tokenizer, "pairs").train
    [expected] = supervised(config, write, tokenizer, [{"messages": [QUESTION, GOOD, *later_turns]}])
    assert labels(row) == expected["labels"]
    [all_of_it] = prepare_answers(config(path, assistant_only_loss=False), tokenizer, "pairs").train
    assert all_of_it["chosen_ids"] == row["chosen_ids"]
    assert all(all_of_it["chosen_mask"])
    assert not all(row["chosen_mask"])


def test_implicit_prompt_ends_at_the_first_different_message(config, write, make_tokenizer):
    history = [QUESTION, GOOD, {"role": "user", "content": "And 2 + 2?"}]
    answers = [{"role": "assistant", "content": f"It is {number}."} for number in (4, 5)]
    [row] = prepare_answers(
        config(write([dict(zip(("chosen", "rejected"), ([*history, answer] for answer in answers), strict=True))])),
        (tokenizer := make_tokenizer("plain")),
        "pairs",
    ).train
    assert tokenizer.decode(row["prompt_ids"]).endswith("And 2 + 2?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.decode(row["rejected_ids"]) == "It is 5.<|im_end|>\n"


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("The sky is blue.", "The sky is blown away.", "The sky is"),  # not "The sky is bl"
        ("One two\n\nthree", "One two\n\nfour", "One two"),
        ("One two", "One two three", "One"),  # an answer is left to both
        ("Human: one\n\nAssistant: two", "Human: one\n\nAssistant: twelve", "Human: one\n\nAssistant:"),
    ],
)
def test_implicit_text_prompt_ends_at_white_space_or_a_turn(chosen, rejected, prompt, config, write, make_tokenizer):
    tokenizer = make_tokenizer(None)
    [row] = prepare_answers(config(write([{"chosen": chosen, "rejected": rejected}])), tokenizer, "pairs").train
    assert tokenizer.decode(row["prompt_ids"]) == prompt
    for side, text in (("chosen", chosen), ("rejected", rejected)):
        assert tokenizer.decode(token_ids(row, side)) == f"{text}<|im_end|>"
        assert all(row[f"{side}_mask"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("template", ["llama-40m", "qwen2.5", "qwen3", "phi-3"])
def test_pairs_match_supervised_fine_tuning_with_real_templates(template, config, write, real_tokenizer):
    tokenizer = real_tokenizer(template)
    history = [
        QUESTION,
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nNo."},
        {"role": "user", "content": "Do!"},
    ]
    prepared = prepare_answers(
        config(write([{"prompt": history, "chosen": [GOOD], "rejected": [BAD]}])), tokenizer, "pairs"
    )
    [row] = prepared.train
    assert prepared.report["train"]["prompts_otherwise_alone"] == 0
    for side, answer in (("chosen", GOOD), ("rejected", BAD)):
        [expected] = supervised(config, write, tokenizer, [{"prompt": history, "completion": [answer]}])
        assert token_ids(row, side) == expected["input_ids"]
        assert labels(row, side) == expected["labels"]
    assert row["chosen_mask"][0] == row["rejected_mask"][0] == 1


def test_bos_belongs_to_the_prompt(config, write, real_tokenizer):
    tokenizer = real_tokenizer("llama-2")
    texts = {"prompt": "One and one?", "chosen": "It is two.", "rejected": "It is three."}
    [row] = prepare_answers(config(write([texts])), tokenizer, "pairs").train
    pair = {"prompt": texts["prompt"], "completion": texts["rejected"]}
    [expected] = supervised(config, write, tokenizer, [pair])
    assert (token_ids(row, "rejected"), labels(row, "rejected")) == (expected["input_ids"], expected["labels"])
    assert row["prompt_ids"][0] == tokenizer.bos_token_id
    assert row["chosen_mask"][0] == 1


def test_token_across_the_border_belongs_to_the_answer(config, write, real_tokenizer):
    tokenizer = real_tokenizer("llama-40m")
    tokenizer = type(tokenizer)(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)
    texts = {"chosen": "Say it: unbelievable", "rejected": "Say it: un"}
    [row] = prepare_answers(config(write([texts])), tokenizer, "pairs").train
    assert tokenizer.decode(row["chosen_ids"]).strip().startswith("unbelievable")
    assert row["chosen_mask"][0] == row["rejected_mask"][0] == 1


def test_margins_are_kept_per_row(config, write, make_tokenizer):
    path = write([{**PAIR, "margin": 1}, {**PAIR, "chosen": [BAD], "rejected": [GOOD], "margin": 0.5}])
    rows = prepare_answers(config(path), make_tokenizer("plain"), "pairs")
    assert rows.train["margin"][:] == [1.0, 0.5]
    assert rows.report["train"]["contradicting"] == 1


def test_files_with_and_without_margins_do_not_mix(config, write, make_tokenizer):
    files = [write([{**PAIR, "margin": 1}], "a.jsonl"), write([PAIR], "b.jsonl")]
    with pytest.raises(DataError, match=r"b\.jsonl.*a\.jsonl"):
        prepare_answers(config(files), make_tokenizer("plain"), "pairs")


def test_pairs_are_split_into_labelled_answers(config, write, make_tokenizer):
    rows = prepare_answers(config(write([PAIR])), make_tokenizer("plain"), "unpaired").train
    [pair] = prepare_answers(config(write([PAIR])), make_tokenizer("plain"), "pairs").train
    assert [(row["label"], row["completion_ids"]) for row in rows] == [
        (True, pair["chosen_ids"]),
        (False, pair["rejected_ids"]),
    ]
    assert notices.notices_so_far()


def test_prompts_keep_further_columns(config, write, make_tokenizer):
    tokenizer = make_tokenizer("plain")
    further = [{"answer": "2", "test": {"a": [1, None]}}, {"answer": 3, "test": "5"}]
    path = write([{"prompt": "1 + 1", **further[0]}, {"prompt": [QUESTION], **further[1]}])
    rows = prepare_answers(config(path), tokenizer, "prompts").train
    assert [row["columns"] for row in rows] == further
    assert [row["prompt"] for row in rows] == ["1 + 1", [QUESTION]]
    assert tokenizer.decode(rows[1]["prompt_ids"]) == (
        f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_prompts_without_template_use_the_instruction_format(config, write, make_tokenizer):
    tokenizer = make_tokenizer(None)
    [row] = prepare_answers(config(write([{"question": "1 + 1"}])), tokenizer, "prompts").train
    assert tokenizer.decode(row["prompt_ids"]) == "### Instruction:\n1 + 1\n\n### Response:\n"


@pytest.mark.parametrize("separator", ["\n", "\n\n", ""])
def test_each_step_has_its_label_at_its_last_token(separator, config, write, make_tokenizer):
    """Rows are the prompt as in generation, then steps and separators tokenized separately, as in TRL's PRMTrainer."""
    tokenizer, further = make_tokenizer("plain"), {**STEPS, "prompt": [QUESTION], "labels": [False, True]}
    prepared = prepare_answers(
        config(write([STEPS, further]), method="prm", step_separator=separator), tokenizer, "stepwise"
    )
    prompt = f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n"
    steps = [tokenizer(step + separator, add_special_tokens=False)["input_ids"] for step in STEPS["completions"]]
    mask = [int(at == len(step) - 1) for step in steps for at in range(len(step))]
    for row, labels in zip(prepared.train, (STEPS["labels"], further["labels"]), strict=True):
        assert tokenizer.decode(row["prompt_ids"]) == prompt
        assert (row["steps_ids"], row["steps_mask"], row["right"]) == ([*steps[0], *steps[1]], mask, labels)
    report = prepared.report["train"]
    assert (report["steps"], report["right_steps"], report["trained_tokens"]) == (4, 2, 4)
    assert report["contradicting"] == 1
    mapped = {"question": "1", "parts": STEPS["completions"], "good": STEPS["labels"]}
    names = {"prompt": "question", "completions": "parts", "labels": "good"}
    [row] = prepare_answers(config(write([mapped]), column_mapping=names), tokenizer, "stepwise").train
    assert row["right"] == STEPS["labels"]


def test_a_step_without_a_token_is_refused(config, write, make_tokenizer):
    tokenizer, rows = copy.deepcopy(make_tokenizer("plain")), [STEPS, {**STEPS, "completions": ["1", "xx"]}]
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("x", "")
    with pytest.raises(DataError, match=r"data.jsonl:2:.*'xx'"):
        prepare_answers(config(write(rows), method="prm", step_separator=""), tokenizer, "stepwise")
    prepared = prepare_answers(config(write(rows), method="prm"), tokenizer, "stepwise")
    assert [sum(row["steps_mask"]) for row in prepared.train] == [2, 2]


def test_steps_are_cut_with_their_labels(config, write, make_tokenizer):
    tokenizer = make_tokenizer("plain")
    [whole_row] = prepare_answers(config(write([STEPS])), tokenizer, "stepwise").train
    size = len(whole_row["prompt_ids"]) + len(whole_row["steps_ids"])
    rows = [STEPS, {**STEPS, "completions": ["1", "2"], "labels": [False, True]}]
    prepared = prepare_answers(config(write(rows), max_length=size - 1), tokenizer, "stepwise")
    assert [row["right"] for row in prepared.train] == [[True], [False, True]]
    assert [sum(row["steps_mask"]) for row in prepared.train] == [1, 2]
    dropping = prepare_answers(config(write(rows), max_length=size - 1, overlong="drop"), tokenizer, "stepwise")
    assert dropping.report["train"]["dropped"] == {"longer than max_length": 1}


@pytest.mark.parametrize(
    ("method", "kind", "short", "long"),
    [
        ("reward", "pairs", {**PAIR}, {**PAIR, "chosen": [{"role": "assistant", "content": "x" * 90}]}),
        ("reward", "pairs", {**PAIR}, {**PAIR, "rejected": [{"role": "assistant", "content": "x" * 90}]}),
        ("prm", "stepwise", {**STEPS}, {**STEPS, "completions": ["1", "x" * 90]}),
    ],
)
def test_reward_models_drop_truncated_answers(config, write, make_tokenizer, method, kind, short, long):
    """Reward models score complete answers, as in TRL's RewardTrainer."""
    tokenizer = make_tokenizer("plain")
    data = prepare_answers(config(write([short, long]), method=method, max_length=80), tokenizer, kind)
    assert data.report["train"]["dropped"] == {"with an answer cut at max_length": 1}
    assert (data.report["train"]["rows"], data.report["train"]["truncated"]) == (1, 0)
    assert any(key.startswith("dropped:training rows") for key in notices.notices_so_far())
    with pytest.raises(DataError, match="max_length"):
        prepare_answers(config(write([long]), method=method, max_length=80), tokenizer, kind)
    if kind == "pairs":
        preference = prepare_answers(config(write([short, long]), method="dpo", max_length=80), tokenizer, kind)
        assert (preference.report["train"]["rows"], preference.report["train"]["truncated"]) == (2, 1)


def test_truncated_pair_is_kept_if_both_answers_have_trained_tokens(config, write, make_tokenizer):
    tokenizer, long = make_tokenizer("plain"), {"role": "assistant", "content": "x" * 50}
    rows = [
        {**PAIR, "chosen": [long]},
        {"prompt": [{"role": "user", "content": "y" * 90}], "chosen": [GOOD], "rejected": [BAD]},
    ]
    prepared = prepare_answers(config(write(rows), max_length=80), tokenizer, "pairs")
    [row] = prepared.train
    assert len(token_ids(row)) == 80 > len(token_ids(row, "rejected"))
    report = prepared.report["train"]
    assert (report["rows"], report["truncated"]) == (1, 1)
    assert report["dropped"] == {"no trained tokens left after truncation": 1}
    prompt = len(row["prompt_ids"])
    assert report["mean_tokens"] == {"prompt": prompt, "chosen": 80 - prompt, "rejected": len(row["rejected_ids"])}
    assert report["trained_tokens"] == sum(row["chosen_mask"]) + sum(row["rejected_mask"])
    dropping = prepare_answers(config(write([PAIR, *rows]), max_length=80, overlong="drop"), tokenizer, "pairs")
    assert dropping.report["train"]["dropped"] == {"longer than max_length": 2}


REFUSED = {
    "equal answers": ([{**PAIR, "rejected": [GOOD]}], "pairs", None),
    "roles swapped": ([{**PAIR, "chosen": [QUESTION], "rejected": [GOOD]}], "pairs", "data.jsonl:1:"),
    "no common turn": (
        [{"chosen": [QUESTION, GOOD], "rejected": [{"role": "user", "content": "?"}, BAD]}], "pairs", "data.jsonl:1:"
    ),
    "no common word": ([{"chosen": "Yes it", "rejected": "No"}], "pairs", "data.jsonl:1:"),
    "a prompt that was answered": ([{**PAIR, "prompt": TURNS}], "pairs", "data.jsonl:1:"),
    "empty answers": ([{"prompt": "a", "chosen": " ", "rejected": "no"}], "pairs", "all 1"),
    "labels as text": ([{**ALL_LABELLED["texts"], "label": "true"}], "unpaired", "data.jsonl:1:"),
    "one label": ([ALL_LABELLED["texts"]], "unpaired", "all 1"),
    "no label": ([{"prompt": "a", "completion": "b"}], "unpaired", None),
    "examples": ([{"messages": TURNS}], "pairs", None),
    "labelled": ([ALL_LABELLED["turns"]], "pairs", "method: kto"),
    "steps": ([STEPS], "pairs", None),
    "steps without labels": ([STEPS, {**STEPS, "labels": None}], "stepwise", "data.jsonl:2:"),
    "a label less than steps": ([{**STEPS, "labels": [True]}], "stepwise", "'labels' hold 2"),
    "a label of a step as text": ([{**STEPS, "labels": [True, "-"]}], "stepwise", "data.jsonl:1:"),
    "an empty step": ([{**STEPS, "completions": ["b", " "]}], "stepwise", "data.jsonl:1: step 2"),
    "no steps": ([{**STEPS, "completions": [], "labels": []}], "stepwise", "'completions'"),
    "steps of one label": ([{**STEPS, "labels": [True, True]}], "stepwise", None),
    "a prompt without room for a step": ([{**STEPS, "prompt": "y" * 300}], "stepwise", None),
    "a typing error": ([{"prompt": "a", "chosn": "b", "rejected": "c"}], "pairs", "'chosen'"),
    "an answered prompt": ([{"prompt": TURNS}], "prompts", "data.jsonl:1:"),
    "pairs for rollouts": ([PAIR], "prompts", "method: dpo"),
    "no prompt": ([{"text": "abc"}], "prompts", None),
    "a missing answer": ([PAIR, {"prompt": [QUESTION], "chosen": [GOOD]}], "pairs", "data.jsonl:2:"),
    "a margin that is none": ([{**PAIR, "margin": "2"}], "pairs", "data.jsonl:1:"),
    "a prompt as long as rows": ([{"prompt": "y" * 300}], "prompts", None),
}  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_rows_are_named(name, config, write, make_tokenizer):
    rows, row_type, message = REFUSED[name]
    with pytest.raises(DataError, match=message and re.escape(message)) as caught:
        prepare_answers(config(write(rows), max_length=200), make_tokenizer("plain"), row_type)
    assert caught.value.fix


@pytest.mark.parametrize(("row", "method"), [(STEPS, "prm"), (ALL_PAIRS["explicit"], "dpo"), (ALL_PAIRS["v1"], "dpo")])
def test_rows_of_another_method_name_it(row, method, config, write, make_tokenizer):
    with pytest.raises(DataError) as caught:
        prepare(config(write([row])), make_tokenizer("plain"))
    assert f"method: {method}" in caught.value.fix


def test_rollouts_need_a_template_with_an_end_token(config, write, make_tokenizer):
    endless = "{%- for m in messages %}{{- m['role'] + ': ' + m['content'] + '\\n' }}{%- endfor %}"
    with pytest.raises(DataError):
        prepare_answers(config(write([{"prompt": "a"}])), make_tokenizer(endless), "prompts")


def test_template_that_changes_the_prompt_without_answer_is_reported(config, write, make_tokenizer):
    last = "{%- for m in messages %}{{- '<|im_start|>' + m['role'] + ' of ' + messages|length|string + m['content'] "
    template = last + "+ '<|im_end|>' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>a' }}{%- endif %}"
    prepared = prepare_answers(config(write([PAIR])), make_tokenizer(template), "pairs")
    assert prepared.report["train"]["prompts_otherwise_alone"] == 1
    assert "otherwise:training" in notices.notices_so_far()


def test_held_out_rows_are_split_off(config, write, make_tokenizer):
    rows = [{**PAIR, "chosen": [{"role": "assistant", "content": str(number)}]} for number in range(10)]
    prepared = prepare_answers(config(write(rows), eval_split_size=3), make_tokenizer("plain"), "pairs")
    assert (len(prepared.train), len(prepared.eval)) == (7, 3)
    assert len(prepared.report["held_out"]) == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "kind", "rows"),
    [("dpo_en_demo.json", "pairs", 300), ("v1_dpo_demo.jsonl", "pairs", 10), ("kto_en_demo.json", "unpaired", 300)],
)
def test_real_data_loses_no_row(file, kind, rows, shared, config, real_tokenizer):
    """LLaMA-Factory's demo data; the ids are those of supervised fine-tuning (checked for a few rows)."""
    tokenizer = real_tokenizer("llama-40m")
    path = shared / "data" / "datasets" / "llamafactory" / file
    prepared = prepare_answers(config(str(path), max_length=8192), tokenizer, kind)
    assert prepared.report["train"]["dropped"] == {}
    assert len(prepared.train) == rows
    assert prepared.report["stop_tokens"] == ["<|im_end|>"]
    read = json.loads(path.read_text()) if path.suffix == ".json" else [json.loads(line) for line in path.open()]
    first = read[0]
    answer = tokenizer.decode(prepared.train[0]["chosen_ids" if kind == "pairs" else "completion_ids"])
    expected = first["chosen"]["value"] if "chosen" in first else None
    assert expected is None or answer == f"{expected}<|im_end|>\n"
    if kind == "unpaired":
        assert prepared.report["train"]["desirable"] == np.sum([row["label"] for row in read])


CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "again"}]
SHAREGPT = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}, {"from": "human", "value": "again"}]


@pytest.mark.parametrize("turns", [CHAT, SHAREGPT])
@pytest.mark.parametrize(
    "keys",
    [
        {"method": "grpo", "reward_funcs": ["exact"], "num_generations": 2, "per_device_train_batch_size": 2},
        {"method": "gkd", "teacher_model_name_or_path": "t", "lmbda": 0.5},
    ],
)
def test_the_answer_that_ends_a_conversation_is_no_part_of_the_prompt(turns, keys, config, write, make_tokenizer):
    key = "from" if "from" in turns[0] else "role"
    answer = {key: "gpt" if key == "from" else "assistant", "value" if key == "from" else "content": "the answer"}
    column = "conversations" if key == "from" else "messages"
    answered = config(write([{column: [*turns, answer], "level": 1}, {column: turns, "level": 2}]), **keys)
    prompts = config(write([{column: turns, "level": 1}, {column: turns, "level": 2}], "prompts.jsonl"), **keys)
    method, tokenizer = method_of(answered), make_tokenizer("plain")
    notices.reset_notices()
    prepared = method.prepare(answered, tokenizer)
    told = [key for key in notices.notices_so_far() if key.startswith("answers:")]
    assert prepared.train["prompt_ids"][:] == method.prepare(prompts, tokenizer).train["prompt_ids"][:]
    assert prepared.train["prompt"][0] == turns
    first, second = prepared.train["columns"]
    if keys.get("lmbda") == 0.5:
        assert given_answer(answered, first, 0) == "the answer"
        assert not told
        with pytest.raises(DataError):
            method.documents(answered, prepared)
    else:
        assert first == {"level": 1}
        assert len(told) == 1
    assert second == {"level": 2}
