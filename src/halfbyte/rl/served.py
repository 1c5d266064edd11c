"""Rollouts by a vLLM server: check it before a run, load the current adapter into it, verify that its weights match."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config.schema import RunKeys
from ..data.images import IMAGES
from ..data.prepare import PreparedData
from ..export.adapter import AdapterLayers
from ..export.served_adapter import ServedAdapter
from ..generation import Completion, Rollouts, Sampling
from ..generation.vllm import KEY, VllmServer
from ..loading.find import read_model_config
from ..modeling.rope_scaling import config_overrides
from ..plan.memory_plan import RolloutPlan
from ..utils.console import Console
from ..utils.errors import ConfigError, TrainingError
from ..utils.files import remove, temporary_path
from ..utils.notices import notice
from ..utils.text import brief, one_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Share of ratios outside 0.9 to 1.1 above which a server has other weights; NF4 against 16 bits exceeds it.
OTHER_WEIGHTS_SHARE = 0.5
MIN_TOKENS = 32  # tokens below which that share is not significant
COMPARED_IDS = 64  # token ids of a prompt that both tokenizers decode


def server_of(config: RunKeys) -> VllmServer:
    """Return the client of a run's server; sends no request."""
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    return VllmServer(str(config.vllm_server_base_url), config.model_name_or_path, rank, config.vllm_server_timeout)


def check_server(config: RunKeys, data: PreparedData, tokenizer: PreTrainedTokenizerBase, console: Console) -> None:
    """Check the run's vLLM server, if it has one, before a model is loaded.

    Raises:
        ConfigError: it does not answer, is too old, has another vocabulary, is too short for the longest answer, or
            returns log-probabilities that do not match the run's temperature.
    """
    if config.rollout != "vllm":
        return
    if IMAGES in data.train.column_names:
        raise ConfigError("rollout: vllm, but the prompts have images, which are not sent to a server", "remove it")
    server = server_of(config)
    served = server.look_over()
    longest = max(map(len, data.train["prompt_ids"])) + config.max_completion_length
    if served.longest is not None and served.longest < longest:
        raise ConfigError(
            f"{KEY}: {server.url} accepts {served.longest:,} tokens of a prompt with its answer, and the longest of"
            f" this run may have {longest:,}",
            f"start it with --max-model-len {longest}, or lower max_completion_length",
        )
    prompt = data.train[0]["prompt_ids"]
    special = set(tokenizer.all_special_ids)
    ids = [token for token in prompt if token not in special][:COMPARED_IDS]
    served_text, local_text = server.text_of(served, ids), str(tokenizer.decode(ids))
    if served_text is not None and "".join(served_text.split()) != "".join(local_text.split()):
        raise ConfigError(
            f"{KEY}: {server.url} has another vocabulary: it decodes the first prompt as {brief(served_text)}, and"
            f" {config.model_name_or_path} as {brief(local_text)}",
            f"serve {config.model_name_or_path}",
        )
    if config.rope_scaling:
        overrides = json.dumps(config_overrides(read_model_config(config.origin)))
        notice("server-rope", f"the server must scale RoPE as this run does: --hf-overrides '{overrides}'")
    counts_temperature = server.counts_temperature(served, prompt)
    if config.temperature != 1 and not counts_temperature:
        raise ConfigError(
            f"{KEY}: {server.url} returns log-probabilities at temperature 1, and this run samples at"
            f" {config.temperature:g}",
            "start it with --logprobs-mode processed_logprobs, or set temperature: 1",
        )
    if counts_temperature and (config.top_p < 1 or config.top_k or config.min_p):
        raise ConfigError(
            f"{KEY}: {server.url} returns log-probabilities over the tokens that top_p, top_k and min_p leave, and"
            " training's are over all tokens",
            "start it without --logprobs-mode, or remove top_p, top_k and min_p",
        )
    if Path(served.root).name != Path(config.model_name_or_path).name:
        notice("vllm-model", f"{server.url} serves {served.root}, and this run trains {config.model_name_or_path}:"
               " their log-probabilities of the first answers are compared before the first step")  # fmt: skip
    version = f"vLLM {served.version}".strip()
    console.print(one_line(f"rollouts: {version} at {server.url} serves {served.root}"), soft_wrap=True)


