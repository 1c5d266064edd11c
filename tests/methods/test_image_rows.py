"""Preference methods on prompts with images: losses equal TRL's, bad rows are named, other methods refuse images."""

import json

import pytest
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from PIL import Image
from trl import DPOConfig, DPOTrainer
from trl.trainer.kto_trainer import DataCollatorForVisionUnpairedPreference

from halfbyte.config import load_config
from halfbyte.loading.tokenizers import load_run_tokenizer
from halfbyte.methods import method_of
from halfbyte.modeling.architectures import all_linear
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError, DataError, ModelError
from tests.helpers.gguf_models import save_model
from tests.helpers.image_models import load_processor, picture, save_image_model
from tests.helpers.pair_models import assert_same_gradients, gradients, mean_loss
from tests.methods.test_kto import theirs

FAMILIES = ("qwen2_5_vl", "gemma3", "llava_next")
ROWS = 4
LAST_BREAK = "<|im_end|>\n{% endfor %}"  # TRL trains it, as a part of the answer


def write_pairs(folder):
    """`data.jsonl` of prompts with 0 to 2 images and two answers, and the images in `pictures`."""
    (folder / "pictures").mkdir(parents=True)
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


def test_a_run_saves_an_adapter(tmp_path):
    place_of(tmp_path, "gemma3")
    config = configured(tmp_path, method="dpo", output_dir=str(tmp_path / "out"), max_steps=2, logging_steps=1)
    train(config)
    assert (tmp_path / "out/adapter/adapter_model.safetensors").is_file()
    assert json.loads((tmp_path / "out/data_report.json").read_text())["train"]["images"]["count"] == 4


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_methods_that_sample_refuse_images(method, tmp_path):
    place_of(tmp_path, "llava")
    prompt = {"prompt": [{"role": "user", "content": "what is it?"}], "image": "pictures/0-0.png"}
    parts = [{"type": "image", "image": "pictures/0-0.png"}, {"type": "text", "text": "what is it?"}]
    keys = {"reward_funcs": "exact", "num_generations": 2, "per_device_train_batch_size": 2}
    for row in (prompt, {"prompt": [{"role": "user", "content": parts}]}):
        (tmp_path / "data.jsonl").write_text("\n".join([json.dumps(row)] * 4))
        with pytest.raises(DataError, match=r"data\.jsonl:1"):
            ready(configured(tmp_path, method=method, **keys))


def test_images_of_answers_are_refused(tmp_path):
    rows = place_of(tmp_path, "llava")
    image = {"type": "image", "image": "pictures/0-0.png"}
    tool = [{"role": "tool", "content": [image]}, {"role": "assistant", "content": "so"}]
    for sides in (("rejected",), ("chosen", "rejected")):
        row = rows[1] | {side: [*rows[1][side], *tool] for side in sides}
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, [rows[0], row])))
        with pytest.raises(DataError, match=r"data\.jsonl:2"):
            ready(configured(tmp_path, method="dpo"))


def test_packed_pairs_and_text_models_are_refused(tmp_path):
    place_of(tmp_path, "llava")
    with pytest.raises(ConfigError, match="packing"):
        ready(configured(tmp_path, method="dpo", packing=True))
    save_model(tmp_path / "text", "llama")
    load_run_tokenizer(configured(tmp_path)).save_pretrained(tmp_path / "text")
    with pytest.raises(ModelError, match="text only"):
        ready(configured(tmp_path, method="dpo", model_name_or_path=str(tmp_path / "text")))
