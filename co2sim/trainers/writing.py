"""The lines that launch a choice: flags of the trainer that its stack is of.

They are the table of a trainer the other way round: keys that are written state an option by its
value. What was written is read as the same job.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from co2sim.catalog import Contents, names
from co2sim.catalog.facts import key_of, plain, read
from co2sim.models.operators import NARROW
from co2sim.prediction.question import Question
from co2sim.prediction.result import Result
from co2sim.prediction.verdict import python_line
from co2sim.schedule.mesh import MESH
from co2sim.strategies import LocalSteps, Strategy, parse
from co2sim.strategies.fsdp import FSDP
from co2sim.strategies.step import title
from co2sim.strategies.zeropp import ZeroPP
from co2sim.trainers.files import typed
from co2sim.trainers.tables import Launch, Table, Take, tables
from co2sim.training.framework import layers

_NEEDED = (
    *("model", "recompute", "precision", "narrow", "optimizer", "offload", "lora"),
    *("schedule", "quantize_base", "tp", "cp", "pp", "ep", "accumulation"),
)
"""What a trainer has to know, by a key or otherwise."""
_USUAL: dict[str, Any] = {"optimizer": "adamw", "accumulation": 1}
_USUAL |= dict.fromkeys(("recompute", "offload", "quantize_base"), "none")


@dataclass(frozen=True, slots=True)
class Lines:
    """What launches a choice: a `command` with the `text` of its flags, or of its `file`.

    `chosen` are the keys but for those of the model, by name, and `beside` is what no key says.
    `python` is the line that trains so in any loop, by a local-update method.
    """

    trainer: str
    command: str
    text: str
    file: str
    chosen: Mapping[str, Any]
    beside: tuple[str, ...]
    python: str = ""

    def __str__(self) -> str:
        """A script of a shell: the file, if there is one, and the command, a flag a line."""
        notes = [f"# in your loop, by realrun.algorithms: {self.python}"] if self.python else []
        notes += [f"# not in it: {', '.join(self.beside)}"] if self.beside else []
        if self.file:
            file = f"cat > {self.file} <<'EOF'\n{self.text}\nEOF"
            return "\n".join([file, *notes, self.command])
        return "\n".join([*notes, " \\\n  ".join([self.command, *self.text.splitlines()])])


def launch(question: Question, result: Result, trainer: str = "") -> Lines | None:
    """What launches the choice of a result; None where no trainer with a table has it.

    `trainer` is that of the files that ask (`Reading.trainer`): it is the first to be written.
    """
    table, how = _fitting(question, trainer.split(" with "))
    if table is None or how is None:
        return None
    strategy, python = question.parsed, ""
    if isinstance(strategy, LocalSteps):
        strategy = parse(result.strategy)  # with the numbers that were open
        python = python_line(strategy)[0] or ""
        if not python:
            return None
    stated = dict(_stated(question, result, strategy))
    takes = {key: table.take[key] for key in how.keys}
    stated |= _divided(stated, {take.option for take in takes.values()})
    keys: dict[str, tuple[str, Any]] = {}
    for key, take in sorted(takes.items(), key=lambda each: _distance(each[1], strategy)):
        value = stated.get(take.option)
        text = None if value is None else _text(take, value)
        if text is not None and take.option not in keys:
            keys[take.option] = key, text
    keys = dict(sorted(keys.items(), key=lambda pair: how.keys.index(pair[1][0])))
    of_model = ("dim.", "model", "size")
    return Lines(
        table.title,
        _command(how, question, result),
        how.text(dict(_with_others(how, keys.values()))),
        how.file,
        dict(pair for option, pair in keys.items() if not option.startswith(of_model)),
        (*_unwritten(table, stated, keys), *_changed(question.overrides, keys)),
        python,
    )


def _fitting(question: Question, asking: Sequence[str]) -> tuple[Table, Launch] | tuple[None, None]:
    """The first trainer of the stack that has the strategy: of those that ask, else of all."""
    strategy, stack = question.parsed.name, question.chosen_stack
    titled = {table.title: table for table in tables()}
    for table in (*(titled[name] for name in asking if name in titled), *tables()):
        how = table.launch
        if how and how.has(stack, strategy) and (table.title in asking or not how.answering):
            return table, how
    return None, None


def _command(how: Launch, question: Question, result: Result) -> str:
    """What starts it on the GPUs of the choice."""
    cluster = question.load()[0].value.resized(result.gpus)
    places = {"nodes": cluster.nodes, "gpus_per_node": cluster.gpus_per_node}
    sites = f"{how.sites}={cluster.sites} " if how.sites and cluster.sites > 1 else ""
    return sites + how.command.format(**places, backend=cluster.backend)


def _changed(overrides: Mapping[str, str], keys: Mapping[str, Any]) -> Iterator[str]:
    """Numbers of the model and of the stack that were changed, and that no key says."""
    for path, text in overrides.items():
        if path.startswith(("model.", "stack.")) and path not in keys:
            yield f"{path} {text}"


def _with_others(how: Launch, keys: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Keys, and those that the trainer wants beside them."""
    for key, value in keys:
        yield key, value
        for beside, text in (how.beside.get(f"{key}={value}") or how.beside.get(key) or {}).items():
            yield beside, value if text == "=" else text


