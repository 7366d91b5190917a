"""Tracing a module: what runs, what is kept, and what is refused in one line."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from co2sim.common.errors import OptionError  # noqa: E402
from co2sim.tracing.from_torch import load_build, trace  # noqa: E402
from co2sim.tracing.trace import AttentionShape, ConvolutionShape, ProductShape, Trace  # noqa: E402

ROWS, WIDTH = 4, 8


class Own(nn.Module):
    """Two linear layers, and a forward pass that a test gives."""

    def __init__(self, run: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: Any) -> Any:
        """What the test gives."""
        return self.run(self, x)


def rows() -> Any:
    """A batch of floating-point rows."""
    return torch.randn(ROWS, WIDTH)


def traced(run: Callable[[Any, Any], Any]) -> Trace:
    """The trace of two layers with a forward pass."""
    return trace(lambda: Own(run), rows)


def refused(run: Callable[[Any, Any], Any]) -> str:
    """The line that a forward pass ends in."""
    with pytest.raises(OptionError) as found:
        traced(run)
    assert "\n" not in str(found.value)
    return str(found.value)


def plain(model: Any, x: Any) -> Any:
    """Two layers with a GELU between them."""
    return model.two(functional.gelu(model.one(x)))


# --- what is counted -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: Own(plain), (ROWS, WIDTH)),
        (lambda: nn.Sequential(nn.Conv2d(3, 6, 3, stride=2, padding=1), nn.ReLU()), (2, 3, 9, 9)),
        (lambda: nn.ConvTranspose2d(3, 5, 3, stride=2), (2, 3, 7, 7)),
        (lambda: nn.Conv1d(4, 8, 3, dilation=2), (2, 4, 20)),
    ],
)
def test_flop_are_those_of_real_tensors(build: Any, shape: Any) -> None:
    """The FLOP of a trace are what PyTorch's counter counts as the module runs."""
    model = build()
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(shape)).mean().backward()
    assert trace(build, lambda: torch.randn(shape)).flop == counter.get_total_flops()


def test_a_depthwise_convolution_has_the_flop_of_its_groups() -> None:
    """Both gradients of a convolution with a group a channel take as much as the convolution."""
    found = trace(lambda: nn.Conv1d(16, 16, 3, groups=16), lambda: torch.randn(2, 16, 10))
    forward = 2 * 2 * 8 * 16 * 3
    assert found.flop == 2 * forward  # the input has no gradient


def test_products_name_the_operand_that_is_a_parameter() -> None:
    """A linear layer multiplies by its weight forward; its weight's gradient has none."""
    found = traced(lambda model, x: model.one(x))
    shapes = [kernel.shape for kernel in found.kernels if isinstance(kernel.shape, ProductShape)]
    assert shapes == [
        ProductShape(ROWS, WIDTH, WIDTH, parameter="right"),
        ProductShape(WIDTH, ROWS, WIDTH),
    ]


def test_kernels_belong_to_the_deepest_module_forward_and_backward() -> None:
    """Every product of a module is its own, in both passes."""
    found = traced(plain)
    products = [(k.module, k.phase) for k in found.kernels if isinstance(k.shape, ProductShape)]
    assert products == [
        ("one", "forward"),
        ("two", "forward"),
        *[("two", "backward")] * 2,
        ("one", "backward"),
    ]


def test_a_kernel_names_the_storages_that_earlier_ones_wrote() -> None:
    """The GELU reads what the first layer writes."""
    kernels = traced(plain).kernels
    gelu = next(kernel for kernel in kernels if kernel.name == "gelu")
    assert gelu.reads == kernels[0].writes


def test_kept_bytes_are_the_inputs_that_gradients_need() -> None:
    """Kept are the inputs of GELU and of the second layer; the batch is no activation."""
    found = traced(plain)
    assert found.kept == 2 * ROWS * WIDTH * 4


def test_the_peak_is_at_least_what_is_kept() -> None:
    """What is kept lives at once at the end of the forward pass."""
    found = traced(plain)
    assert found.peak >= found.kept


def test_attention_is_the_kernel_of_a_gpu() -> None:
    """In bf16 without a mask attention is one flash kernel with the heads as given."""

    def run(model: Any, x: Any) -> Any:
        heads = model.one(x).view(1, 2, 2, WIDTH).bfloat16()
        few = heads[:, :1]
        return functional.scaled_dot_product_attention(
            heads, few, few, is_causal=True, enable_gqa=True
        )

    shapes = [kernel.shape for kernel in traced(run).kernels]
    attention = [shape for shape in shapes if isinstance(shape, AttentionShape)]
    once = AttentionShape(1, 2, 1, 2, 2, WIDTH, WIDTH, causal=True, masked=False)
    assert attention == [once] * 2


def test_a_convolution_is_an_implicit_product_with_its_flop() -> None:
    """Forward and both gradients have the same FLOP as products of matrices."""
    found = trace(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 6, 3, groups=2)),
        lambda: torch.randn(2, 4, 8, 8),
    )
    for kernel in found.kernels:
        if isinstance(kernel.shape, ConvolutionShape):
            assert kernel.flop == sum(product.flop for product in kernel.shape.products())


