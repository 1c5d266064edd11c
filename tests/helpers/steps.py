"""Forwards and backwards of a step outside of a training loop."""

import torch


def run_step(stepper, sums, batches, loss_count, may_capture=False):
    """Run the micro-batches of a step as `TrainingLoop.train_step` does; return the sums of their metrics [n]."""

    def forward(batch, loss_count):
        values = sums(batch)
        return values["loss"] / loss_count, torch.stack([value.detach() for value in values.values()])

    if not stepper.is_eager:
        return stepper.forward_backward(forward, batches, loss_count, may_capture)
    results = []
    for batch in batches:
        loss, batch_sums = forward(batch, loss_count)
        loss.backward()
        results.append(batch_sums)
    return sum(results)
