"""What a training run is made of: a TOML file, any key of which the command line can replace.

Names are TorchTitan's where the meaning is the same. No torch: ``planaria train`` reads this before anything starts.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from planaria.errors import UsageError
from planaria.train.shapes import SHAPES


def key(default: Any, help: str, least: float | None = None, most: float | None = None) -> Any:
    """A key: its default, what it means, and the least and the largest value that it may have."""
    return field(default=default, metadata={"help": help, "least": least, "most": most})


@dataclass(frozen=True, slots=True)
class Job:
    description: str = key("", "what people want to know about the run")
    name: str = key("", "of the job; needed where several nodes meet; default: the file's name and the time")
    dump_folder: str = key("./outputs", "directory of all that the run writes")


@dataclass(frozen=True, slots=True)
class Model:
    name: Literal["llama3"] = key("llama3", "the architecture")
    flavor: Literal["debug", "3M", "1B", "8B"] = key("debug", "its size")
    tokenizer_path: str = key("", "a tokenizer.json of the `tokenizers` library; default: bytes")


@dataclass(frozen=True, slots=True)
class Data:
    """Exactly one of ``files``, ``dataset_path`` and ``mock``."""

    files: str = key("", "text files: a pattern such as texts/**/*.txt; each file is a document")
    dataset_path: str = key("", "a directory written by datasets.save_to_disk; each row is a document")
    text_column: str = key("text", "its column that holds the text")
    mock: bool = key(False, "random tokens")
    cache_folder: str = key("", "where the tokens are kept; default: the dump folder's `tokens`")


@dataclass(frozen=True, slots=True)
class Training:
    steps: int = key(1000, "optimizer steps", 1)
    seq_len: int = key(2048, "tokens in a sample", 1)
    local_batch_size: int = key(8, "samples in a micro-batch of one data-parallel rank", 1)
    global_batch_size: int = key(-1, "samples in a step; -1: one micro-batch in each shard", -1)
    max_norm: float = key(1.0, "clip gradients to this norm; 0: do not", 0)
    seed: int = key(0, "of weights, data order and everything random", 0)
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto: a GPU of its own for every rank if there are any")
    dtype: Literal["float32", "bfloat16"] = key("float32", "of parameters and of the optimizer's state")
    mixed_precision_param: Literal["float32", "bfloat16"] = key("float32", "of parameters and activations in use")
    mixed_precision_reduce: Literal["float32", "bfloat16"] = key("float32", "of gradients when FSDP reduces them")


@dataclass(frozen=True, slots=True)
class Optimizer:
    name: Literal["AdamW", "Adam"] = key("AdamW", "of torch.optim")
    lr: float = key(8e-4, "learning rate at the top of the schedule", 0)
    beta1: float = key(0.9, "decay of the mean of gradients", 0, 1)
    beta2: float = key(0.95, "decay of the mean of their squares", 0, 1)
    eps: float = key(1e-8, "added to the divisor", 0)
    weight_decay: float = key(0.1, "of all parameters", 0)
    implementation: Literal["fused", "foreach", "for-loop"] = key("fused", "how torch steps it")


@dataclass(frozen=True, slots=True)
class LrScheduler:
    warmup_steps: int = key(200, "steps from zero to the full rate", 0)
    decay_ratio: float = key(1.0, "share of the steps, the last, in which it decays; 1: all after warm-up", 0, 1)
    decay_type: Literal["linear", "sqrt", "cosine"] = key("cosine", "shape of the decay")
    min_lr_factor: float = key(0.0, "share of the rate at the end", 0, 1)


@dataclass(frozen=True, slots=True)
class Parallelism:
    """Inside a group; how many groups there are is ``fault_tolerance.group_size``."""

    data_parallel_shard_degree: int = key(-1, "FSDP2; -1: what the others leave of the group's processes", -1)
    tensor_parallel_degree: int = key(1, "ranks that share every matrix", 1)
    pipeline_parallel_degree: int = key(1, "ranks that share the layers", 1)
    context_parallel_degree: int = key(1, "ranks that share every sequence", 1)
    pipeline_parallel_schedule: Literal["1F1B", "GPipe", "Interleaved1F1B"] = key("1F1B", "of micro-batches")

    @property
    def stages_per_rank(self) -> int:
        return 2 if self.pipeline_parallel_schedule == "Interleaved1F1B" else 1


@dataclass(frozen=True, slots=True)
class ActivationCheckpoint:
    mode: Literal["none", "selective", "full"] = key("none", "what backward computes again")


@dataclass(frozen=True, slots=True)
class Compile:
    enable: bool = key(False, "compile every block with torch.compile")
    backend: str = key("inductor", "of torch.compile")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    enable: bool = key(False, "save the state now and then, and start from the newest")
    folder: str = key("checkpoint", "where, in the dump folder; all groups must see it")
    interval: int = key(500, "steps between two", 1)
    keep_latest_k: int = key(10, "how many are kept", 1)


@dataclass(frozen=True, slots=True)
class FaultTolerance:
    enable: bool = key(False, "train in several groups that replace each other")
    group_size: int = key(1, "replica groups of the job", 1)
    shards: int = key(0, "shards of a step, part of what the result depends on; 0: group_size", 0)
    replica_id: int = key(-1, "run only this group here, the others on other nodes; -1: run all here", -1)
    exact: Literal["auto", "bits", "samples"] = key("auto", "the promise; auto: bits on a CPU, samples on GPUs")
    min_replica_size: int = key(1, "the job fails if fewer groups can be kept", 1)
    lighthouse: str = key("", "host:port at which groups of several nodes meet; default: one of its own")


@dataclass(frozen=True, slots=True)
class SemiSync:
    """Groups that exchange what has become of their parameters now and then, not gradients in every step."""

    method: Literal["none", "local_sgd", "diloco", "streaming"] = key("none", "of low communication")
    sync_steps: int = key(40, "optimizer steps between two exchanges of a parameter", 1)
    num_fragments: int = key(1, "streaming: parts of the model, exchanged in turn", 1)
    fragment_sync_delay: int = key(1, "streaming: steps for which an exchange goes on beside training", 0)
    fragment_update_alpha: float = key(0.5, "streaming: share of a group's own value in its next; below 1", 0, 1)
    outer_lr: float = key(0.7, "diloco, streaming: learning rate of the outer optimizer, SGD", 0)
    outer_momentum: float = key(0.9, "diloco, streaming: its Nesterov momentum", 0, 1)
    exact: bool = key(False, "local_sgd, diloco: compute what a lost group had to; fresh optimizers in every round")

    @property
    def round(self) -> int:
        """Optimizer steps between two exchanges of anything."""
        return self.sync_steps // self.num_fragments if self.method == "streaming" else self.sync_steps


@dataclass(frozen=True, slots=True)
class Metrics:
    log_freq: int = key(10, "steps between two lines of metrics", 1)
    enable_tensorboard: bool = key(False, "write them for TensorBoard as well")
    save_tb_folder: str = key("tb", "where, in the dump folder")


@dataclass(frozen=True, slots=True)
class Validation:
    enable: bool = key(False, "measure the loss on text that is not trained on")
    freq: int = key(100, "steps between two measurements", 1)
    steps: int = key(10, "shards that each takes, of the size of one in training", 1)
    files: str = key("", "text files to measure on; default: the last part of the training data")
    held_out: float = key(0.02, "how much of the training data that is", 0, 0.5)


@dataclass(frozen=True, slots=True)
class Debug:
    deterministic: bool = key(False, "only deterministic kernels: needed on GPUs for equal bits")


@dataclass(frozen=True, slots=True)
class Config:
    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    training: Training = field(default_factory=Training)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LrScheduler = field(default_factory=LrScheduler)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    semi_sync: SemiSync = field(default_factory=SemiSync)
    metrics: Metrics = field(default_factory=Metrics)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)

    @property
    def groups(self) -> int:
        return self.fault_tolerance.group_size if self.fault_tolerance.enable else 1

    @property
    def shards(self) -> int:
        return self.fault_tolerance.shards or self.fault_tolerance.group_size

    @property
    def cache(self) -> Path:
        return Path(self.data.cache_folder or Path(self.job.dump_folder, "tokens"))

    def degrees(self, ranks: int | None = None) -> dict[str, int]:
        """The mesh of a group of ``ranks`` processes (None: as many as the degrees ask for), outermost dimension first.
        Raises UsageError if it does not fit."""
        wanted, p = self.parallelism.data_parallel_shard_degree, self.parallelism
        rest = p.tensor_parallel_degree * p.pipeline_parallel_degree * p.context_parallel_degree
        data = max(1, (ranks or rest) // rest) if wanted == -1 else wanted
        if ranks is not None and ranks != data * rest:
            raise UsageError(
                f"[parallelism]: a group of {ranks} processes cannot be data_parallel_shard_degree {data} x "
                f"tensor_parallel_degree {p.tensor_parallel_degree} x pipeline_parallel_degree "
                f"{p.pipeline_parallel_degree} x context_parallel_degree {p.context_parallel_degree}; make the product "
                f"{ranks}, or start {data * rest} processes"
            )
        return {
            "pp": p.pipeline_parallel_degree,
            "fsdp": data,
            "cp": p.context_parallel_degree,
            "tp": p.tensor_parallel_degree,
        }

    def micro_batches(self, shards: int, ranks: int | None = None) -> int:
        """Micro-batches in a shard, whose gradients are accumulated. Raises UsageError if there is no whole number."""
        once = self.training.local_batch_size * self.degrees(ranks)["fsdp"] * shards
        total = once if self.training.global_batch_size == -1 else self.training.global_batch_size
        if total < once or total % once:
            raise UsageError(
                f"training.global_batch_size is {total}; it must be a multiple of {once} (local_batch_size "
                f"{self.training.local_batch_size} x {once // self.training.local_batch_size // shards} data-parallel "
                f"ranks x {shards} shards), or -1"
            )
        stages, count = self.parallelism.pipeline_parallel_degree, total // once
        if count % stages:
            raise UsageError(
                f"training.global_batch_size gives every shard {count} micro-batches; a pipeline of {stages} ranks "
                f"needs a multiple of {stages} of them: make it a multiple of {once * stages}"
            )
        return count


# --- reading --------------------------------------------------------------------------------------------------


def load(path: Path, arguments: Sequence[str] = ()) -> Config:
    """The configuration in ``path`` with ``--section.key value`` of the command line over it.

    Raises UsageError, one sentence, for what cannot be read, is unknown, is of a wrong type, or cannot be together.
    """
    try:
        tree: dict[str, Any] = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not a TOML file: {error}") from None
    for section, values in tree.items():
        if not isinstance(values, dict):
            raise UsageError(f"{path}: {section} stands outside of a section; sections are {_listed(_sections())}")
    for section, key, text in _overrides(arguments):
        tree.setdefault(section, {})[key] = text
    given = {section: _section(section, values) for section, values in tree.items()}
    config = Config(**given)
    _check(config)
    return config


def _sections() -> dict[str, type]:
    return {name: hint for name, hint in get_type_hints(Config).items()}


def _section(section: str, values: Mapping[str, Any]) -> Any:
    if section not in _sections():
        raise UsageError(f"there is no section [{section}]; sections are {_listed(_sections())}")
    kind = _sections()[section]
    hints, fields = get_type_hints(kind), {f.name: f for f in dataclasses.fields(kind)}
    made = {}
    for key, value in values.items():
        if key not in fields:
            raise UsageError(f"there is no key {section}.{key}; keys of [{section}] are {_listed(fields)}")
        made[key] = _value(f"{section}.{key}", hints[key], value, fields[key].metadata)
    return kind(**made)


def _value(name: str, hint: Any, value: Any, limits: Mapping[str, Any]) -> Any:
    """``value``, from TOML or as text from the command line, as what ``hint`` says."""
    if get_origin(hint) is Literal:
        if value not in get_args(hint):
            raise UsageError(f"{name} is {_shown(value)}; it must be one of {_listed(get_args(hint))}")
        return value
    made = _parsed(hint, value) if isinstance(value, _Text) else value
    if hint is float and type(made) is int:
        made = float(made)
    if type(made) is not hint:
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text in quotes"}
        raise UsageError(f"{name} is {_shown(value)}; it must be {kinds[hint]}")
    least, most = limits["least"], limits["most"]
    if least is not None and not least <= made <= (made if most is None else most):
        span = f"at least {least}" if most is None else f"between {least} and {most}"
        raise UsageError(f"{name} is {_shown(value)}; it must be {span}")
    return made


class _Text(str):
    """A value from the command line: its type is the key's."""