# --- the tree ------------------------------------------------------------------------------------


def test_equal_blocks_are_alike_and_others_are_not() -> None:
    """Entries of a list are alike where their kernels are equal, whatever their names."""
    wide = lambda: nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH))  # noqa: E731
    thin = lambda: nn.Sequential(nn.Linear(WIDTH, 2), nn.ReLU(), nn.Linear(2, WIDTH))  # noqa: E731
    found = trace(
        lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), wide(), wide(), thin(), wide()), rows
    )
    alike = {module.path: module.alike for module in found.modules}
    assert alike["1"] == alike["2"] == alike["4"] != alike["3"]


def test_a_boundary_is_what_goes_in_and_out() -> None:
    """A module's bytes are those of its arguments and of what it returns."""
    one = next(m for m in traced(lambda m, x: m.one(input=x)).modules if m.path == "one")
    assert (one.calls, one.received, one.returned) == (1, ROWS * WIDTH * 4, ROWS * WIDTH * 4)


def test_tied_weights_are_one_parameter_with_two_paths() -> None:
    """A head that shares the embedding's weight adds no parameter."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Embedding(100, WIDTH), nn.Linear(WIDTH, 100, bias=False))
        model[1].weight = model[0].weight
        return model

    found = trace(build, lambda: torch.randint(0, 100, (2, 5)))
    (only,) = found.parameters
    assert (only.path, only.aliases, found.parameter_count) == ("0.weight", ("1.weight",), 800)
    assert (found.samples, found.units) == (2, 10)


def test_frozen_parameters_have_no_gradients() -> None:
    """A frozen layer has no product for its weight's gradient."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[0].requires_grad_(requires_grad=False)
        return model

    found = trace(build, rows)
    backward = [k for k in found.kernels if k.phase == "backward" and k.flop]
    assert [k.module for k in backward] == ["1"]
    assert [p.trainable for p in found.parameters] == [False, False, True, True]


# --- what modules do -----------------------------------------------------------------------------


def test_recomputation_is_a_phase_and_keeps_less() -> None:
    """Checkpointed code runs again in the backward pass; only its input is kept."""
    found = traced(lambda m, x: checkpoint(lambda y: plain(m, y), m.one(x), use_reentrant=False))
    again = [k for k in found.kernels if k.phase == "recomputation" and k.flop]
    assert [k.module for k in again] == ["one", "two"][: len(again)]
    assert found.kept == ROWS * WIDTH * 4


def test_autocast_of_a_gpu_computes_norms_in_single_precision() -> None:
    """Under autocast for CUDA products are bf16, and layer norms float32."""

    def run(model: Any, x: Any) -> Any:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return functional.layer_norm(model.one(x), (WIDTH,))

    types = {kernel.name: kernel.dtype for kernel in traced(run).kernels}
    assert (types["addmm"], types["native_layer_norm"]) == ("bfloat16", "float32")


def test_dropout_keeps_a_mask_of_a_byte() -> None:
    """Dropout is the one kernel of a GPU, whose mask is boolean."""
    found = traced(lambda m, x: functional.dropout(m.one(x), 0.5))
    kernel = next(k for k in found.kernels if k.name == "native_dropout")
    assert [access.size for access in kernel.writes] == [ROWS * WIDTH * 4, ROWS * WIDTH]


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 2)),
        lambda: nn.Sequential(nn.Linear(WIDTH, 2), nn.BatchNorm1d(2), nn.Dropout(0.1)).eval(),
        lambda: nn.Linear(WIDTH, 2).to("cuda"),
        lambda: nn.Linear(WIDTH, 2).double().float(),
        lambda: Own(lambda m, x: {"loss": m.one(x).mean()}),
        lambda: Own(lambda m, x: (m.one(x), [m.two(x)])),
        lambda: Own(lambda m, x: functional.relu(m.one(x), inplace=True).mul_(2)),
        lambda: Own(lambda m, x: torch.fft.fft(m.one(x)) @ torch.eye(WIDTH, dtype=torch.cfloat)),
        lambda: Own(lambda m, x: m.one(x.cuda()) + torch.zeros(WIDTH, device="cuda")),
        lambda: Own(lambda m, x: m.one(x)[torch.arange(ROWS) < 2]),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2)),
        lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, batch_first=True),
    ],
)
def test_usual_modules_are_traced(build: Any) -> None:
    """Normalized, evaluated, converted, complex and in-place modules have kernels."""
    found = trace(build, rows)
    assert any(kernel.phase == "backward" for kernel in found.kernels)


def test_a_constructor_may_read_numbers_off_its_tensors() -> None:
    """Rates of a linspace and sizes in a buffer have their values."""

    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
            self.register_buffer("sizes", torch.arange(6))
            self.out = nn.Linear(WIDTH, int(self.sizes.max()))

        def forward(self, x: Any) -> Any:
            assert self.rates == pytest.approx([0, 0.1, 0.2, 0.3])
            return self.out(x)

    assert trace(Reads, rows).parameters[0].shape == (5, WIDTH)


