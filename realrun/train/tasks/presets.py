"""Shapes of the models that are trained here, by the name of a preset, also for co2sim.

Needs no torch: a prediction of `realrun train` uses the same numbers as the training itself.
"""

from dataclasses import dataclass

from co2sim.models.operators import Model
from co2sim.models.transformer import Transformer, language_model

VOCABULARY = 98
"""95 printable ASCII characters, newline, tab, and one that stands for all others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTShape:
    """A GPT without biases in its matrices, with learned positions and a tied head."""

    layers: int
    hidden: int
    heads: int
    context: int

    @property
    def parameters(self) -> int:
        """Elements of all tensors: embedding, positions, layers, and the last norm.

        A layer has 4 h^2 in attention, 8 h^2 in its MLP, and two norms of 2 h.
        """
        h = self.hidden
        return (VOCABULARY + self.context) * h + self.layers * (12 * h * h + 4 * h) + 2 * h

    def model(self) -> Model:
        """The same network as co2sim knows it."""
        body = Transformer(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            ffn=4 * self.hidden,
            bias=False,
        )
        return language_model(
            f"GPT of {self.parameters} parameters",
            body,
            vocab=VOCABULARY,
            tokens=self.context,
            tied=True,
            positions=self.context,
        )

    def toml(self) -> str:
        """The same as a model file, for `co2sim run --model`."""
        h = self.hidden
        return f"""\
# The model of `realrun train --task text`; the norms of co2sim have a weight and a bias, as here.
name = "GPT of {self.parameters} parameters"
kind = "transformer"
source = "definition: realrun.train.tasks.text"
layers = {self.layers}
hidden = {self.hidden}
heads = {self.heads}
ffn = {4 * self.hidden}
gated = false
bias = false
norm = "layernorm"
vocab = {VOCABULARY}
tied = true
positions = {self.context}
seq_len = {self.context}
parameters = {{ value = {self.parameters}, source = "({VOCABULARY} + {self.context}) x {h}\
 + {self.layers} x (12 x {h}^2 + 4 x {h}) + 2 x {h}" }}
"""


GPTS = {
    "tiny": GPTShape(layers=2, hidden=48, heads=4, context=64),
    "mini": GPTShape(layers=3, hidden=64, heads=4, context=64),
    "small": GPTShape(layers=4, hidden=128, heads=4, context=128),
    "medium": GPTShape(layers=6, hidden=256, heads=8, context=256),
    "large": GPTShape(layers=8, hidden=512, heads=8, context=256),
}
"""About 0.06, 0.16, 0.8, 4.8 and 25 million parameters."""

CONVNETS = {"tiny": 8, "mini": 16, "small": 32, "medium": 64, "large": 128}
"""Channels of the first layer of the networks for digits and for segmentation."""

POINT_WIDTHS = {"tiny": 32, "mini": 64, "small": 128, "medium": 256, "large": 512}
"""Width of the first layer of the network for points."""
