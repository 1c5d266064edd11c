"""Cache of replays across tests: replaying a step takes half of a tiny run's time."""

import json

from halfbyte.plan import replay, shapes

_made = {}
_own = replay.replay


def once(model, layers, batch, where, levels=None):
    """Return the cached result of `plan.replay.replay` for equal arguments."""
    sizes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in batch.items())
    key = (_description(model), tuple(layers), sizes, where, levels and tuple(levels))
    if key not in _made:
        _made[key] = _own(model, layers, batch, where, levels)
    return _made[key]


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


def install(patch):
    patch.setattr(shapes, "replay", once)