def test_a_router_sends_every_expert_its_share() -> None:
    """A loop over experts has the FLOP of tokens times choices, and the trace says so."""
    tokens, experts, chosen = 64, 8, 2

    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(WIDTH, experts)
            self.experts = nn.ModuleList(nn.Linear(WIDTH, 32) for _ in range(experts))

        def forward(self, x: Any) -> Any:
            weights, choices = self.gate(x).softmax(-1).topk(chosen)
            out = x.new_zeros(len(x), 32)
            for number, expert in enumerate(self.experts):
                token, place = torch.where(choices == number)
                if token.numel():
                    out.index_add_(0, token, expert(x[token]) * weights[token, place, None])
            return out

    found = trace(Routed, lambda: torch.randn(tokens, WIDTH))
    forward = [k.flop for k in found.kernels if k.phase == "forward" and "experts" in k.module]
    assert sum(forward) == 2 * tokens * chosen * WIDTH * 32
    assert len({flop for flop in forward if flop}) == 1
    assert found.assumptions


def test_a_module_larger_than_memory_takes_none() -> None:
    """A matrix of 4 TB is traced."""
    size = 10**6
    found = trace(lambda: nn.Linear(size, size), lambda: torch.randn(1, size))
    assert found.parameter_count == size * size + size


def test_a_module_that_was_built_before_is_traced() -> None:
    """Real parameters stand for their shapes, and stay as they are."""
    model = Own(plain)
    before = model.one.weight
    found = trace(lambda: model, rows)
    assert found.parameter_count == 2 * (WIDTH * WIDTH + WIDTH)
    assert before.shape == (WIDTH, WIDTH)


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.two(x) if m.one(x).sum() > 0 else m.one(x),
        lambda m, x: m.one(x) * m.one(x).max().item(),
        lambda m, x: m.one(x)[m.one(x)[:, 0] > 0],
        lambda m, x: m.one(x)[m.one(x)[:, 0].nonzero()[:, 0]],
    ],
)
def test_values_that_depend_on_data_are_refused(run: Any) -> None:
    """Branches, numbers and shapes of activations end in a line that names the place."""
    assert "test_from_torch.py" in refused(run)


@pytest.mark.parametrize(
    "run",
    [
        lambda m, x: m.one(x).detach(),
        lambda m, x: torch.no_grad()(m.one)(x),
        lambda m, x: torch.from_numpy(m.one(x).detach().numpy()),
        lambda m, x: m.one(x) * torch.cuda.get_device_capability()[0],
        lambda _m, _x: None,
    ],
)
def test_what_cannot_be_traced_ends_in_one_line(run: Any) -> None:
    """No gradient, NumPy, questions to a GPU, and no output are refused."""
    assert refused(run)


def test_a_loss_must_be_a_scalar() -> None:
    """A loss of a shape is refused."""
    with pytest.raises(OptionError, match="scalar"):
        trace(lambda: Own(plain), rows, lambda model, x: model(x))


def test_gradients_of_gradients_are_refused() -> None:
    """A loss with a gradient penalty: the second backward pass would not be counted."""

    def penalty(model: Any, x: Any) -> Any:
        (gradient,) = torch.autograd.grad(model(x).sum(), model.one.weight, create_graph=True)
        return gradient.pow(2).sum()

    with pytest.raises(OptionError, match="gradients"):
        trace(lambda: Own(plain), rows, penalty)


@pytest.mark.parametrize(
    "batch", [lambda: torch.randn(0, WIDTH), lambda: torch.eye(WIDTH).to_sparse()]
)
def test_a_batch_without_elements_or_places_is_refused(batch: Any) -> None:
    """No samples, and tensors that are not plain."""
    with pytest.raises(OptionError, match="batch"):
        trace(lambda: Own(plain), batch)


# --- files ---------------------------------------------------------------------------------------

FILE = """
import torch
def build(): return torch.nn.Linear(8, 8)
def batch(): return torch.randn(4, 8)
"""


def test_a_file_gives_build_and_batch(tmp_path: Path) -> None:
    """A file of three lines is traced."""
    path = tmp_path / "own_model.py"
    path.write_text(FILE)
    source = load_build(f"{path}:build")
    assert trace(source.build, source.batch, source.loss).samples == ROWS


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (FILE.replace("batch", "inputs"), "build"),
        (FILE, "other"),
        ("import torch\nraise ValueError('no')", "build"),
        ("def build(:", "build"),
        ("import sys\nsys.exit(3)", "build"),
    ],
)
def test_a_file_that_lacks_something_is_refused(tmp_path: Path, text: str, named: str) -> None:
    """A missing function, an error, a mistake of syntax and an end are one line each."""
    path = tmp_path / "lacking_model.py"
    path.write_text(text)
    with pytest.raises(OptionError):
        load_build(f"{path}:{named}")


def test_importing_co2sim_does_not_import_torch() -> None:
    """Only a trace needs torch."""
    code = "import sys, co2sim, co2sim.tracing.trace; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_lazy_modules_are_refused() -> None:
    """Their parameters have no shapes before data runs through them."""
    with pytest.raises(OptionError) as found:
        trace(lambda: nn.Sequential(nn.LazyLinear(5)), rows)
    assert "\n" not in str(found.value)
