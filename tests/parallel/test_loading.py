"""Sharded loading gives the bytes of one process's model, full or in pieces."""

import contextlib
import hashlib
import re
import shutil
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfbyte.formats import FORMATS, from_spec
from halfbyte.loading import sharded
from halfbyte.loading.load import load_model
from halfbyte.mesh.mesh import SINGLE_PROCESS
from halfbyte.modeling.architectures import all_linear
from halfbyte.parallel.shard.placement import Placement
from halfbyte.parallel.shard.weights import shard_blocks
from halfbyte.parallel.tensor import sharded_dims
from halfbyte.tensor import QuantizedShard, QuantizedTensor
from halfbyte.utils import notices
from halfbyte.utils.errors import HalfbyteError
from tests.helpers.all_families import build
from tests.helpers.imported_checkpoints import CONFIGS, converted
from tests.helpers.patch_models import tiny

pytestmark = pytest.mark.dist

EXAMPLES = [example.spec for cls in FORMATS.values() for example in cls.examples()]
SHARD = ("shard",)


def digest(tensor):
    """Return a digest of the kind and all bytes of a parameter, a piece of one, or a buffer."""
    if isinstance(tensor, QuantizedTensor):
        kind, held = (
            f"{tensor.format.spec} {tuple(tensor.shape)}",
            [tensor.parts[name] for name in sorted(tensor.parts)],
        )
    elif isinstance(tensor, QuantizedShard):
        kind, held = f"{tensor.spec} {tensor.full_shape} of {tensor.rows}", [tensor.raw]
    else:
        kind, held = f"{tuple(tensor.shape)}", [tensor]
    found = hashlib.sha256(f"{kind} {tensor.dtype} {tensor.requires_grad} {tensor.device}".encode())
    for each in held:
        found.update(each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:12]


def digests(model):
    parameters = dict(model.named_parameters(remove_duplicate=False))
    return {name: digest(tensor) for name, tensor in parameters.items() | dict(model.named_buffers()).items()}


