"""Caches of two checks that every run begins with: replayed steps of the memory plan, and complete checkpoints."""

import json
from pathlib import Path

from halfbyte.loading import completeness
from halfbyte.plan.shapes import ModelShapes

_steps = {}  # all that a replayed step depends on → its measured bytes
_replay = ModelShapes._replay
_complete = set()  # origins and files of checkpoints that `check_complete` accepted
_check_complete = completeness.check_complete


def once(shapes, batch, levels, training=True):
    """`ModelShapes._replay`, which copies the model and runs the copy, only where no equal step was replayed."""
    sizes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in shapes._inputs(batch).items())
    target = shapes.device.type, shapes.dtype, shapes.attention(batch), shapes.fused, bool(shapes._patched.fused)
    key = (_description(shapes.model), sizes, target, levels, training)
    if key not in _steps:
        _steps[key] = _replay(shapes, batch, levels, training)
    return _steps[key]


def _description(model):
    config = json.dumps(model.config.to_dict(), sort_keys=True, default=str)
    modules = tuple((name, type(module), _own_state(module)) for name, module in model.named_modules())
    return config, model.config._attn_implementation, modules


def _own_state(module):
    tensors = module._parameters | module._buffers
    held = (
        (name, type(t), t.shape, t.dtype, t.requires_grad, str(getattr(t, "format", None)))
        for name, t in tensors.items()
        if t is not None
    )
    values = (
        (name, "an object" if " at 0x" in (said := repr(value)) else said)
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules", "config")
    )
    return (*held, *values)


def check_changed(origin, config):
    """`check_complete`, which builds a model, only where no checkpoint with these files was accepted."""
    files = [(path, path.stat()) for path in sorted(Path(origin.name).glob("*"))]
    key = (repr(origin), *((path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns) for path, stat in files))
    if key not in _complete:
        _check_complete(origin, config)
        _complete.add(key)


def install(patch):
    patch.setattr(completeness, "check_complete", check_changed)
    patch.setattr(ModelShapes, "_replay", once)
