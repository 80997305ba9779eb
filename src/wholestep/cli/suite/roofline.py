"""Lower bounds of a language model's step, counted from its size alone."""

from __future__ import annotations

from dataclasses import dataclass

from wholestep.cli.workloads.reference_lm import LanguageModelSize

BF16_FLOPS_PER_S = 790e12
"""Of matrix products on one H200, measured on random data."""
MEMORY_BYTES_PER_S = 4.3e12
"""Of one H200, read plus written, measured by a copy."""
LINK_BYTES_PER_S = 365e9
"""Of one H200 over NVLink 4, per rank and direction: the quickest copies among four that all send and receive."""
UPDATE_BYTES_PER_PARAMETER = 28
"""AdamW in float32 reads parameter, gradient and two averages, and writes all but the gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Floors:
    """One step on one rank. Times are those of an H200 at the ceilings above."""

    parameters: int
    product_flops: int
    """Forward and backward of all matrix products."""
    attention_flops: int
    """Forward and backward; causal, so half of the square, and the forward once more in the backward."""
    update_bytes: int
    wire_bytes: int
    """What a rank sends of gradients: in bfloat16 to who adds them, where they are made so, and in float32 back."""
    compute_ms: float
    update_ms: float
    wire_ms: float

    @property
    def step_ms(self) -> float:
        """Arithmetic and update one after the other, messages beside them or longer."""
        return max(self.compute_ms + self.update_ms, self.wire_ms)

    def __str__(self) -> str:
        return (
            f"floor on H200s: {self.step_ms:.2f} ms = products and attention {self.compute_ms:.2f} "
            f"({1e-12 * (self.product_flops + self.attention_flops):.2f} TFLOP) + update {self.update_ms:.2f} "
            f"({1e-9 * self.update_bytes:.2f} GB); gradients on the wire {self.wire_ms:.2f} "
            f"({1e-9 * self.wire_bytes:.2f} GB) beside them; {1e-6 * self.parameters:.1f} M parameters"
        )


def floors(size: LanguageModelSize, *, nproc: int) -> Floors:
    """Counts of a step on each of `nproc` ranks, whose sums of gradients are float32."""
    width, layers, tokens = size.width, size.num_layers, size.rows * size.length
    inner = size.gated or 4 * width
    matrices = layers * (4 * width**2 + (3 if size.gated else 2) * width * inner) + width * size.vocabulary
    biases = 0 if size.gated else layers * (3 * width + width + inner + width)
    norms = layers * 2 * width * (1 if size.gated else 2) + 2 * width
    parameters = matrices + biases + norms + (size.vocabulary + size.length) * width
    product_flops = 6 * tokens * matrices
    # Scores and their product with the values: 2 x 2 T^2 D for each sequence forward, halved by the causal mask;
    # the backward has four such products and the scores again.
    attention_flops = layers * size.rows * 7 * size.length**2 * width
    wire_bytes = (nproc - 1) * (2 * matrices + 4 * (parameters - matrices) + 4 * parameters) // nproc
    update_bytes = UPDATE_BYTES_PER_PARAMETER * parameters
    return Floors(
        parameters=parameters, product_flops=product_flops, attention_flops=attention_flops, update_bytes=update_bytes,
        wire_bytes=wire_bytes, compute_ms=1e3 * (product_flops + attention_flops) / BF16_FLOPS_PER_S,
        update_ms=1e3 * update_bytes / MEMORY_BYTES_PER_S, wire_ms=1e3 * wire_bytes / LINK_BYTES_PER_S,
    )  # fmt: skip
