"""Runs on mixed and streamed datasets: resumed with equal bytes after kills at random steps, and ended by name."""

import itertools
import json
import random
from collections import Counter

import pyarrow
import pytest
from datasets import Dataset

from halfbyte.config import load_config
from halfbyte.methods import method_of
from halfbyte.runs.metrics import MetricsFile
from halfbyte.train import sampler
from halfbyte.train.run import train
from halfbyte.utils.errors import ConfigError, TrainingError
from tests.data.conftest import byte_tokenizer
from tests.helpers.marks import slow_except
from tests.helpers.sft_runs import keys

STEPS = 10


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Rows of different lengths: `large.jsonl` (90), `middle.jsonl.zst` (40), a saved folder `small` (7); pairs."""
    folder = tmp_path_factory.mktemp("files")

    def rows(count, name):
        return [{"prompt": f"what is {name} {n}?", "completion": f" it is {n}{'0' * (n % 9)}."} for n in range(count)]

    def text(rows):
        return "".join(json.dumps(row) + "\n" for row in rows)

    (folder / "large.jsonl").write_text(text(rows(90, "a")))
    with pyarrow.CompressedOutputStream(str(folder / "middle.jsonl.zst"), "zstd") as stream:
        stream.write(text(rows(40, "b")).encode())
    Dataset.from_list(rows(7, "c")).save_to_disk(str(folder / "small"))
    Dataset.from_list(rows(60, "d")).to_parquet(str(folder / "rows.parquet"))
    pairs = [{"prompt": f"q {n}", "chosen": f" good {n}", "rejected": f" bad {n % 5}"} for n in range(70)]
    (folder / "pairs.jsonl").write_text(text(pairs))
    return folder


def entries(files, **weights):
    names = {"large": "large.jsonl", "middle": "middle.jsonl.zst", "small": "small", "rows": "rows.parquet"}
    return [{"path": str(files / names[name]), "weight": weight} for name, weight in weights.items()]


CASES = {
    "mixed": lambda files: {
        "dataset": entries(files, large=2, small=1), "mixing": "interleave", "stopping": "all", "num_train_epochs": 1.0,
    },
    "mixed and packed": lambda files: {
        "dataset": entries(files, large=0.2, middle=0.3, small=0.5), "packing": True,
    },
    "streamed": lambda files: {"dataset": str(files / "large.jsonl"), "streaming": True, "shuffle_buffer_size": 16},
    "streamed, mixed and packed": lambda files: {
        "dataset": entries(files, middle=3, rows=2, small=1), "mixing": "interleave", "stopping": "all",
        "streaming": True, "packing": True, "shuffle_buffer_size": 30,
    },
    "streamed pairs": lambda files: {
        "dataset": str(files / "pairs.jsonl"), "streaming": True, "shuffle_buffer_size": 9, "method": "dpo",
        "precompute_ref_log_probs": False,
    },
}  # fmt: skip


class KilledError(BaseException):
    """Stands for SIGKILL: nothing of the run handles it."""


def start(place, output, changed, kill_at=None, resume=None):
    """Run in `output`; stop as a kill does when step `kill_at` is recorded."""
    with pytest.MonkeyPatch.context() as patches:
        append = MetricsFile.append

        def append_or_die(self, record):
            if record["kind"] == "train" and record["step"] == kill_at:
                raise KilledError
            append(self, record)

        patches.setattr(MetricsFile, "append", append_or_die)
        asked = {"eval_split_size": 0, "sample_prompts": 0, "max_steps": STEPS, "save_total_limit": None} | changed
        return train(load_config(None, keys(place, output, **asked)), resume=resume)


def adapter(output):
    return (output / "adapter" / "adapter_model.safetensors").read_bytes()


def losses(output):
    return [record["loss"] for record in MetricsFile(output / "metrics.jsonl").records() if record["kind"] == "train"]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_five_kills_at_random_steps_leave_equal_bytes(case, place, files, tmp_path):
    changed = CASES[case](files)
    start(place, tmp_path / "whole", changed)
    moments = sorted(random.Random(case).sample(range(1, STEPS + 1), 5))
    for number, moment in enumerate(moments):
        with pytest.raises(KilledError):
            start(place, tmp_path / "killed", changed, kill_at=moment, resume=number > 0)
    start(place, tmp_path / "killed", changed, resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert adapter(tmp_path / "killed") == adapter(tmp_path / "whole")


@pytest.mark.parametrize(
    "case",
    slow_except(["mixed and packed", "streamed, mixed and packed", "streamed pairs"], ["streamed, mixed and packed"]),
)
def test_a_resumed_run_has_equal_bytes(case, place, files, tmp_path):
    changed = CASES[case](files) | {"max_steps": 5}
    start(place, tmp_path / "whole", changed)
    with pytest.raises(KilledError):
        start(place, tmp_path / "killed", changed, kill_at=4)
    start(place, tmp_path / "killed", changed, resume=True)
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert adapter(tmp_path / "killed") == adapter(tmp_path / "whole")


def stream_of(files, **changed):
    config = load_config(None, {"model_name_or_path": "m", "max_steps": 3, "streaming": True} | changed)
    stream = method_of(config).prepare(config, byte_tokenizer()).stream
    stream.require(1)
    return stream


def ids(rows):
    return [tuple(row["input_ids"]) for row in rows]


@pytest.mark.parametrize("name", ["large.jsonl", "middle.jsonl.zst", "small", "rows.parquet"])
@pytest.mark.parametrize("packing", [False, True])
def test_a_stream_has_every_row_once_and_resumes_at_every_position(name, packing, files):
    options = {"dataset": str(files / name), "shuffle_buffer_size": 18, "packing": packing, "max_length": 256}
    stream = stream_of(files, **options)
    rows, positions = [], {}
    for number, row in enumerate(stream.rows(0)):
        rows += ids([row])
        positions[number] = json.loads(json.dumps(stream.position(number)))
    plain = load_config(None, {"model_name_or_path": "m"} | options | {"shuffle_buffer_size": 4096, "packing": False})
    documents = ids(method_of(plain).prepare(plain, byte_tokenizer()).train)
    assert Counter(itertools.chain(*rows)) == Counter(itertools.chain(*documents))
    if not packing:
        assert sorted(rows) == sorted(documents)
        assert rows != documents
    again = stream_of(files, **options)
    for first in (0, len(rows) // 2, len(rows) - 1):
        again.resume(positions[first])
        assert ids(again.rows(first)) == rows[first:]


@pytest.mark.parametrize("stopping", ["first", "all"])
def test_every_block_of_a_stream_has_the_shares(stopping, files):
    dataset = entries(files, large=3, small=1)
    stream = stream_of(files, dataset=dataset, mixing="interleave", stopping=stopping, shuffle_buffer_size=8)
    tokenizer = byte_tokenizer()
    small = ["what is c" in tokenizer.decode(row) for row in ids(stream.rows(0))]
    assert len(small) > (110 if stopping == "all" else 20)
    ends = range(8, len(small) - 8, 8)
    assert all(sum(small[:end]) == end // 4 for end in ends)
    assert [part["share"] for part in stream.first.report["train"]["mixture"]] == [0.75, 0.25]


def test_no_more_than_a_block_is_read_ahead(place, tmp_path):
    def generated():
        for number in range(10_000):
            read.append(number)
            yield {"prompt": f"q {number}", "completion": "a"}

    read = []
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in generated()))
    read.clear()
    stream = stream_of(None, dataset=str(path), shuffle_buffer_size=50)
    for number, _ in enumerate(itertools.islice(stream.rows(0), 700)):
        held = stream.readers[0].position["row"] - number
        assert 0 < held <= 50


@pytest.mark.parametrize("ways", [1, 2, 3])
def test_ranks_train_on_the_rows_of_one_process(ways, files):
    stream = stream_of(files, dataset=str(files / "large.jsonl"), shuffle_buffer_size=16)
    stream.require(24)
    every = ids(itertools.islice(stream.rows(0), 24))

    class Collate:
        blank = None

        def __call__(self, rows):
            return ids(rows)

    found = []
    for rank in range(ways):
        mesh = type("Ranks", (), {"coordinate": lambda self, *axes, r=rank: r, "degree": lambda self, *axes: ways})()
        found.append(list(sampler.batches(stream, 2, Collate(), mesh, skip=0)))
        assert len(found[-1]) == 12 // ways
    micro_batches = [found[number % ways][number // ways] for number in range(12)]
    assert list(itertools.chain(*micro_batches)) == every


def test_a_stream_that_is_known_to_be_short_is_refused_before_the_run(place, files, tmp_path):
    for name in ("large.jsonl", "middle.jsonl.zst", "rows.parquet", "small"):
        changed = {"dataset": str(files / name), "streaming": True, "max_steps": 100, "shuffle_buffer_size": 64}
        with pytest.raises(ConfigError, match="max_steps"):
            start(place, tmp_path / "out", changed)
        assert not (tmp_path / "out").exists()


def test_a_stream_that_ends_in_a_run_says_so_when_the_end_is_read(place, files, tmp_path):
    changed = {
        "dataset": str(files / "middle.jsonl.zst"),
        "streaming": True,
        "max_steps": 12,
        "shuffle_buffer_size": 16,
    }
    with pytest.raises(TrainingError, match="max_steps"):
        start(place, tmp_path / "out", changed)
    assert len(losses(tmp_path / "out")) == 8  # of 10 steps: the third block is the last one
    start(place, tmp_path / "again", changed | {"max_steps": 10})


def test_rows_that_cannot_be_trained_on_are_left_out_of_later_blocks(tmp_path):
    rows = [{"prompt": "q", "completion": "a"}] * 4 + [{"prompt": "q", "completion": "b" * 400}] * 4
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows]))
    stream = stream_of(None, dataset=str(path), shuffle_buffer_size=4, max_length=64, overlong="drop")
    assert len(list(stream.rows(0))) == 8


def test_a_malformed_row_of_a_later_block_is_named_by_file_and_line(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"prompt": "q", "completion": "a"}) + "\n" for _ in range(9)) + "{\n")
    stream = stream_of(None, dataset=str(path), shuffle_buffer_size=4)
    with pytest.raises(TrainingError, match=f"{path}:10"):
        list(stream.rows(0))


@pytest.mark.parametrize("name", ["d.txt", "d.json"])
def test_files_that_are_read_in_one_piece_are_refused(name, tmp_path):
    (tmp_path / name).write_text('[{"text": "a"}]')
    with pytest.raises(Exception, match="streaming"):
        stream_of(None, dataset=str(tmp_path / name))
