"""Each rank loads its share: what comes out is one process's model, byte for byte, whole or in pieces."""

import hashlib

import pytest
import torch

from halfbyte.formats import FORMATS
from halfbyte.models.load import load_model
from halfbyte.parallel.placement import Placement
from halfbyte.tensor import QuantizedShard, QuantizedTensor

pytestmark = pytest.mark.dist

EXAMPLES = [example.spec for cls in FORMATS.values() for example in cls.examples()]
SHARD = ("shard",)


def digest(tensor):
    """Of all bytes of a parameter, a piece of one, or a buffer; of its kind, too."""
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


def loads(mesh, folder, keys, along):
    model = load_model(folder, device="cpu", mesh=mesh, along=along, **keys)
    return digests(model), model.name_or_path, model.generation_config.to_dict(), model.training


def expected(folder, keys, along=(), ranks=2):
    """What each rank is to hold."""
    model = load_model(folder, device="cpu", **keys)
    named = dict(model.named_parameters(remove_duplicate=False))
    rest = (model.name_or_path, model.generation_config.to_dict(), model.training)
    found = []
    for rank in range(ranks):
        own = digests(model)
        for name, parameter in named.items():
            if along and ".layers." in name:
                with torch.no_grad():
                    piece = Placement(along).cut(parameter, ranks)[rank]
                own[name] = digest(torch.nn.Parameter(piece.clone(), requires_grad=parameter.requires_grad))
        found.append((own, *rest))
    return found


def several(mesh, folder, specs, along):
    return [loads(mesh, folder, {"quantization": spec, "dtype": "bfloat16"}, along) for spec in specs]


@pytest.mark.parametrize("axis", ["data", "shard"])
def test_every_format(axis, two, tiny_checkpoint):
    folder = str(tiny_checkpoint("Qwen2", dtype="bfloat16"))
    along = SHARD if axis == "shard" else ()
    found = two.run(several, folder, EXAMPLES, along, layout={axis: 2})
    for at, spec in enumerate(EXAMPLES):
        wanted = expected(folder, {"quantization": spec, "dtype": "bfloat16"}, along)
        for rank in range(2):
            assert found[rank][at] == wanted[rank], spec
