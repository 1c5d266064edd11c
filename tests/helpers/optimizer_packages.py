"""Stand-ins for packages with optimizers that are not installed: they record how they are constructed, and step."""

import sys
from types import ModuleType

import torch
from torch.optim import Optimizer

MADE = []  # (name of the class, arguments), in the order of construction


class Recorded(Optimizer):
    """Plain gradient descent that records its arguments."""

    def __init__(self, params, lr, **keywords):
        params = list(params)
        MADE.append((type(self).__name__, {"params": params, "lr": lr, **keywords}))
        super().__init__(params, {"lr": lr, "weight_decay": 0.0} | keywords)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(group["lr"] * parameter.grad)


class ScheduleFree(Recorded):
    """Gradient descent with an average of its weights, which `eval` puts in their place and `train` takes back."""

    def __init__(self, params, lr, **keywords):
        super().__init__(params, lr, **keywords)
        for group in self.param_groups:
            group["train_mode"] = True

    def _exchange(self, training):
        for group in self.param_groups:
            if group["train_mode"] == training:
                continue
            group["train_mode"] = training
            for parameter in group["params"]:
                if other := self.state[parameter]:
                    kept = parameter.detach().clone()
                    parameter.data.copy_(other["other"])
                    other["other"].copy_(kept)

    def train(self):
        self._exchange(True)

    def eval(self):
        self._exchange(False)

    @torch.no_grad()
    def step(self, closure=None):
        if not all(group["train_mode"] for group in self.param_groups):
            raise RuntimeError("a step in evaluation mode")
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                average = self.state[parameter].setdefault("other", torch.zeros_like(parameter))
                average.lerp_(parameter, 0.5)


class Lomo(Optimizer):
    """Gradient descent in hooks: each one updates the weights whose gradients are complete."""

    def __init__(self, model, lr=1e-3):
        MADE.append((type(self).__name__, {"lr": lr}))
        self.model, self.lr, self.grad_func = model, lr, self._update_all
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_hook(self.grad_func)
        super().__init__(model.parameters(), {"lr": lr})

    @torch.no_grad()
    def _update_all(self, gradient):
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                gradient, parameter.grad = parameter.grad, None
                self._update(name, parameter, gradient)

    def _update(self, name, parameter, gradient):
        parameter.data.sub_(self.lr * gradient)


class AdaLomo(Lomo):
    """Gradient descent divided by the root of a second moment, whose decay depends on the number of steps."""

    def __init__(self, model, lr=1e-3, loss_scale=2**10):
        self.loss_scale, self.step_num = loss_scale, 0
        self.exp_avg_sq = {name: torch.zeros(()) for name, _ in model.named_parameters()}
        self.exp_avg_sq_row, self.exp_avg_sq_col = {}, {}
        super().__init__(model, lr)

    def _update(self, name, parameter, gradient):
        gradient = gradient / (self.loss_scale or 1)
        decay = 1 - self.step_num**-0.8
        self.exp_avg_sq[name].mul_(decay).add_((1 - decay) * gradient.square().mean())
        super()._update(name, parameter, gradient * (self.exp_avg_sq[name] + 1e-30).rsqrt())


def _class(name, base=Recorded):
    return type(name, (base,), {})


MODULES = {
    "schedulefree": [_class(f"{kind}ScheduleFree", ScheduleFree) for kind in ("RAdam", "AdamW", "SGD")],
    "lomo_optim": [Lomo, AdaLomo],
    "grokadamw": [_class("GrokAdamW")],
    "optimi": [_class("StableAdamW")],
    "torchao": [],
    "torchao.optim": [_class("AdamW4bit"), _class("AdamW8bit")],
    "torchdistx": [],
    "torchdistx.optimizers": [_class("AnyPrecisionAdamW")],
}


def install(monkeypatch):
    """Put the stand-ins into `sys.modules`, and forget what was made."""
    MADE.clear()
    for name, classes in MODULES.items():
        module = ModuleType(name)
        module.__spec__ = type(sys.__spec__)(name, None)
        vars(module).update({kind.__name__: kind for kind in classes})
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("torchao", "torchdistx"):
        for child in MODULES:
            if child.startswith(f"{name}."):
                setattr(sys.modules[name], child.partition(".")[2], sys.modules[child])
