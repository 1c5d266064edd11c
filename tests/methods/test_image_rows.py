"""Preference methods on prompts with images: losses equal TRL's, bad rows are named, other methods refuse images."""

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from PIL import Image
from transformers import AutoModelForSequenceClassification
from trl import DPOConfig, DPOTrainer
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference

from halfbyte.adapters.lora import add_adapter
from halfbyte.cli.preview import preview_rows
from halfbyte.config import load_config
from halfbyte.data.collate import make_collator
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.methods import method_of
from halfbyte.modeling.architectures import all_linear
from halfbyte.modeling.packing import isolate_for_run
from halfbyte.rewards.score import Scored
from halfbyte.train.rollouts import make_rollouts
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError, DataError, ModelError
from tests.helpers.gguf_models import save_model
from tests.helpers.image_models import load_processor, picture, save_image_model
from tests.helpers.pair_models import assert_same_gradients, gradients, mean_loss
from tests.methods.test_kto import theirs

FAMILIES = ("qwen2_5_vl", "gemma3", "llava_next")
ROWS = 4
REWARD = "def score(prompts, completions, **columns):\n    return [float(len(str(text))) for text in completions]\n"
LAST_BREAK = "<|im_end|>\n{% endfor %}"  # TRL trains it, as a part of the answer


def write_pairs(folder):
    """`data.jsonl` of prompts with 0 to 2 images and two answers, and the images in `pictures`."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(ROWS):
        content = [{"type": "text", "text": f"look at {number}: "}]
        for image in range((number + 1) % 3):
            name = f"pictures/{number}-{image}.png"
            picture(10 * number + image, 60 + 9 * number, 70).save(folder / name)
            content += [{"type": "image", "image": name}, {"type": "text", "text": " and"}]
        sides = {"chosen": f"I see {'x' * (number + 1)}.", "rejected": "no"}
        rows.append({"prompt": [{"role": "user", "content": content}]} | {
            side: [{"role": "assistant", "content": text}] for side, text in sides.items()
        })  # fmt: skip
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rows


def place_of(folder, name):
    save_image_model(folder / "model", name)
    template = folder / "model/chat_template.jinja"
    template.write_text(template.read_text().replace(LAST_BREAK, LAST_BREAK.replace("\n", "")))
    return write_pairs(folder)


def configured(folder, **keys):
    keys = {"model_name_or_path": str(folder / "model"), "dataset": str(folder / "data.jsonl"), "output_dir": "out",
            "device": "cpu", "dtype": "float32", "max_length": 800} | keys  # fmt: skip
    return load_config(None, keys)


def ready(config):
    method = method_of(config)
    tokenizer = load_run_tokenizer(config)
    return method, method.ready(config, tokenizer), method.collator(config, tokenizer)


def trl_rows(folder, rows):
    """The same rows as TRL takes them: turns of texts and placeholders, and a column of images."""
    taken = []
    for row in rows:
        [turn] = row["prompt"]
        parts = [{name: part[name] for name in ("type", "text") if name in part} for part in turn["content"]]
        images = [Image.open(folder / part["image"]) for part in turn["content"] if part["type"] == "image"]
        taken.append({**row, "prompt": [{"role": "user", "content": parts}], "images": images})
    return taken


def policy_of(folder, name):
    model = save_image_model(folder / "again", name)
    return get_peft_model(model, LoraConfig(r=4, target_modules=all_linear(model), init_lora_weights=False)).train()


@pytest.mark.parametrize("name", [FAMILIES[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES[1:])])
def test_dpo_equals_trl(name, tmp_path):
    rows = place_of(tmp_path, name)
    method, data, collate = ready(configured(tmp_path, method="dpo", beta=0.3))
    policy, processor = policy_of(tmp_path, name), load_processor(tmp_path / "model", name)
    processor.chat_template = processor.tokenizer.chat_template
    options = {"report_to": "none", "use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    arguments = DPOConfig(str(tmp_path / "trl"), beta=0.3, per_device_train_batch_size=ROWS, max_length=800, **options)
    examples = trl_rows(tmp_path, rows)
    trainer = DPOTrainer(policy, args=arguments, train_dataset=Dataset.from_list(examples), processing_class=processor)
    trainer.model.delete_adapter("ref")
    expected = trainer._compute_loss(trainer.model, trainer.data_collator(examples), False)
    expected_gradients = gradients(expected, trainer.model)
    loss, _, _ = mean_loss(method, trainer.model, [collate(list(data.train))])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients(loss, trainer.model), expected_gradients)


@pytest.mark.parametrize("kind", ["kto", pytest.param("apo_zero_unpaired", marks=pytest.mark.slow)])
def test_kto_equals_trl(kind, tmp_path):
    name = "qwen2_5_vl"
    rows = place_of(tmp_path, name)
    labelled = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row, side in zip(rows, ("chosen", "rejected", "chosen", "chosen"), strict=True)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    method, data, collate = ready(configured(tmp_path, method="kto", beta=0.3, loss_type=kind))
    policy, processor = policy_of(tmp_path, name), load_processor(tmp_path / "model", name)
    processor.chat_template = processor.tokenizer.chat_template
    batch = DataCollatorForVisionUnpairedPreference(processor, calculate_kl=kind == "kto")(trl_rows(tmp_path, labelled))
    options = {"beta": 0.3, "loss_type": kind, "desirable_weight": 1.0, "undesirable_weight": 1.0}
    expected, _ = theirs(policy, None, batch=batch, **options)
    loss, _, _ = mean_loss(method, policy, [collate(list(data.train))])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients(loss, policy), gradients(expected, policy))


def test_a_packed_run_reads_cached_features_and_saves_an_adapter(tmp_path, monkeypatch):
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    place_of(tmp_path, "gemma3")
    keys = {"packing": True, "vision_cache": True, "max_steps": 2, "logging_steps": 1}
    train(configured(tmp_path, method="dpo", output_dir=str(tmp_path / "out"), **keys))
    checks = json.loads((tmp_path / "out/checks.json").read_text())
    assert (checks["isolation"]["way"], checks["image_features"]["computed"]) == ("masks", 4)
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "out/data_report.json").read_text())["train"]["images"]["count"] == 4


GRPO = {"method": "grpo", "num_generations": 2, "per_device_train_batch_size": 8, "max_completion_length": 5,
        "num_iterations": 2, "reward_funcs": [{"regex": "a"}]}  # fmt: skip


def write_prompts(folder):
    """`data.jsonl` with the prompts of `write_pairs`, which reward functions read in columns."""
    rows = [{"prompt": row["prompt"], "number": at} for at, row in enumerate(write_pairs(folder))]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return rows


class Scores:
    """Rewards that follow the answers' lengths and tokens; remembers what reward functions get."""

    specs, columns = [None], ["number"]

    def score(self, prompts, completions, completion_ids, columns, *_):
        self.prompts, self.read = prompts, columns
        return Scored({"r": [float(len(ids) + ids[0] % 7) for ids in completion_ids]})