def _parsed(hint: Any, text: str) -> Any:
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return hint(text) if hint is not str else str(text)
    except ValueError:
        return text


def _overrides(arguments: Sequence[str]) -> list[tuple[str, str, _Text | bool]]:
    """(section, key, value) of ``--section.key value``, ``--section.key=value``, and ``--section.key``, which means
    true."""
    found: list[tuple[str, str, _Text | bool]] = []
    left = list(arguments)
    while left:
        word = left.pop(0)
        name, equals, text = word.removeprefix("--").partition("=")
        section, dot, key = name.replace("-", "_").partition(".")
        if not word.startswith("--") or not dot:
            raise UsageError(f"{word!r} is not understood; what follows the file is --section.key value")
        if not equals and left and not left[0].startswith("--"):
            equals, text = "=", left.pop(0)
        found.append((section, key, _Text(text) if equals else True))
    return found


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))


def _shown(value: Any) -> str:
    return repr(str(value)) if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def keys() -> str:
    """All keys with their defaults, for people."""
    lines: list[str] = []
    for section, kind in _sections().items():
        lines.append(f"\n[{section}]" if lines else f"[{section}]")
        hints = get_type_hints(kind)
        for f in dataclasses.fields(kind):
            choices = f" ({_listed(get_args(hints[f.name]))})" if get_origin(hints[f.name]) is Literal else ""
            lines.append(f"  --{section}.{f.name} = {_shown(f.default)}: {f.metadata['help']}{choices}")
    return "\n".join(lines)


