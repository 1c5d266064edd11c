"""Supervised fine-tuning runs of a few steps, from the folder of the fixture `place`."""

from halfbyte.config import load_config
from halfbyte.train.run import train


def keys(place, output, **changed):
    return {
        "model_name_or_path": str(place / "model"),
        "dataset": str(place / "data.jsonl"),
        "output_dir": str(output),
        "device": "cpu",
        "dtype": "float32",
        "eval_split_size": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "save_steps": 2,
        "learning_rate": 1e-2,
        "lora_dropout": 0.1,
        "max_length": 64,
        "r": 4,
        "sample_prompts": 2,
        "sample_max_new_tokens": 4,
    } | changed


def run(place, output, **changed):
    return train(load_config(None, keys(place, output, **changed)))