def plain_policy_loss(model, processor, batch, rows, placeholders, epsilon=0.2):
    """The clipped loss of GRPO by transformers' forward of each answer, over the number of answers' tokens."""
    losses, tokens = [], 0
    for row, prompt, completion in zip(rows, batch.prompts, batch.completions, strict=True):
        [turn] = prompt["prompt"]
        images = [Image.open(image["path"]) for image in prompt["images"]]
        text = processor.tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
        keys = {"return_tensors": "pt", "add_special_tokens": False}
        inputs = processor(text=[text], images=[images] if images else None, **keys)
        ids = torch.tensor([completion.ids])
        longer = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": torch.zeros_like(ids)}
        longer["token_type_ids"] = longer["mm_token_type_ids"]
        longer["input_ids"] = ids.masked_fill(torch.isin(ids, torch.tensor(placeholders)), 0)  # at an answer's end
        inputs |= {name: torch.cat([value, longer[name]], 1) for name, value in inputs.items() if name in longer}
        logits = model(**inputs).logits[0, -ids.shape[1] - 1 : -1]
        log_probs = logits.log_softmax(-1).gather(1, ids[0].unsqueeze(1)).squeeze(1)
        ratio, advantage = (log_probs - torch.tensor(row["old"])).exp(), row["advantage"]
        losses.append(torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage).sum())
        tokens += ids.shape[1]
    return -sum(losses) / tokens