def known(model):
    """Return the facts of a model that must equal one process's, besides tensors."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    trains = model.training, {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    config = model.config.to_dict()
    if skipped := config.get("quantization_config", {}).get("llm_int8_skip_modules"):
        skipped.sort()  # transformers takes them from a set
    return kinds, trains, all_linear(model), model.name_or_path, model.generation_config.to_dict(), config


def loads(mesh, folder, keys, along=()):
    """Return the tensors a rank holds, its other facts, and why it loaded the full checkpoint."""
    notices.reset_notices()
    model = load_model(folder, device="cpu", mesh=mesh, along=along, **keys)
    return digests(model), known(model), notices.notices_so_far().get("loaded-whole")


def expected(folder, keys, along=(), ranks=2):
    """Return the tensors and facts that each rank must have."""
    model = load_model(folder, device="cpu", **keys)
    named = dict(model.named_parameters(remove_duplicate=False))
    found = []
    for rank in range(ranks):
        own = digests(model)
        for name, parameter in named.items():
            if along and re.search(r"\.(layers|h)\.", name) and "vision" not in name:
                with torch.no_grad():
                    piece = Placement(along).split(parameter, ranks)[rank]
                own[name] = digest(torch.nn.Parameter(piece.clone(), requires_grad=parameter.requires_grad))
        found.append((own, known(model), None))
    return found


def several(mesh, models, along):
    return [loads(mesh, folder, keys, along) for folder, keys in models]


def check(ranks, axis, models):
    """Check that models loaded on ranks equal those of one process."""
    along = SHARD if axis == "shard" else ()
    found = ranks.run(several, models, along, layout={axis: ranks.size})
    for at, (folder, keys) in enumerate(models):
        for rank, wanted in enumerate(expected(folder, keys, along, ranks.size)):
            for part, other in zip(found[rank][at], wanted, strict=True):
                assert part == other, (folder, keys, rank)


def keys_of(spec):
    return {"quantization": spec, "dtype": "bfloat16"}


@pytest.fixture(scope="module")
def folder(tiny_checkpoint):
    """Write a checkpoint with biases, in several files."""
    made = tiny_checkpoint("Qwen2", dtype="bfloat16", num_hidden_layers=3)
    assert len(list(made.glob("*.safetensors"))) >= 3
    return str(made)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "shard"])
def test_every_format(axis, two, folder):
    check(two, axis, [(folder, keys_of(spec)) for spec in EXAMPLES])


def test_tensor_parallel_linears_are_loaded_sharded(two, tiny_checkpoint):
    """Rows of q, k, v, gate and up and columns of o and down, in full quantization blocks; others are full."""
    folder = str(tiny_checkpoint("Qwen2", dtype="bfloat16", intermediate_size=128))
    specs = ("nf4", "int8", "fp8", "nvfp4", "kbit4")
    models = [(folder, keys_of(spec)) for spec in specs] + [(folder, {"load_in_4bit": False})]
    found = two.run(several, models, ("tensor",), layout={"tensor": 2})
    for at, (where, keys) in enumerate(models):
        model = load_model(where, device="cpu", **keys)
        dims, named = sharded_dims(model), dict(model.named_parameters())
        assert {name.split(".", 3)[3] for name in dims if name.endswith("bias")} == {
            f"self_attn.{each}_proj.bias" for each in "qkv"
        }
        for rank in range(2):
            wanted = digests(model)
            for name, dim in dims.items():
                piece = Placement(("tensor",), dim=dim).split(named[name].detach(), 2)[rank]
                wanted[name] = digest(torch.nn.Parameter(piece, requires_grad=named[name].requires_grad))
                assert piece.nbytes < named[name].nbytes * 0.6
            assert found[rank][at][0] == wanted, keys


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "shard"])
def test_prequantized_checkpoints(axis, two, folder, tiny_checkpoint, tmp_path):
    """Quantized by halfbyte, in each format and in several, by other tools, and not at all."""
    models = [(folder, {"load_in_4bit": False, "dtype": "float32"})]
    firsts = [examples[0].spec for cls in FORMATS.values() if (examples := cls.examples())]
    for at, quantization in enumerate([*firsts, {"*.0.*": "16bit", "*.down_proj": "fp4", "*": "nf4"}]):
        load_model(folder, quantization=quantization, dtype="bfloat16", device="cpu").save_pretrained(
            tmp_path / f"{at}"
        )
        models.append((str(tmp_path / f"{at}"), {"dtype": "bfloat16"}))
    for cls in CONFIGS:
        converted(tiny_checkpoint(), tmp_path / cls.name, cls)
        models.append((str(tmp_path / cls.name), {"dtype": "bfloat16"}))
    check(two, axis, models)


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["data", "shard"])
def test_experts_towers_and_tied_heads(axis, two, tiny_checkpoint, tmp_path):
    """transformers stacks experts, renames a tower's weights, and ties heads that are in the file or are not."""
    models = []
    for name in ("qwen3_moe", "mixtral"):
        build(name).save_pretrained(tmp_path / name)
        models.append((str(tmp_path / name), {"dtype": "float32"}))
    tiny("Gemma3", adapter=False).save_pretrained(tmp_path / "Gemma3")
    models.append((str(tmp_path / "Gemma3"), {"dtype": "float32", "bnb_4bit_blocksize": 32}))
    tied = tiny_checkpoint("Gemma", tie_word_embeddings=True)
    shutil.copytree(tied, tmp_path / "twice")
    build("falcon").save_pretrained(tmp_path / "falcon")  # linears of a class of its own
    models.append((str(tmp_path / "falcon"), {"dtype": "float32", "load_in_4bit": False}))
    change(tmp_path / "twice", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    models += [(str(folder), {"dtype": "float32"}) for folder in (tied, tmp_path / "twice")]
    check(two, axis, models)


def change(folder, edit):
    """Edit the checkpoint's tensors and write them to one file."""
    tensors = {}
    for file in folder.glob("*.safetensors*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
def test_four_ranks_and_two_axes(four, folder):
    """Shards over two ranks, replicas over the other two; the small key projection has fewer rows than ranks."""
    keys = keys_of("nf4")
    found = four.run(loads, folder, keys, SHARD, layout={"data": 2, "shard": 2})
    wanted = expected(folder, keys, SHARD)
    for rank in range(4):
        assert found[rank] == wanted[rank % 2]
    check(four, "shard", [(folder, keys)])


def on_two_hosts(mesh, folder, keys, along):
    """Load with ranks 0 and 1 on one host, 2 and 3 on another."""
    with counted() as read:
        found = loads(replace(mesh, local=mesh.rank % 2), folder, keys, along)
    return found, read


def test_every_host_reads_each_entry_once(four, folder):
    keys = keys_of("nf4")
    found = four.run(on_two_hosts, folder, keys, SHARD, layout={"shard": 4})
    for rank, wanted in enumerate(expected(folder, keys, SHARD, 4)):
        assert found[rank][0] == wanted
    entries = Counter(name for file in Path(folder).glob("*.safetensors") for name in load_file(file))
    reads = [read for _, read in found]
    assert reads[0] + reads[1] == reads[2] + reads[3] == entries
    assert all(len(read) > len(entries) / 4 for read in reads)


@contextlib.contextmanager
def counted():
    """Count how often each entry is read from disk."""
    opens, read = safetensors.safe_open, Counter()

    class Slice:
        def __init__(self, name, of):
            self.name, self.of = name, of

        def __getattr__(self, name):
            return getattr(self.of, name)

        def __getitem__(self, index):
            read[self.name] += 1
            return self.of[index]

    class Opened:
        def __init__(self, *args, **keys):
            self.file = opens(*args, **keys)

        def __enter__(self):
            self.file.__enter__()
            return self

        def __exit__(self, *error):
            self.file.__exit__(*error)

        def get_slice(self, name):
            return Slice(name, self.file.get_slice(name))

    safetensors.safe_open = Opened
    try:
        yield read
    finally:
        safetensors.safe_open = opens


class Held(TorchDispatchMode):
    """Tracks the peak bytes of tensors made since its start."""

    def __init__(self):
        super().__init__()
        self.now, self.most, self.seen = 0, 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if (key := storage.data_ptr()) not in self.seen and storage.nbytes():
                    self.seen.add(key)
                    self.now += storage.nbytes()
                    self.most = max(self.most, self.now)
                    weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    def _gone(self, key, size):
        self.seen.discard(key)
        self.now -= size


def peak(mesh, folder, keys):
    """Return peak bytes, final bytes, and the bytes to quantize the largest tensor."""
    with Held() as held:
        model = load_model(folder, device="cpu", mesh=mesh, along=SHARD, **keys)
    kept = sum(getattr(parameter, "raw", parameter).nbytes for parameter in model.parameters())
    with Held() as alone:
        weight = torch.randn(512, 128).to(torch.bfloat16)
        QuantizedTensor.quantize(weight, from_spec(model.model.layers[0].mlp.up_proj.weight.spec))
    return held.most, kept, alone.most + weight.nbytes


@pytest.mark.slow
def test_peak_memory_of_a_rank_is_below_the_model(two, tiny_checkpoint):
    """The peak is what the rank keeps, one tensor that is quantized, and one in flight."""
    shape = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 24, "vocab_size": 128, "head_dim": 32}
    folder, keys = str(tiny_checkpoint("Llama", dtype="bfloat16", **shape)), keys_of("blockwise4:nf4:64:nested")
    with torch.no_grad():
        whole = load_model(folder, device="cpu", **keys)
        whole = sum(p.nbytes for p in whole.model.layers.parameters())
    for most, kept, quantizing in two.run(peak, folder, keys, layout={"shard": 2}):
        assert kept < 0.6 * whole
        assert most <= kept + quantizing < whole


def computes(mesh, folder, on_host):
    """Return the logits of a model loaded in pieces, and of one process's model."""
    tokens = torch.arange(10, 20)[None]
    keys = {"dtype": "float32", "device": "cpu"}
    with torch.no_grad():
        wanted = load_model(folder, **keys)(tokens).logits
        model = load_model(folder, mesh=mesh, along=SHARD, **keys)
        model.requires_grad_(False)
        stays = ["call"] * len(model.model.layers)
        shard_blocks(model.model, list(model.model.layers), mesh, stays, on_host=on_host)
        assert model.model.layers[0].mlp.up_proj.weight.shape == (96, 64)
        found = [model(tokens).logits for _ in range(2)]
    return [torch.equal(each, wanted) for each in found]


@pytest.mark.parametrize("on_host", [(), (0,), (0, 1)])
def test_pieces_compute_the_logits_of_one_process(two, folder, on_host):
    assert two.run(computes, folder, on_host, layout={"shard": 2}) == [[True, True]] * 2


def fails(mesh, folder, keys, along):
    try:
        load_model(folder, device="cpu", mesh=mesh, along=along, **keys)
    except HalfbyteError as error:
        return type(error).__name__, error.message, error.fix
    return "nothing"


def up(layer):
    return f"model.layers.{layer}.mlp.up_proj.weight"


NORM, HEAD, EMBEDDING = "model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"


def not_a_number(name):
    return lambda tensors: tensors[name].view(-1)[3:4].fill_(torch.nan)


DAMAGE = [
    (up(0), {}, not_a_number(up(0))),
    (up(1), {}, not_a_number(up(1))),
    (NORM, {}, not_a_number(NORM)),
    (up(1), {"load_in_4bit": False}, not_a_number(up(1))),
    (up(1), {}, lambda tensors: tensors.pop(up(1))),
    (EMBEDDING, {}, lambda tensors: tensors.update({EMBEDDING: tensors[EMBEDDING][1:].clone()})),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axis", ["data", "shard"])
def test_errors_are_equal_on_all_ranks(axis, two, tiny_checkpoint, tmp_path):
    """Whichever rank reads the tensor, all ranks raise the error of one process."""
    along = SHARD if axis == "shard" else ()
    for at, (name, keys, edit) in enumerate(DAMAGE):
        folder = tmp_path / f"{at}"
        shutil.copytree(tiny_checkpoint("Qwen2"), folder)
        change(folder, edit)
        found = two.run(fails, str(folder), keys, along, layout={axis: 2})
        assert found[0] == found[1] == fails(SINGLE_PROCESS, str(folder), keys, ())
        assert name in found[0][1]


def entry_by_entry(mesh, folder, keys, along):
    """Split the entries so that both ranks read parts of what transformers stacks."""
    blocks, sharded.BLOCK_PREFIX = sharded.BLOCK_PREFIX, re.compile(r".*(?=\.)")
    try:
        return loads(mesh, folder, keys, along)
    finally:
        sharded.BLOCK_PREFIX = blocks


@pytest.mark.sampled(2)
@pytest.mark.parametrize("axis", ["data", "shard"])
def test_unsupported_checkpoints_are_loaded_in_full(axis, two, tiny_checkpoint, tmp_path):
    along = SHARD if axis == "shard" else ()
    pickled = shutil.copytree(tiny_checkpoint(), tmp_path / "pickled")
    change(pickled, lambda tensors: torch.save(dict(tensors), pickled / "pytorch_model.bin"))
    (pickled / "model.safetensors").unlink()
    build("qwen3_moe").save_pretrained(tmp_path / "experts")
    cases = [(loads, pickled, "safetensors"), (entry_by_entry, tmp_path / "experts", "experts")]
    for case, folder, why in cases:
        keys = {"dtype": "float32"}
        found = two.run(case, str(folder), keys, along, layout={axis: 2})
        for rank, wanted in enumerate(expected(str(folder), keys, along)):
            assert found[rank][:2] == wanted[:2]
            assert str(folder) in found[rank][2]
            assert why in found[rank][2]