class ServedRollouts:
    """Samples answers with a vLLM server instead of `generation.Rollouts`; loads the current adapter into it first.

    Args:
        model: the trained model with its adapter.
    """

    def __init__(self, config: RunKeys, model: Any):
        self.server = server_of(config)
        self.config, self.model = config, model
        folder = config.output_path if config.output_path.is_dir() else Path(tempfile.gettempdir())
        self.name = f"halfbyte-{hashlib.sha256(str(config.output_path.resolve()).encode()).hexdigest()[:8]}"
        self.folder = temporary_path(folder.resolve() / self.name)  # after a kill the next run removes it
        self._adapter: ServedAdapter | None = None
        self._loaded = b""  # digest of the adapter on the server

    def free(self) -> None:
        """Do nothing: the server holds the memory."""

    def close(self) -> None:
        """Unload the adapter from the server."""
        if self._loaded:
            self._loaded = b""
            try:
                self.server.unload(self.name)
            except ConfigError as error:
                notice("vllm-unload", f"the adapter {self.name} could not be unloaded from the server: {error.message}")
            remove(self.folder)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int = 1,
        *,
        max_new_tokens: int,
        sampling: Sampling,
        stops: Sequence[int],
        keys: Sequence[int],
    ) -> list[Completion]:
        """Sample as `Rollouts.generate` does.

        Raises:
            TrainingError: the server's reply is invalid, see `VllmServer.complete`.
        """
        try:
            # Load the current adapter into the server, unless it has it
            if self._adapter is None:
                layers = AdapterLayers(self.config, None, torch.device("cpu"), trained=self.model)
                self._adapter = ServedAdapter(layers, self.config.origin, "the adapter")
            tensors = self._adapter.tensors()
            hasher = hashlib.sha256()
            for tensor in tensors.values():
                hasher.update(tensor.numpy().data)
            if hasher.digest() != self._loaded:
                self._loaded = hasher.digest()
                self.server.load(self.name, self._adapter.write(tensors, self.folder))
            completions = self.server.complete(
                self.name, prompts, n, max_new_tokens=max_new_tokens, sampling=sampling, stops=stops, keys=keys
            )
        except ConfigError as error:
            raise TrainingError(error.message, error.fix) from error
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        for token in chain.from_iterable(completion.ids for completion in completions):
            if not 0 <= token < vocabulary:
                raise self.other_weights_error(
                    f"it sampled token {token}, and this run's vocabulary has {vocabulary:,}"
                )
        return completions

    def check_same_model(self, served: Tensor, trained: Tensor) -> bool:
        """Compare log-probabilities of the server and of the training forward; return whether there are enough tokens.

        Args:
            served: log-probabilities [N] of tokens by the server.
            trained: log-probabilities [N] of the same tokens by the training forward.

        Raises:
            TrainingError: the server has other weights.
        """
        outside = float(((trained - served).exp() - 1).abs().gt(0.1).float().mean())
        if len(trained) >= MIN_TOKENS and outside > OTHER_WEIGHTS_SHARE:
            raise self.other_weights_error(
                f"the tokens of its first answers have a mean log-probability of {served.mean():.3f} on the"
                f" server and of {trained.mean():.3f} here, and {outside:.0%} of their ratios are outside 0.9 to 1.1"
            )
        return len(trained) >= MIN_TOKENS

    def other_weights_error(self, reason: str) -> TrainingError:
        return TrainingError(
            f"{KEY}: {self.server.url} has other weights than this run: {reason}",
            f"serve {self.config.model_name_or_path} with its weights stored as they are here (NF4: --quantization"
            " bitsandbytes; 16 bits: load_in_4bit: false), start the server again, or set rollout: halfbyte",
        )


def engine_of(config: RunKeys, model: Any, rows: int, plan: RolloutPlan | None) -> Rollouts | ServedRollouts:
    """Return the engine that samples a run's answers, at most `rows` at once."""
    if config.rollout == "vllm":
        return ServedRollouts(config, model)
    weights = config.rollout_weights if plan is None else plan.weights
    memory_gib = None if plan is None else plan.pages / 2**30
    return Rollouts(model, rows=rows, memory_gib=memory_gib, kv_cache=config.kv_cache, weights=weights)
