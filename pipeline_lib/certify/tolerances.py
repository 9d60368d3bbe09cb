"""By how much what a correct server says may differ from the reference."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tolerance:
    """By how much a correct server may differ, and why so much.

    `mean_nats` bounds the mean difference of log-probabilities. Where the reference's two likeliest
    tokens are nearer than `tie_nats`, a server may take the other one.
    """

    mean_nats: float
    tie_nats: float
    reason: str


# By what the server holds the weights in. The probabilities of greedy answers are compared, which
# are large, so that differences are small. bf16: sums in another order and other kernels move
# logits by about the 2^-8 of their size to which they are rounded. fp8 has 3 bits of mantissa
# beside an exponent, 4-bit types 16 values for a group of weights. These are bounds of judgement,
# not measured on large models.
TOLERANCES = {
    "bf16": Tolerance(0.05, 0.2, "rounding and the order of sums; also for fp16 and fp32"),
    "fp8": Tolerance(0.15, 0.5, "weights of 8 bits, also int8 and q8_0"),
    "4bit": Tolerance(0.4, 1.2, "weights of 4 bits: AWQ, GPTQ, q4_k_m, NF4"),
}
