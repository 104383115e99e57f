"""Configuration that crosses the process boundary: what a model is, and what one worker is told at start.

The engine parses a model's metadata once (without torch) into a `ModelSpec`; workers only map tensors by offset.
Everything here is frozen, and is encoded once at start-up with msgspec's msgpack.
"""

from __future__ import annotations

from typing import Any

import msgspec


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One stored tensor: where its bytes lie and how to read them."""

    name: str
    """The name in the file, e.g. `blk.0.attn_q.weight` (GGUF) or `model.layers.0.self_attn.q_proj.weight`."""
    file: int
    """Index into `ModelSpec.files`."""
    offset: int
    """Bytes from the start of the file."""
    nbytes: int
    dtype: str
    """safetensors' name (`F32`, `F16`, `BF16`, `F8_E4M3`, `I32`) or GGML's (`F32`, `Q4_1`, `Q8_0`, ...)."""
    shape: tuple[int, ...]
    """Logical shape, rows first: a linear layer is (out_features, in_features)."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """What the model's authors recommend (`generation_config.json`, GGUF `general.sampling.*`); None: no opinion."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class QuantizationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How the quantised tensors of a safetensors checkpoint are to be read; the loader sees which ones they are."""

    method: str
    """`fp8` (compressed-tensors: scales per channel or tensor), `fp8_block` (DeepSeek), `awq` or `gptq`."""
    bits: int
    group_size: int = -1
    """Columns that share a scale; -1: all of a row."""
    zeros_less_one: bool = False
    """GPTQ's first format stores zero points less one."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A resolved model: architecture, tensor index, special tokens and defaults."""

    architecture: str
    """Registry name of the family: `llama`, `qwen2` or `qwen3`."""
    name: str
    """Human name, e.g. `SmolLM2-135M-Instruct`; also the default served name's last part."""
    path: str
    """The directory or file it came from."""
    format: str
    """`safetensors` or `gguf`."""
    files: tuple[str, ...]
    tensors: tuple[TensorSpec, ...]
    dtype: str
    """The checkpoint's own compute dtype: `float32`, `bfloat16` or `float16` (GGUF files: `float32`)."""
    quantization: QuantizationSpec | None = None
    """Of a safetensors checkpoint; GGUF's tensors say themselves what they are."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = None
    """Hugging Face's `rope_scaling` / `rope_parameters` without theta (`rope_type` linear, llama3, yarn, ...)."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    """Bias on q, k and v (Qwen2)."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm on each head of q and k before RoPE (Qwen3)."""
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    sampling_defaults: SamplingDefaults = SamplingDefaults()


class SpeculationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker makes drafts."""

    method: str
    """One of `runtime.speculation.METHODS`."""
    model: str | None = None
    """eagle, medusa: the head's directory."""
    tree_depth: int | None = None
    """Most drafts of a row that follow each other, where they branch; None: chains."""
    token_tree: tuple[tuple[int, ...], ...] = ()
    """The tree that is always drafted, as paths of ranks, shorter ones first; empty: whatever fits best."""
    adaptive: bool = True
    """Only those drafts are taken that pay; else all that there is room for."""
    draft: ModelSpec | None = None
    """draft_model: the model."""
    rejection_sampling: bool = False
    """Drawn drafts are judged by rejection sampling (`kernels.rejection`)."""
    prompt_lookup_min: int = 0
    prompt_lookup_max: int = 0
    """ngram: sizes of the n-grams that are looked up."""
    suffix_depth: int = 0
    suffix_requests: int = 0
    suffix_factor: float = 0.0
    suffix_token_prob: float = 0.0
    """suffix: see `workers.speculation.suffix`."""


CHECK_TRAINING = "--check"
"""Argument of the process that trains a draft head: it only says whether it could begin."""


class DraftTraining(msgspec.Struct, frozen=True, kw_only=True):
    """What the process that trains a draft head is told."""

    method: str = "eagle"
    """`eagle` or `medusa`."""
    model: ModelSpec
    written: list[list[int]]
    """Token ids of texts, most of them the model's own."""
    prompts: list[int]
    """How many of each text's tokens the model was given."""
    greedy: list[bool]
    """Whether a text was written greedily; only such texts are held out."""
    output: str
    """Directory of the head."""
    start: str | None = None
    """Directory of a head to go on with."""
    epochs: int
    vocab_size: int
    """Tokens that the head can guess."""
    seed: int
    num_threads: int


class TrainingReport(msgspec.Struct, frozen=True, kw_only=True):
    """How training goes; the last one is `final`."""

    phase: str
    """`read` or `train`."""
    done: int
    total: int
    words: str = ""
    accepted: list[float] = []
    """Share of first, second, ... drafts that are accepted on held-out text."""
    final: bool = False


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All that one worker process is told. File descriptors are inherited (`pass_fds`) and keep their numbers."""

    model: ModelSpec
    rank: int
    parent_pid: int
    epoch: int = 1
    """Counts this rank's workers: a group that spans workers is made anew in each."""
    group_host: str = "127.0.0.1"
    group_port: int = 0
    """Where this epoch's group meets; 0: nowhere."""
    group_fd: int = -1
    """A socket bound to that port, for the worker that serves the group's store (`TCPStore(master_listen_fd=...)`)."""
    device: str
    """`cpu` or `cuda:N`."""
    dtype: str
    """Compute and KV dtype: `float32`, `bfloat16` or `float16`."""
    num_threads: int
    """Intra-op threads on the CPU."""
    block_size: int
    num_blocks: int | None
    """Size of the KV pool in blocks; None: the worker sizes it from `kv_cache_bytes`."""
    kv_cache_bytes: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_rows: int
    """Rows of the batch table: `max_num_seqs` plus quarantine headroom."""
    max_draft: int
    """Most drafts of a row in one step."""
    step_ring_fd: int
    step_ring_bytes: int
    output_ring_fd: int
    output_ring_bytes: int
    table_fd: int
    table_bytes: int
    control_ring_fd: int
    control_ring_bytes: int
    reply_ring_fd: int
    reply_ring_bytes: int
    step_doorbell_fd: int
    """This reader's eventfd for the step ring."""
    output_doorbell_fd: int
    """The engine's eventfd for the output ring."""
    control_doorbell_fd: int
    """This worker's eventfd for the control channel."""
    reply_doorbell_fd: int
    """The engine's eventfd for the control channel."""
    tier_fd: int | None = None
    """The CPU tier's memory; None: there are no tiers."""
    tier_bytes: int = 0
    weights_fd: int = -1
    """The model's shared weights (`weights.py`); -1: the worker loads its own."""
    life_lock_fd: int = -1
    """Held from start to end, so that the engine sees the end at once (`life_lock.py`); -1: nobody watches."""
    lifeline_fd: int
    """Read end of a pipe that the engine holds open: end of file means that the engine is gone."""
    reader_index: int
    """This worker's reader line in the step ring."""
    spin_us: int
    """Upper bound of the spin before the worker sleeps on its doorbell."""
    speculation: SpeculationSpec | None = None


def encode(config: WorkerConfig) -> bytes:
    return msgspec.msgpack.encode(config)


def decode(data: bytes) -> WorkerConfig:
    """Raises msgspec.ValidationError when engine and worker disagree about the fields."""
    return msgspec.msgpack.decode(data, type=WorkerConfig)
