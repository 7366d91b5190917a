"""What keys of a trainer state, together: the options of a question."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from co2sim.catalog import Contents, load_model, names
from co2sim.catalog.facts import key_of
from co2sim.common import convert
from co2sim.common.errors import CatalogError, Co2simError
from co2sim.prediction.question import Question
from co2sim.strategies import STRATEGIES, parse
from co2sim.strategies.step import title
from co2sim.trainers.files import Unset, place
from co2sim.training.framework import layers


@dataclass(frozen=True, slots=True)
class Stated:
    """The value of an option, and the key of which file states it."""

    value: Any
    key: str
    file: str

    @property
    def where(self) -> str:
        """The file and the key, for messages."""
        return f"{self.file}: {self.key}" if self.key else self.file


_COUNTS = {
    entry.name
    for entry in fields(Question)
    if int in get_args(get_type_hints(Question)[entry.name])
    or get_type_hints(Question)[entry.name] is int
} | {
    *("nodes", "gpus_per_node", "tasks_per_node", "gpus", "replicas", "shards", "chunk_layers"),
    *("data_parallel", "recompute_every", "micro_tokens", "stage_batch", "stage_steps"),
    *("batch_tokens", "parts", "splits", "first_less", "last_less"),
}
_OPEN_AT_0 = {"shards", "global_batch", "accumulation", "batch_tokens", "parts", "splits"}
"""Parts that 0 or -1 leave to others."""
_SIZES = ("tp", "cp", "pp")
"""GPUs that have one copy of the model together, or of its part."""
GIVEN_BY = {
    **dict.fromkeys(("dim", "size", "model_file", "grouped"), "model"),
    **dict.fromkeys(("narrow", "narrow_as"), "precision"),
    **dict.fromkeys(("replicas", "shards", "within_fsdp", "fsdp_version"), "strategy"),
    **dict.fromkeys(("micro_tokens", "stage_batch"), "micro_batch"),
    **dict.fromkeys(("chunk_layers", "parts", "splits", "first_less", "last_less"), "interleave"),
    "recompute_every": "recompute",
    "adapted": "lora",
    "stage_steps": "accumulation",
    "batch_tokens": "global_batch",
    "data_parallel": "gpus",
}
"""Options by what is a part of them."""
_LETTERS = re.compile(r"[^a-z0-9]|moe|model")
"""What names of classes have not, or have besides: Qwen3MoE 30B_A3B is qwen3-30b-a3b."""
_TUNED = re.compile(
    r"([-_](instruct|chat|hf|base|it|pt|sft|pretrain|finetune|config|(mx)?fp8|nvfp4|float8|bf16|v0\.\d|\d{4}))+$",
    re.IGNORECASE,
)
"""Behind the name of a model: what it was trained to, not its size."""


@dataclass(frozen=True, slots=True)
class Composed:
    """Options of a question, made of what all trainers state."""

    stated: Mapping[str, Stated]
    file: str
    unset: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Put apart what nothing sets."""
        for name, stated in self.stated.items():
            if isinstance(stated.value, Unset):
                self.open(name, f"{stated.where} is {stated.value}, which nothing sets")
        settled = {n: s for n, s in self.stated.items() if not isinstance(s.value, Unset)}
        object.__setattr__(self, "stated", settled)

    def open(self, name: str, why: str) -> None:
        """An option that has to be given: the whole model for one of its dimensions."""
        head, _, part = name.partition(".")
        option = name if head in {"model", "stack"} and part else GIVEN_BY.get(head, head)
        self.unset.setdefault(option, why)

    def options(self) -> dict[str, Any]:
        """By name, as `Question` takes them."""
        names = {entry.name for entry in fields(Question)} - {"cluster", "model", "strategy"}
        made = {name: self._of(name) for name in self.stated if name in names}
        self._check_sizes()
        made |= {"gpus": self._gpus(), "model": self._model(), "strategy": self._strategy()}
        made |= {"precision": self._precision(), "recompute": self._recompute()}
        made |= {"lora": self._of("lora") if self._of("adapted") in {True, None} else None}
        if made.get("schedule") != "zbv":  # which has two
            made["interleave"] = self._chunks(made["model"])
        self._batch(made)
        heads = ("model.", "stack.")
        overrides = {n: text_of(self.stated[n].value) for n in self.stated if n.startswith(heads)}
        made = {name: value for name, value in made.items() if value is not None}
        made = {name: value for name, value in made.items() if name not in self.unset}
        if {"accumulation", "global_batch"} <= made.keys():  # one follows from the other
            steps = self.stated.get("accumulation")
            made.pop("global_batch" if steps and steps.key else "accumulation")
        if made.get("tp", 1) == 1:
            made.pop("sequence_parallel", None)
        if made.get("pp", 1) == 1:  # keys of passes that there are not
            made = {n: value for n, value in made.items() if n not in {"schedule", "interleave"}}
        if made.get("tp", 1) == 1 or made.get("ep", 1) == 1:  # then tp divides experts in any case
            made.pop("etp", None)
        return made | {"overrides": overrides}

    def _check_sizes(self) -> None:
        """Leave the GPUs open where the parts of the model cannot divide those of the file."""
        gpus, size, names = self._gpus() or 0, 1, list[str]()
        for name in (*_SIZES, "replicas", "shards"):
            count = self._of(name) or 1
            size *= count
            if count > 1 and gpus % size:
                stated = self.stated[name]
                beside = f" with {', '.join(self.stated[n].key for n in names)}" if names else ""
                self.open(
                    "gpus",
                    f"{stated.where} is {stated.value}{beside}: {size} GPUs, which do not divide"
                    f" the {gpus} that the file says",
                )
                return
            names += [name] * (count > 1)

    def _precision(self) -> Any:
        narrow = self._of("narrow")
        return (narrow and self._of("narrow_as")) or narrow or self._of("precision")

    def _recompute(self) -> Any:
        """Every Nth layer, where selective is said to be that."""
        every, recompute = self._of("recompute_every"), self._of("recompute")
        if recompute != "selective" or every is None:
            return recompute
        return f"full/{every}" if every > 1 else "full"

    def _batch(self, made: dict[str, Any]) -> None:
        """A micro-batch that follows from others: from tokens, from a stage's, or from all."""
        tokens, length = self._of("micro_tokens"), self.stated.get("model.seq_len")
        part, whole = self._of("stage_batch"), made.get("micro_batch")
        if tokens and length and isinstance(length.value, int):
            made["micro_batch"] = max(tokens // length.value, 1)
            if batch_tokens := self._of("batch_tokens"):
                made |= {"global_batch": batch_tokens // length.value, "accumulation": None}
            elif (self._of("pp") or 1) > 1:
                made["accumulation"] = self._of("stage_steps")
        elif part and whole and (self._of("pp") or 1) > 1:
            steps = made.get("accumulation") or 1
            made |= {"micro_batch": part, "accumulation": steps * max(whole // part, 1)}
        gpus, batch, steps = (made.get(name) for name in ("gpus", "global_batch", "accumulation"))
        self._check_batch(batch, made.get("micro_batch"), steps)
        is_said = made.get("micro_batch") or "micro_batch" in self.unset
        if gpus and isinstance(batch, int) and not is_said:
            ranks = max(gpus // self._layer_gpus(), 1) * (steps or 1)
            if batch % ranks:
                stated = self.stated["global_batch"]
                why = f"{stated.where} is {batch}, no multiple of {ranks}: {gpus} GPUs"
                self.open("micro_batch", f"{why}, {steps or 1} steps")
                return
            made |= {"micro_batch": batch // ranks, "accumulation": steps or 1}

    def _check_batch(self, batch: Any, micro_batch: Any, steps: Any) -> None:
        """Refuse a batch of all GPUs that is none of a whole number of replicas."""
        names = "global_batch", "micro_batch", "accumulation"
        stated = [self.stated[name] for name in names if name in self.stated]
        if len(stated) < len(names) or not all(one.key for one in stated):
            return
        if all(isinstance(size, int) for size in (batch, micro_batch, steps)):
            of_replica = micro_batch * steps
            if batch % of_replica:
                raise CatalogError(
                    f"{stated[0].where} is {batch}, no multiple of {of_replica}:"
                    f" {stated[1].key} {micro_batch} x {stated[2].key} {steps}"
                )

    def _of(self, name: str) -> Any:
        """Its value, converted where it is a number; None where nothing states it."""
        if name not in self.stated:
            return None
        stated = self.stated[name]
        if name == "etp" and stated.value == "tp":
            return self._of("tp")
        if name not in _COUNTS or (isinstance(stated.value, str) and name == "global_batch"):
            return stated.value
        if name in _OPEN_AT_0 and stated.value in {-1, 0}:
            return None
        try:
            return convert.whole(stated.where, stated.value)
        except Co2simError as error:
            raise CatalogError(str(error)) from error

    def _gpus(self) -> int | None:
        if gpus := self._of("gpus"):
            return int(gpus)
        if each := self._of("gpus_per_node") or self._of("tasks_per_node"):
            return int(each) * int(self._of("nodes") or 1)
        if ranks := self._of("data_parallel"):
            return int(ranks) * self._layer_gpus()
        if shards := self._of("shards"):
            return int(shards) * int(self._of("replicas") or 1) * self._layer_gpus()
        if nodes := self._of("nodes"):
            stated = self.stated["nodes"]
            self.open("gpus", f"{stated.where} is {nodes}, and no key says the GPUs of a node")
        return None

    def _layer_gpus(self) -> int:
        return math.prod(int(self._of(name) or 1) for name in _SIZES)

    def _model(self) -> Any:
        dimensions = {
            n.removeprefix("dim."): s for n, s in self.stated.items() if n.startswith("dim.")
        }
        if any(stated.key for stated in dimensions.values()):
            return self._own_model({name: stated.value for name, stated in dimensions.items()})
        text = self._of("model") or self._of("model_file")
        if text is None:
            return None
        size, text = self._of("size"), re.sub(r"\.ya?ml$", "", str(text).rstrip("/"))
        written = [f"{text}-{size}", f"{text}{size}"] if size else [text]
        written += [short for name in written if (short := _TUNED.sub("", name)) != name]
        if text.endswith(".json") and (file := place(Path(self.file), text, ("",))):
            return str(file)
        keys = (key_of("models", name) for name in written)
        plain = {_LETTERS.sub("", key): key for key in names("models")}
        keys = (plain.get(_LETTERS.sub("", key.lower()), key) for key in keys)
        return next((key for key in keys if key in names("models")), written[0])

    def _own_model(self, values: dict[str, Any]) -> Contents | None:
        tree: dict[str, Any] = {"name": f"the model of {Path(self.file).name}"}
        tree |= {"kind": "transformer", "source": self.file}
        if self._of("grouped") is False:
            values.pop("kv_heads", None)
        experts = {n.removeprefix("experts."): v for n, v in values.items() if "experts." in n}
        tree |= {name: value for name, value in values.items() if "experts." not in name}
        if "hidden" in tree:
            ffn, by_thirds = 4 * tree["hidden"], self._of("gated_ffn") and tree.get("gated")
            tree.setdefault("ffn", int(ffn * 2 / 3 / 64) * 64 if by_thirds else ffn)
        if experts.get("count"):
            tree["experts"] = {"width": tree.get("ffn"), **experts}
        if "model.seq_len" in self.stated:
            tree["seq_len"] = self.stated["model.seq_len"].value
        for name in ("layers", "hidden", "heads", "vocab", "seq_len"):
            if name not in tree:
                self.open("model", f"{self.file}: no key says the model's {name}")
                return None
        return Contents(self.file, tree)

    def _strategy(self) -> str | None:
        base = self._of("strategy")
        if base is None:
            return None
        try:
            return self._with_options(str(base))
        except Co2simError as error:
            raise CatalogError(f"{self.stated['strategy'].where}: {error}") from error

    def _with_options(self, base: str) -> str:
        """The strategy with what other keys say of it. Raises OptionError where it cannot be."""
        options = {
            name.removeprefix("strategy."): stated.value
            for name, stated in self.stated.items()
            if name.startswith("strategy.")
        }
        if base.startswith("fsdp") and self._of("within_fsdp"):
            base = self._of("within_fsdp")
        for name in {"max_live", "max_reuse"} & options.keys():
            options[name] = max(int(options[name]), 1)  # 0: freed at once
        if version := self._of("fsdp_version"):
            base = base if base.startswith("fsdp") else "fsdp"
            options["version"] = version
        replicas, shards = (self._of(name) for name in ("replicas", "shards"))
        if shards == 1 and base.startswith("fsdp"):
            base = "ddp"
        elif (replicas or 1) > 1:
            gpus = self._gpus()
            shards = shards or (gpus // self._layer_gpus() // int(replicas) if gpus else None)
            options["shard"] = shards
        written = parse(base)
        name, usual = written.name, type(written)()
        values = {n: getattr(written, n) for n in _names(written)}
        options = {n: v for n, v in values.items() if v != getattr(usual, n)} | options
        if (options.get("hpz_group") or 1) > 1:
            options["hpz"] = True
        if name == "zero3" and any(options.get(part) for part in ("qwz", "hpz", "qgz")):
            name = "zeropp"
            options = {"qwz": False, "hpz": False, "qgz": False} | options
        names = _names(STRATEGIES[name])
        pairs = [f"{n}={text_of(v)}" for n, v in options.items() if n in names and v is not None]
        return title(parse(f"{name}:{','.join(pairs)}" if pairs else name))

    def _chunks(self, model: Any) -> Any:
        """Those of a stage: of its layers, or of all the parts that a key lists."""
        stages, splits = self._of("pp") or 1, self._of("splits")
        parts = splits + 1 if splits else self._of("parts")
        stated = self.stated.get("parts" if self._of("parts") else "splits")
        if not parts:
            if not self._of("chunk_layers"):
                return self._of("interleave")
            stated, each = self.stated["chunk_layers"], self._of("chunk_layers")
            try:
                count = len(layers(load_model(model).value.blocks))
            except Co2simError as error:
                raise CatalogError(f"{stated.where}: {error}") from error
            # What is beside the layers counts as some of them where these divide unevenly.
            ends = [self._of(name) or 0 for name in ("first_less", "last_less")]
            parts = math.ceil((count + sum(ends)) / each) if any(ends) else count / each
        if parts % stages:
            what = stated.value if stated and not isinstance(stated.value, list) else parts
            raise CatalogError(
                f"{stated.where if stated else self.file} is {what};"
                f" the layers in {stages} stages have no such chunks"
            )
        return int(parts // stages)


def _names(strategy: Any) -> list[str]:
    return [entry.name for entry in fields(strategy)]


def text_of(value: Any) -> str:
    """A value as an option has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)