# --- what cannot be together ----------------------------------------------------------------------------------


def _check(config: Config) -> None:
    data, p, ft, t = config.data, config.parallelism, config.fault_tolerance, config.training
    given = [name for name in ("files", "dataset_path", "mock") if getattr(data, name)]
    if len(given) != 1:
        raise UsageError(f"[data] needs exactly one of files, dataset_path and mock; given: {_listed(given) or 'none'}")
    if p.data_parallel_shard_degree == 0:
        raise UsageError("parallelism.data_parallel_shard_degree is 0; it must be -1 or at least 1")
    if t.global_batch_size == 0:
        raise UsageError("training.global_batch_size is 0; it must be -1 or at least 1")
    if ft.min_replica_size > ft.group_size:
        raise UsageError(
            f"fault_tolerance.min_replica_size is {ft.min_replica_size}; it must be at most group_size {ft.group_size}"
        )
    if config.shards < ft.group_size:
        raise UsageError(
            f"fault_tolerance.shards is {ft.shards}; it must be 0 or at least group_size {ft.group_size}: every group "
            "needs a shard of every step"
        )
    if ft.replica_id >= ft.group_size:
        raise UsageError(
            f"fault_tolerance.replica_id is {ft.replica_id}; it must be below group_size {ft.group_size}, or -1"
        )
    if ft.replica_id >= 0 and not (ft.enable and ft.lighthouse and config.job.name):
        raise UsageError(
            "fault_tolerance.replica_id runs one group of several nodes: it needs fault_tolerance.enable, "
            "fault_tolerance.lighthouse and job.name, alike on all nodes"
        )
    _check_semi_sync(config)
    _check_model(config)


