"""Memory: the published formulas, with published numbers."""

from itertools import pairwise

import pytest
import tiny
from hypothesis import assume, given
from hypothesis import strategies as st
from moments import line, most, passing

from analysis.published.runs import papers
from co2sim.catalog import load_optimizer
from co2sim.models.operators import Model, plain_block
from co2sim.models.transformer import Transformer, language_model
from co2sim.prediction.question import Question
from co2sim.schedule.schedule import NODE, PEERS, WORLD, DType, Layout
from co2sim.training.memory import allocated, overhead
from co2sim.training.workload import Workload

PARAMETERS = 7_500_000_000
"""The model of the example in ZeRO's figure 1."""


def big(**changes: object) -> Workload:
    """7.5 billion parameters in one block."""
    model = Model("7.5b", (plain_block("all", (PARAMETERS,), 1.0, 0.0),), tokens=1)
    return Workload(model, **changes)  # type: ignore[arg-type]


def states(strategy: str, layout: Layout, job: Workload | None = None) -> float:
    """Bytes of parameters, gradients and optimizer of a strategy."""
    memory = most(job or big(), strategy, layout)
    return memory["parameters"] + memory["gradients"] + memory["optimizer"]


def test_moments_in_8_bits_take_a_quarter() -> None:
    """Two bytes a parameter and scales in place of eight, beside the master copy of ddp."""
    one = Layout(1, 8)
    plain, eight = (
        states("ddp", one, big(optimizer=load_optimizer(name).value))
        for name in ("adamw", "adamw_8bit")
    )
    assert plain - eight == pytest.approx(PARAMETERS * (8 - 2 - 2 * 4 / 256))
    plain, eight = (
        states("fsdp", one, big(optimizer=load_optimizer(name).value))
        for name in ("adamw", "adamw_8bit")
    )
    assert plain - eight == pytest.approx(PARAMETERS / 8 * (8 - 2 - 2 * 4 / 256))


@given(st.integers(1, 12), st.integers(1, 8))
def test_sharding_divides_what_the_formulas_divide(nodes: int, gpus: int) -> None:
    """2 + 2 + K bytes per parameter: stage 1 divides K, stage 2 the gradients, 3 everything.

    As in figure 1 of ZeRO (arXiv 1910.02054): of 7.5B parameters 120 GB, on 64 GPUs 1.9 GB.
    """
    layout, n, k = Layout(nodes, gpus), nodes * gpus, 12
    expected = {
        "ddp": 2 + 2 + k,
        "zero1": 2 + 2 + k / n,
        "zero2": 2 + (2 + k) / n,
        "zero3": (2 + 2 + k) / n,
        "zeropp": (2 + 2 + k) / n,
        "zero1(shard=node)": 2 + 2 + k / gpus,
        "zero2(shard=node)": 2 + (2 + k) / gpus,
        "fsdp": (4 + 4 + 8) / n,  # parameters, gradients and two moments in fp32
        "fsdp(shard=node)": (4 + 4 + 8) / gpus,
    }
    for strategy, per_parameter in expected.items():
        assert states(strategy, layout) == pytest.approx(per_parameter * PARAMETERS)


def test_the_secondary_shard_is_one_more_copy_in_half_precision_per_node() -> None:
    """HpZ keeps 2 bytes per parameter, divided over the GPUs of its group."""
    for text, ranks in (("zeropp", 8), ("zeropp(hpz_group=4)", 4), ("zeropp(hpz_group=16)", 16)):
        memory = most(big(), text, Layout(4, 8))
        assert memory["secondary"] == pytest.approx(2 * PARAMETERS / ranks)
    assert "secondary" not in most(big(), "zeropp(hpz=false)", Layout(4, 8))


def test_zero2_keeps_the_bucket_that_is_reduced() -> None:
    """In the type of gradients, and no more than the model; alone it reduces nothing."""
    for text, elements in (("zero2(bucket=700)", 700), ("zero2", 2000)):
        assert most(tiny.job(), text, Layout(2, 2))["bucket"] == 2 * elements
        assert "bucket" not in most(tiny.job(), text, Layout(1, 1))


@pytest.mark.parametrize(
    ("strategy", "copies"),
    [
        ("local_sgd", 1),
        ("slowmo", 3),
        ("co2", 4),
        ("co2.published(staleness=2)", 4),
        ("co2.published(dtype=bf16)", 2.5),
        ("diloco(dtype=int4)", 3),
    ],
)
def test_outer_states_are_copies_of_the_parameters(strategy: str, copies: float) -> None:
    """Anchor, momentum and a buffer in fp32, sharded inside a node; late averages keep x, too."""
    alone = most(big(), strategy, Layout(4, 8))
    assert alone["outer"] == pytest.approx(copies * 4 * PARAMETERS)
    text = strategy.replace("(", "(worker=node,") if "(" in strategy else f"{strategy}(worker=node)"
    shared = most(big(), text, Layout(4, 8))
    assert shared["outer"] == pytest.approx(copies * 4 * PARAMETERS / 8)
    inner = most(big(), "zero2", Layout(1, 8))
    assert {name: size for name, size in shared.items() if name != "outer"} == inner


