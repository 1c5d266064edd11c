"""Shapes of the tensors that a compiled forward saves for its backward."""

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd


class Saved:
    """A compiler backend that counts graphs and records the shapes of the tensors saved for backward.

    A dynamic size is recorded as None.
    """

    def __init__(self):
        self.shapes, self.graphs = [], 0
        self.backend = aot_autograd(
            fw_compiler=self._forward,
            bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        )

    def _forward(self, graph, inputs):
        self.graphs += 1
        placeholders = {node for node in graph.graph.nodes if node.op == "placeholder"}
        for node in graph.graph.output_node().args[0]:
            value = getattr(node, "meta", {}).get("val")
            if node not in placeholders and isinstance(value, torch.Tensor):
                self.shapes.append(tuple(size if isinstance(size, int) else None for size in value.shape))
        return make_boxed_func(graph.forward)