def _check_semi_sync(config: Config) -> None:
    s, steps = config.semi_sync, config.training.steps
    if s.method == "none":
        return
    if s.method == "streaming" and s.sync_steps % s.num_fragments:
        raise UsageError(
            f"semi_sync.sync_steps is {s.sync_steps}; it must be a multiple of the {s.num_fragments} num_fragments"
        )
    if s.method == "streaming" and s.exact:
        raise UsageError("semi_sync.exact cannot be had with streaming: groups' parameters are never wholly shared")
    if s.method == "streaming" and s.fragment_sync_delay >= s.round:
        raise UsageError(
            f"semi_sync.fragment_sync_delay is {s.fragment_sync_delay}; it must be below the {s.round} steps of a "
            "round (sync_steps divided by num_fragments)"
        )
    if s.fragment_update_alpha == 1 or s.outer_momentum == 1 or s.outer_lr == 0:
        raise UsageError("semi_sync: fragment_update_alpha and outer_momentum must be below 1, and outer_lr above 0")
    if steps % s.round:
        raise UsageError(
            f"training.steps is {steps}; it must be a multiple of the {s.round} steps of a [semi_sync] round"
        )


def _check_model(config: Config) -> None:
    shape, p, length = SHAPES[config.model.flavor], config.parallelism, config.training.seq_len
    tp, pp, cp = p.tensor_parallel_degree, p.pipeline_parallel_degree, p.context_parallel_degree
    if shape.kv_heads % tp:
        raise UsageError(
            f"parallelism.tensor_parallel_degree is {tp}; it must divide the {shape.kv_heads} key heads of "
            f"{config.model.flavor}"
        )
    if cp > 1 and length % (2 * cp):
        raise UsageError(
            f"training.seq_len is {length}; it must be a multiple of {2 * cp}, twice the context_parallel_degree"
        )
    if length % (cp * tp):
        raise UsageError(
            f"training.seq_len is {length}; it must be a multiple of {cp * tp}, context_parallel_degree x "
            "tensor_parallel_degree"
        )
    if pp == 1:
        return
    if shape.tied:
        raise UsageError(
            f"parallelism.pipeline_parallel_degree is {pp}; it must be 1 for {config.model.flavor}, whose embedding "
            "and head are one tensor"
        )
    if pp * p.stages_per_rank > shape.layers:
        raise UsageError(
            f"parallelism.pipeline_parallel_degree is {pp}; {p.pipeline_parallel_schedule} makes "
            f"{pp * p.stages_per_rank} stages of it, but {config.model.flavor} has only {shape.layers} layers"
        )