@pytest.mark.parametrize(
    ("name", "padding_free"),
    [
        (FAMILIES[0], False),
        (FAMILIES[0], True),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in FAMILIES[1:]),
    ],
)
def test_grpo_equals_transformers(name, padding_free, tmp_path):
    """Rollouts have the log-probabilities of training, and the loss that of transformers' forward."""
    save_image_model(tmp_path / "model", name)
    write_prompts(tmp_path)
    config = configured(tmp_path, **GRPO, padding_free=padding_free)
    tokenizer, method = load_run_tokenizer(config), method_of(config)
    data, policy, scores = method.ready(config, tokenizer), policy_of(tmp_path, name).eval(), Scores()
    policy.config.get_text_config().max_position_embeddings = 1024
    options = {"device": torch.device("cpu"), "compute_dtype": torch.float32}
    rollouts = make_rollouts(config, method, policy, tokenizer, data, scores, **options)
    batch = rollouts.generation(list(range(ROWS)), 0, {})
    assert scores.read == {"number": [0, 0, 1, 1, 2, 2, 3, 3]}
    assert all(part.keys() <= {"type", "text"} for [turn] in scores.prompts for part in turn["content"])
    rows = rollouts.training_rows(batch, corrected=False)
    for at, (row, completion) in enumerate(zip(rows, batch.completions, strict=True)):
        torch.testing.assert_close(torch.tensor(row["old"]), completion.log_probs, rtol=1e-4, atol=1e-4)
        row["old"] = [value + 0.07 * (at % 5) for value in row["old"]]  # of an earlier policy
    rollouts.in_training_order(rows, 0)  # sets the loss's divisors
    collated = rollouts.policy.collate(json.loads(json.dumps(rows)))  # as a checkpoint holds them
    processor = load_processor(tmp_path / "model", name)
    expected = plain_policy_loss(policy, processor, batch, rows, rollouts.sampler.images.placeholder_ids)
    loss = method.sums(policy, collated)["loss"] / method.counts(collated)["loss_items"]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients(loss, policy), gradients(expected, policy))


def processed(processor, folder, row, side):
    """transformers' inputs for a prompt with images and one of its answers."""
    [turn] = row["prompt"]
    images = [Image.open(folder / part["image"]) for part in turn["content"] if part["type"] == "image"]
    text = processor.tokenizer.apply_chat_template([turn, *row[side]], tokenize=False)
    return processor(text=[text], images=[images] if images else None, return_tensors="pt", add_special_tokens=False)


@pytest.mark.parametrize("name", FAMILIES)
def test_reward_equals_transformers(name, tmp_path):
    """Scores, loss and gradients of transformers' own forward of each answer, and of Gemma 3's classifier."""
    rows = place_of(tmp_path, name)
    config = configured(tmp_path, method="reward")
    method, data, collate = ready(config)
    policy = add_adapter(save_image_model(tmp_path / "again", name), config, scores="SEQ_CLS").train()
    for parameter_name, parameter in policy.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    loss, _, _ = mean_loss(method, policy, [collate(list(data.train))])
    processor, causal = load_processor(tmp_path / "model", name), policy.get_base_model()
    answers = [processed(processor, tmp_path, row, side) for row in rows for side in ("chosen", "rejected")]
    scores = torch.stack([causal.score(causal.model(**each).last_hidden_state[0, -1]) for each in answers])
    chosen, rejected = scores.view(-1, 2).unbind(-1)
    expected = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients(loss, policy), gradients(expected, policy))
    if name == "gemma3":
        policy.save_pretrained(tmp_path / "adapter")
        options = {"num_labels": 1, "dtype": torch.float32}
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "again", **options)
        classifier = PeftModel.from_pretrained(classifier, tmp_path / "adapter").eval()
        torch.testing.assert_close(classifier(**answers[0]).logits[0], scores[0], rtol=1e-5, atol=1e-5)


def test_a_policy_run_reads_cached_features(tmp_path, monkeypatch):
    """It equals a run that computes images in every step, and stops for what reads no images."""
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    save_image_model(tmp_path / "model", "qwen3_vl")
    write_prompts(tmp_path)
    (tmp_path / "mine.py").write_text(REWARD)
    keys = GRPO | {
        "max_steps": 2,
        "logging_steps": 1,
        "load_in_4bit": False,
        "learning_rate": 1e-2,
        "sample_prompts": 1,
    }
    keys |= {"reward_funcs": [f"{tmp_path / 'mine.py'}:score"]}
    for cached in (True, False):
        train(configured(tmp_path, **keys, output_dir=str(tmp_path / str(cached)), vision_cache=cached))
    logs = [[json.loads(line) for line in (tmp_path / name / "completions.jsonl").read_text().splitlines()]
            for name in ("True", "False")]  # fmt: skip
    assert [line["completion"] for line in logs[0]] == [line["completion"] for line in logs[1]]
    assert json.loads((tmp_path / "True/checks.json").read_text())["image_features"]["images"] == 4
    for more in ({"rollout": "vllm"}, {"reward_funcs": [str(tmp_path / "True/adapter")]}):
        with pytest.raises(ConfigError):
            train(configured(tmp_path, **keys | more, output_dir=str(tmp_path / "refused")))
    with pytest.raises(DataError, match=r"data\.jsonl:1"):
        ready(configured(tmp_path, method="gkd", teacher_model_name_or_path=str(tmp_path / "model")))


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_preview_counts_the_tokens_of_images(method, tmp_path, capsys):
    place_of(tmp_path, "qwen3_vl")
    if method == "grpo":
        write_prompts(tmp_path)
    preview_rows(configured(tmp_path, **(GRPO if method == "grpo" else {"method": method})), 2)
    shown = capsys.readouterr().out
    assert shown.count("[image: 4 tokens]") == 3
    assert "<|image_pad|>" not in shown