def _divided(stated: Mapping[str, Any], options: Collection[str]) -> dict[str, Any]:
    """What two keys of a trainer say together: a model, a type, a batch, or every Nth layer."""
    parts: dict[str, Any] = {}
    if "size" in options and "family" in stated:
        parts["model"] = stated["family"]
    if "narrow_as" in options and stated.get("narrow") == "mxfp8":
        parts |= {"narrow": "fp8", "narrow_as": "mxfp8"}
    if "stage_batch" in options and stated.get("pp", 1) > 1:  # its batch is that of all passes
        batch = stated["micro_batch"]
        parts |= {"stage_batch": batch, "micro_batch": batch * stated["accumulation"]}
    recompute, _, every = stated["recompute"].partition("/")
    if "recompute_every" in options and recompute == "selective":
        parts["recompute_every"] = ""
    elif "recompute_every" in options and every:
        parts |= {"recompute": "selective", "recompute_every": int(every)}
    return parts


def _unwritten(table: Table, stated: Mapping[str, Any], keys: Mapping[str, Any]) -> Iterator[str]:
    """What a trainer has to know that no key says, unless it does that anyway."""
    usual = {**_USUAL, **table.defaults}
    said = {*keys, *(["model"] if "dim.layers" in keys else [])}
    said |= {"accumulation"} if {"micro_batch", "global_batch"} <= said else set()
    yield from _unwritten_strategy(table, stated["strategy"], keys)
    for name in _NEEDED:
        if name in stated and name not in said and stated[name] != usual.get(name):
            yield f"{name} {stated[name]}"


def _unwritten_strategy(
    table: Table, strategy: Any, keys: Mapping[str, tuple[str, Any]]
) -> Iterator[str]:
    """The strategy, or options of it, that neither its key nor another one says."""
    base = "fsdp" if "fsdp_version" in keys else table.defaults.get("strategy", "ddp")
    if "strategy" in keys:
        key, text = keys["strategy"]
        take = table.take[key]
        base = take.value or take.by_text.get(str(text).lower()) or text
    made: Any = parse(base)
    if made.name == strategy.name:
        for name, value in _changes(strategy, made):
            says = {f"strategy.{name}", *_SAID_BY.get(name, ())}
            if not says & keys.keys() and table.defaults.get(f"strategy.{name}") != str(value):
                yield f"{name}={value} of {strategy.name}"
    elif not _BY_OTHERS.get(strategy.name, set()) & keys.keys():
        yield f"strategy {title(strategy)}"


_SAID_BY = {"shard": {"shards", "replicas"}, "version": {"fsdp_version"}}
"""Options of keys that say those of a strategy."""
_BY_OTHERS = {"ddp": {"shards"}, "zeropp": {"strategy.qwz"}}
"""Options of keys that make another strategy this one."""


def _stated(question: Question, result: Result, strategy: Strategy) -> Iterator[tuple[str, Any]]:
    """The options of a choice, as tables name them; those that say nothing are left out."""
    cluster, model = question.load()
    stack = question.load_stack().value
    together = result.tp * result.cp * result.pp
    for name in MESH:
        value = getattr(question, name)
        # Some share experts by default.
        shares = name == "etp" and min(question.tp, question.ep) > 1
        if value not in {1, "1f1b"} or value is True or shares:
            yield name, value
    if result.interleave > 1:
        each = len(layers(model.value.blocks)) // (result.pp * result.interleave)
        yield "chunk_layers", each
    yield "nodes", result.nodes
    yield "gpus_per_node", min(result.gpus, cluster.value.gpus_per_node)
    yield "data_parallel", result.gpus // together
    yield "micro_batch", result.micro_batch
    yield "accumulation", result.accumulation
    yield "global_batch", result.global_batch
    yield "model.seq_len", model.value.tokens
    narrow = result.precision in NARROW
    yield "precision", "bf16" if narrow else result.precision
    if narrow:
        yield "narrow", result.precision
    yield "recompute", result.recompute
    yield "attention", result.attention
    yield "optimizer", question.optimizer if isinstance(question.optimizer, str) else "adamw"
    if question.lora:
        yield "lora", question.lora
    yield "quantize_base", question.quantize_base
    if result.offload != "none":
        yield "offload", result.offload
    yield "stack", question.chosen_stack
    yield "stack.overlap", stack.overlap and strategy.name in {"ddp", "zero1"}
    yield "stack.overlap_tensor", stack.overlap_tensor and result.tp > 1
    yield from _of_strategy(strategy, result, cluster.value.gpus_per_node)
    yield from _of_model(question.model)


