"""Columns of rows that halfbyte does not know: an array per row, which the forward of a tiny Llama receives."""

import json
import random

import torch.nn.functional as F
from transformers import AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaModel

from halfbyte.batch import COLUMNS, Column
from halfbyte.train.run import train
from tests.helpers.rank_runs import configured, write_place

PIXELS = Column("pixels", per="document", in_data=True, shape=(2, 3))
PATCHES = Column("patches", per="document", in_data=True, dtype="int64", shape=(2,), ragged=True, fill=-1)
MARK = "@"  # stands in the text where the row's pixels belong
ROWS = 24
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1}


def forward_with_pixels(self, input_ids=None, pixels=None, inputs_embeds=None, **inputs):
    """Add the pixels of document n to the embedding of the n-th mark."""
    if pixels is not None:
        marks = input_ids == self.config.image_token_id
        entries = (marks.flatten().cumsum(0) - 1).clamp(min=0).view_as(input_ids)
        values = F.pad(pixels.flatten(1)[entries], (0, self.config.hidden_size - 6))
        inputs_embeds = self.embed_tokens(input_ids) + values * marks[..., None]
        input_ids = None
    return LLAMA_FORWARD(self, input_ids=input_ids, inputs_embeds=inputs_embeds, **inputs)


LLAMA_FORWARD = LlamaModel.forward


def declare(patches):
    patches.setitem(COLUMNS, "pixels", PIXELS)
    patches.setitem(COLUMNS, "patches", PATCHES)
    patches.setattr(LlamaModel, "forward", forward_with_pixels)


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def example_rows(patches=False):
    draw = random.Random(0)
    rows = []
    for number in range(ROWS):
        row = {"text": f"{'x' * draw.randint(0, 9)}{MARK} what is {number}? it is {'1' * draw.randint(1, 12)}."}
        row["pixels"] = [[draw.gauss(0, 2) for _ in range(3)] for _ in range(2)]
        if patches:
            row["patches"] = [[number, n] for n in range(number % 4)]
        rows.append(row)
    return rows


def write_pixel_place(folder):
    """A tiny Llama that knows the token of `MARK`, and `data.jsonl` with `example_rows`."""
    write_place(folder, **SIZES)
    token = AutoTokenizer.from_pretrained(folder / "model").convert_tokens_to_ids(MARK)
    path = folder / "model/config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_token_id": token}))
    write_rows(folder / "data.jsonl", example_rows())
    return folder


def run(place, output, *, resume=None, **keys):
    keys = {"sample_prompts": 0, "eval_split_size": 0, "per_device_train_batch_size": ROWS} | keys
    train(configured(place, output, **keys), resume=resume)
    return [record["loss"] for record in map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
            if record["kind"] == "train"]  # fmt: skip