def test_images_of_answers_are_refused(tmp_path):
    rows = place_of(tmp_path, "llava")
    image = {"type": "image", "image": "pictures/0-0.png"}
    tool = [{"role": "tool", "content": [image]}, {"role": "assistant", "content": "so"}]
    for sides in (("rejected",), ("chosen", "rejected")):
        row = rows[1] | {side: [*rows[1][side], *tool] for side in sides}
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, [rows[0], row])))
        with pytest.raises(DataError, match=r"data\.jsonl:2"):
            ready(configured(tmp_path, method="dpo"))


PACKED = [("dpo", "packing", "qwen2_5_vl"), ("orpo", "packing", "gemma3"), ("simpo", "packing", "llava"),
          ("kto", "padding_free", "qwen2_5_vl"), ("reward", "packing", "llava")]  # fmt: skip
PACKED_SLOWLY = [(method, "packing", name) for method in ("dpo", "cpo") for name in ("gemma3", "llava", "qwen3_vl")]


@pytest.mark.parametrize(
    ("asked", "key", "name"), [*PACKED, *(pytest.param(*case, marks=pytest.mark.slow) for case in PACKED_SLOWLY)]
)
def test_packed_answers_equal_padded_ones(asked, key, name, tmp_path):
    """Loss and gradients of a step; replacing an image of the isolation probe changes no other document."""
    rows = place_of(tmp_path, name)
    if asked == "kto":
        labelled = [{"prompt": row["prompt"], "completion": row["chosen"], "label": row == rows[0]} for row in rows]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, labelled)))
    method, padded, pad = ready(configured(tmp_path, method=asked))
    length = 3 * max(map(len, padded.train["input_ids"])) // 4  # of a document; rows hold two
    config = configured(tmp_path, method=asked, max_length=length, **{key: True})
    _, packed, collate = ready(config)
    if key == "packing":
        counts = packed.train["image_counts"]
        assert 1 < len(counts) < ROWS
        assert list(map(sum, counts)) == list(map(len, packed.train["images"]))
    policy = save_image_model(tmp_path / "again", name)
    policy = add_adapter(policy, config, scores=method.scores).train()
    torch.manual_seed(5)
    for parameter_name, parameter in policy.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(parameter, std=0.1)
    expected, _, _ = mean_loss(method, policy, [pad(list(padded.train))])
    tokenizer = load_run_tokenizer(config)
    isolation = isolate_for_run(policy, config, make_collator(config, tokenizer), packed.train)
    assert isolation.method == ("masks" if name == "gemma3" else "positions")
    loss, _, _ = mean_loss(method, policy, [collate([row]) for row in packed.train])
    if asked == "kto":
        loss, _, _ = mean_loss(method, policy, [collate(list(packed.train))])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert_same_gradients(gradients(loss, policy), gradients(expected, policy))


def test_packed_pairs_keep_to_a_number_of_pixels(tmp_path):
    place_of(tmp_path, "llava")
    keys = {"method": "dpo", "packing": True}
    _, data, _ = ready(configured(tmp_path, **keys))
    _, few, _ = ready(configured(tmp_path, **keys, image_max_pixels_per_row=60_000))
    most = [
        max(2 * sum(image["pixels"] for image in images) for images in each.train["images"]) for each in (data, few)
    ]
    assert most[0] > 60_000 >= most[1]
    with pytest.raises(ConfigError, match="image_max_pixels_per_row"):
        ready(configured(tmp_path, **keys, image_max_pixels_per_row=1_000))


def test_text_models_are_refused(tmp_path):
    place_of(tmp_path, "llava")
    save_model(tmp_path / "text", "llama")
    load_run_tokenizer(configured(tmp_path)).save_pretrained(tmp_path / "text")
    with pytest.raises(ModelError, match="text only"):
        ready(configured(tmp_path, method="dpo", model_name_or_path=str(tmp_path / "text")))