def _of_strategy(
    strategy: Strategy, result: Result, gpus_per_node: int
) -> Iterator[tuple[str, Any]]:
    yield "strategy", strategy
    ranks = result.gpus // (result.tp * result.cp * result.pp)
    if isinstance(strategy, FSDP):
        yield "fsdp_version", strategy.version
        in_node = min(gpus_per_node, result.gpus // result.pp) // (result.tp * result.cp)
        shard = max(in_node, 1) if strategy.shard == "node" else strategy.shard or ranks
        yield "replicas", ranks // shard
        yield "shards", shard
        yield "strategy.reshard_after_forward", strategy.reshard_after_forward
        yield "strategy.reduce", str(strategy.reduce)
    elif strategy.name == "ddp":
        yield "replicas", ranks
        yield "shards", 1
    if isinstance(strategy, ZeroPP):
        yield "strategy.qwz", strategy.qwz
        yield "strategy.qgz", strategy.qgz
        if strategy.hpz:
            yield "strategy.hpz_group", strategy.hpz_group or gpus_per_node


_PLAIN = {
    *("layers", "hidden", "heads", "kv_heads", "ffn", "gated", "bias", "norm", "vocab", "tied"),
    *("seq_len", "positions", "head_dim", "attention", "experts", "name", "kind", "source"),
    *("parameters", "dropout", "code"),
}
"""What a file of a model may say that dimensions in flags do, too."""


def _of_model(model: Any) -> Iterator[tuple[str, Any]]:
    """Its name, the two halves of it as torchtitan has them, and its dimensions."""
    if isinstance(model, str):
        key = key_of("models", model)
        yield "model", model
        head, _, size = key.partition("-")
        if size:
            yield "family", head
            yield "size", size.upper()
        if key not in names("models"):
            return
        tree = plain(read("models", key))
    elif isinstance(model, Contents):
        tree = plain(model.tree)
    else:
        return
    if tree.get("kind") != "transformer" or not _PLAIN.issuperset(tree):
        return
    experts = tree.get("experts")
    yield "dim.dropout", tree.get("dropout", False)
    for name, value in tree.items():
        if name not in {"experts", "name", "kind", "source", "seq_len"}:
            yield f"dim.{name}", value
    yield "dim.kv_heads", tree.get("kv_heads", tree.get("heads"))
    yield "grouped", tree.get("kv_heads", tree.get("heads")) != tree.get("heads")
    if isinstance(experts, Mapping):
        for name in ("count", "active", "width"):
            yield f"dim.experts.{name}", experts.get(name)


def _text(take: Take, value: Any) -> Any:
    """What a key has to be, to say this; None: it cannot."""
    if take.option == "strategy":
        return _of_strategies(take, value) if take.values or take.value else title(value)
    if take.values:
        texts = (text for text, become in take.values.items() if become == value)
        text = next(texts, None)
        return None if text is None else typed(text)
    if take.value is not None:
        return True if take.value == value else None
    return value


def _of_strategies(take: Take, strategy: Strategy) -> Any:
    """By the value that is most like it: of its name, with the fewest other options."""
    alike = _alike(take, strategy)
    text = min(alike, key=lambda text: alike[text], default=None)
    return text if text is None or text is True else typed(text)


def _alike(take: Take, strategy: Strategy) -> dict[Any, int]:
    """Values of a key that say a strategy of this name, with how many other options it has."""
    texts: dict[Any, Any] = dict(take.values) or {True: take.value}
    name = "zero3" if isinstance(strategy, ZeroPP) else strategy.name  # with keys of its own
    return {
        text: len(list(_changes(strategy, made)))
        for text, become in texts.items()
        if become and (made := parse(become)).name == name
    }


def _distance(take: Take, strategy: Strategy) -> int:
    """How far the nearest strategy of a key is from this one; 0 for keys of other options."""
    if take.option != "strategy" or not (take.values or take.value):
        return 0
    return min(_alike(take, strategy).values(), default=0)


def _changes(strategy: Any, other: Any) -> Iterator[tuple[str, Any]]:
    """Options of a strategy that another one of its name has not so."""
    for option in fields(other):
        value = getattr(strategy, option.name)
        if value != getattr(other, option.name):
            yield option.name, value