# --- activations -------------------------------------------------------------------------------


def gpt(layers: int, hidden: int, heads: int, tokens: int, *, dropout: bool = False) -> Model:
    """A GPT: two-matrix MLP of 4 h, softmax attention."""
    body = Transformer(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, dropout=dropout)
    return language_model("gpt", body, vocab=1000, tokens=tokens, tied=True)


def kept(model: Model, **changes: object) -> float:
    """Activations that are kept when the loss is made, in bytes."""
    found = passing(Workload(model, **changes))  # type: ignore[arg-type]
    return float(found.items["activations"][found.moments.index("loss")])


@pytest.mark.slow  # imports torch
def test_a_layer_keeps_what_pytorch_keeps() -> None:
    """A layer without dropout in bf16 with PyTorch's flash attention: every tensor autograd saves.

    Parameters are not counted. Norms keep mean and deviation of every token besides, which is less
    than 1 %.
    """
    torch = pytest.importorskip("torch")
    heads, h, s, b = 4, 256, 128, 2
    kind = torch.bfloat16

    class Layer(torch.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(h) for _ in range(2))
            self.qkv, self.out = torch.nn.Linear(h, 3 * h), torch.nn.Linear(h, h)
            self.up, self.down = torch.nn.Linear(h, 4 * h), torch.nn.Linear(4 * h, h)

        def forward(self, x):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
            q, k, v = (
                part.view(b, s, heads, -1).transpose(1, 2)
                for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
            )
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).reshape(b, s, h))
            return x + self.down(torch.nn.functional.gelu(self.up(self.norms[1](x))))

    layer = Layer().to(kind)
    owned = {one.untyped_storage().data_ptr() for one in layer.parameters()}
    found: dict[int, int] = {}

    def pack(tensor):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(b, s, h, dtype=kind, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        layer(x).sum().backward()
    more, fewer = (kept(gpt(count, h, heads, s), micro_batch=b) for count in (2, 1))
    assert more - fewer == pytest.approx(sum(found.values()), rel=0.01)


@pytest.mark.parametrize(
    ("loss", "precision", "bytes_of_a_logit"),
    [("fused", DType.BF16, 2), ("eager", DType.BF16, 3 * 4), ("eager", DType.FP32, 3 * 4)],
)
def test_a_loss_holds_the_logits_and_what_it_makes_of_them(
    loss: str, precision: DType, bytes_of_a_logit: int
) -> None:
    """Fused: the logits, then their gradient in their place. PyTorch's: three arrays in fp32."""
    body = Transformer(layers=1, hidden=64, heads=4, ffn=96)
    small, large = (
        passing(
            Workload(
                language_model("m", body, vocab=vocab, tokens=10, tied=False),
                precision=precision,
                loss=loss,  # type: ignore[arg-type]
            )
        ).most("logits")
        for vocab in (100_000, 100_001)
    )
    assert large - small == pytest.approx(10 * bytes_of_a_logit)


@pytest.mark.slow  # imports torch
def test_the_cross_entropy_of_pytorch_makes_three_arrays_in_fp32() -> None:
    """Every array as large as the logits that it allocates and that is alive at its peak.

    Of the logits themselves nothing is left then, where no name holds them.
    """
    torch = pytest.importorskip("torch")
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415
    from torch.utils.weak import WeakIdKeyDictionary  # noqa: PLC0415

    tokens, vocab = 64, 1000
    alive, peak = WeakIdKeyDictionary(), 0

    class Count(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN204
            nonlocal peak
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, tuple) else (out,):
                if isinstance(one, torch.Tensor) and one.numel() == tokens * vocab:
                    alive[one.untyped_storage()] = one.untyped_storage().nbytes()
            peak = max(peak, sum(alive.values()))
            return out

    hidden = torch.randn(tokens, 8, dtype=torch.bfloat16)
    weight = torch.randn(vocab, 8, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(vocab, (tokens,))
    with Count():
        loss = torch.nn.functional.cross_entropy((hidden @ weight.T).float(), target)
        loss.backward()
    assert peak == 3 * 4 * tokens * vocab


@pytest.mark.parametrize(
    ("prefetch", "live"),
    [(0, 640), (499, 860), (500, 1140), (860, 1360), (1000, 1640), (10**9, 2 * 2000)],
)
def test_blocks_present_at_once_are_those_in_use_and_ahead(prefetch: int, live: int) -> None:
    """Blocks of 640, 500, 500 and 360, forward and back.

    Nothing ahead: the largest one. 500 ahead: the embedding and a layer. 860 ahead: a layer, and a
    layer and the head, 1360 in all, if the head leads the way back: 860 + 500. All: both ways.
    """
    memory = most(tiny.job(), f"zero3(prefetch={prefetch})", Layout(2, 2))
    assert memory["gathered"] == live * 2


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_tied_embedding_keeps_the_gradient_of_the_head_to_the_end(strategy: str) -> None:
    """Autograd adds the gradient of the look-up last: until then the other one waits, whole."""
    body = Transformer(layers=3, hidden=64, heads=4, ffn=256)
    item = {"ddp": "gradients", "fsdp": "unreduced"}[strategy]
    tied, untied = (
        line(
            Workload(language_model("m", body, vocab=1000, tokens=10, tied=tied)),
            strategy,
            Layout(1, 8),
        )
        for tied in (True, False)
    )
    back = slice(tied.moments.index("backward of layer2"), tied.moments.index("backward of layer0"))
    assert (tied.items[item][back] >= 1000 * 64 * 2).all()
    size = {"ddp": 1000 * 64 * 2, "fsdp": 0}[strategy]  # of a head of its own: reduced
    assert (untied.items[item][back] - tied.items[item][back] <= size).all()


# --- what is there when -------------------------------------------------------------------------


BODIES = st.builds(
    Transformer,
    layers=st.integers(1, 4),
    hidden=st.sampled_from([16, 64]),
    heads=st.sampled_from([2, 4]),
    ffn=st.sampled_from([32, 256]),
    gated=st.booleans(),
    dropout=st.booleans(),
)
JOBS = st.fixed_dictionaries(
    {
        "model": st.builds(
            language_model,
            st.just("m"),
            BODIES,
            vocab=st.sampled_from([10, 1000]),
            tokens=st.just(16),
            tied=st.booleans(),
        ),
        "micro_batch": st.integers(1, 3),
        "accumulation": st.integers(1, 3),
        "recompute": st.sampled_from(["none", "selective", "full", "full/2", "norms+mlp"]),
        "attention": st.sampled_from(["flash", "eager"]),
        "loss": st.sampled_from(["fused", "eager"]),
        "precision": st.sampled_from([DType.BF16, DType.FP32]),
    }
).filter(lambda job: job["recompute"] != "full/2" or len(job["model"].blocks) > 3)
OF_PASSES = ("activations", "checkpoints", "workspace", "logits")


@given(JOBS, st.sampled_from(tiny.VARIANTS), st.sampled_from([Layout(1, 2), Layout(4, 4)]))
def test_the_peak_is_the_fullest_moment(
    options: dict[str, object], strategy: str, layout: Layout
) -> None:
    """No moment holds more, none of an item is negative, and all maxima together are no less."""
    found = line(Workload(**options), strategy, layout)  # type: ignore[arg-type]
    at_peak = sum(found.at(found.peak).values())
    assert at_peak == pytest.approx(found.total.max())
    assert at_peak <= sum(map(found.most, found.items)) * (1 + 1e-9)
    assert all((sizes >= 0).all() for sizes in found.items.values())
    assert len(found.total) == len(found.moments)


@given(JOBS, st.sampled_from(tiny.VARIANTS), st.sampled_from([1.0, 2.0, 3.5]))
def test_an_optimizer_steps_when_nothing_of_the_passes_is_there(
    options: dict[str, object], strategy: str, micro_batches: float
) -> None:
    """States are, all of them; no activation, no logits, no gradient that is not yet reduced."""
    found = line(Workload(**options), strategy, Layout(2, 2), micro_batches)  # type: ignore[arg-type]
    left = found.at(len(found.moments) - 1)
    assert not left.keys() & {*OF_PASSES, "gathered", "unreduced"}
    for name in ("parameters", "gradients", "optimizer"):
        assert left[name] == pytest.approx(found.most(name))


@given(JOBS)
def test_gradients_come_as_blocks_go_back(options: dict[str, object]) -> None:
    """None before, all behind; where micro-steps sum them up they are there all the time."""
    job = Workload(**options)  # type: ignore[arg-type]
    found = line(job, "ddp", Layout(2, 2))
    sizes, last = found.items["gradients"], found.moments.index("backward of the loss")
    assert (sizes[1:] >= sizes[:-1]).all()
    assert sizes[-1] == pytest.approx(job.trained * job.gradient_bytes)
    assert (sizes[: last + 1] == (0 if job.accumulation == 1 else sizes[-1])).all()


@given(JOBS, st.sampled_from(["ddp", "zero1", "zero2", "fsdp(sync=last)", "fsdp"]))
def test_the_last_micro_step_is_the_fullest(options: dict[str, object], strategy: str) -> None:
    """With more of them gradients are there from the begin.

    But for a tied embedding, whose own gradient is not counted where it is summed up.
    """
    assume(not options["model"].blocks[-1].tied)  # type: ignore[attr-defined]
    one, two = (
        line(Workload(**options | {"accumulation": n}), strategy, Layout(2, 2))  # type: ignore[arg-type]
        for n in (1, 2)
    )
    assert one.total.max() <= two.total.max() * (1 + 1e-9)
    gradients = (each.items["gradients"] for each in (one, two))
    assert (next(gradients) <= next(gradients) * (1 + 1e-9)).all()


@given(JOBS, st.floats(1, 20))
def test_a_stage_holds_its_micro_batches_in_flight(options: dict[str, object], n: float) -> None:
    """What is kept until the backward pass as often, all else once."""
    job = Workload(**options)  # type: ignore[arg-type]
    one, two, many = (passing(job, count) for count in (1.0, 2.0, n))
    back = len(one.moments) - 2
    assert many.items.keys() == one.items.keys()
    for name, sizes in many.items.items():
        more = two.items[name] - one.items[name]
        assert sizes == pytest.approx(one.items[name] + (n - 1) * more)
        kept = one.items[name][one.moments.index("loss")]
        if name in {"activations", "checkpoints"}:
            assert more[:back] == pytest.approx([kept] * back)
        else:
            assert not more.any()


@given(JOBS, st.sampled_from(["zero1", "zero2", "zero3", "zeropp", "fsdp"]))
def test_more_ranks_never_need_more(options: dict[str, object], strategy: str) -> None:
    """From two on: one alone has no buffers, and nothing to gather."""
    job = Workload(**options)  # type: ignore[arg-type]
    sizes = [line(job, strategy, Layout(n, 2)).total for n in (1, 2, 8)]
    for few, many in pairwise(sizes):
        assert (many <= few * (1 + 1e-9)).all()


@given(JOBS, st.sampled_from(tiny.VARIANTS))
def test_a_larger_micro_batch_never_needs_less(options: dict[str, object], strategy: str) -> None:
    """At any moment."""
    few, many = (
        line(Workload(**options | {"micro_batch": n}), strategy, Layout(2, 2)).total  # type: ignore[arg-type]
        for n in (2, 3)
    )
    assert (few <= many * (1 + 1e-9)).all()


# --- beside what PyTorch allocates --------------------------------------------------------------


def test_communicators_need_buffers_by_their_ranks() -> None:
    """Of two ranks 544 MB, of more 688 MB (NVIDIA/nccl issue 964), none for a rank alone."""
    layout = Layout(2, 4)
    for groups, expected in (
        ([WORLD], 688e6),
        ([PEERS], 544e6),
        ([WORLD, NODE, PEERS], 2 * 688e6 + 544e6),
    ):
        assert overhead({}, 0.0, groups, layout)["nccl"] == pytest.approx(expected)
    assert "nccl" not in overhead({}, 0.0, [WORLD], Layout(1, 1))


# --- published peaks ----------------------------------------------------------------------------


@pytest.mark.parametrize(("strategy", "published"), [("zero3", 8.09e9), ("zeropp", 10.02e9)])
def test_peaks_of_zeropps_tutorial(strategy: str, published: float) -> None:
    """18B on 64 V100, `max_allocated`: within 10 %, with the settings of paper.toml."""
    paper = papers()["zeropp"]
    case = Question(
        cluster="dgx2-ib8",
        model="gpt-18b",
        strategy=paper.simulation.strategy(strategy),
        gpus=64,
        precision="fp16",
        **paper.training,
    )
    found = allocated(case.stage().memory())
    assert found == pytest.approx(published, rel=0.1)


@given(st.integers(1, 4), st.integers(1, 16), st.integers(1, 8), st.integers(1, 512))
def test_model_flops_follow_palm(layers: int, head_dim: int, heads: int, tokens: int) -> None:
    """6 N + 12 L H Q T per token, N being the parameters that multiply (PaLM, appendix B)."""
    h, vocab = head_dim * heads, 1000
    model = gpt(layers, h, heads, tokens)
    multiplied = layers * 12 * h * h + vocab * h
    expected = 6 * multiplied + 12 * layers * heads * head_dim * tokens
    assert model.flops_per_sample / tokens == pytest.approx(expected)
