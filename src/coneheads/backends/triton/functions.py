"""Functions of numbers in Triton: choices and roots as few instructions, and what the GPU has no instruction for.

What is not in the GPU's instructions is computed from what is, so that the digits of small arguments are kept, which a
difference of fast exponentials or a fast logarithm would lose.
"""

import torch
import triton
import triton.language as tl

from coneheads.backends.triton import interpreted

PTX = tl.constexpr(not interpreted() and torch.version.hip is None)  # whether kernels may have instructions of NVIDIA's


@triton.jit
def if_larger(x, y, yes, no):
    """yes where x > y, no elsewhere. Of such a choice LLVM makes vectors of bits, which cost more than the choice."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred larger; setp.gt.f32 larger, $1, $2; selp.f32 $0, $3, $4, larger; }",
            "=f,f,f,f,f", [x, y, yes, no], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return tl.where(x > y, yes, no)


@triton.jit
def fma_if_larger(x, y, a, b, c, no):
    """a b + c where x > y, no elsewhere: one instruction and not three, as it is done only where it is asked for."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .pred larger; setp.gt.f32 larger, $1, $2; @larger fma.rn.f32 $0, $3, $4, $5; }",
            "=f,f,f,f,f,f,0", [x, y, a, b, c, no], tl.float32, True, 1,
        )  # fmt: skip
    else:
        return tl.where(x > y, a * b + c, no)


@triton.jit
def add(x, y, TWOS: tl.constexpr):
    """x + y; with TWOS, two of them are one instruction, which GPUs have since sm_100."""
    if TWOS and PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 x, y; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; add.rn.f32x2 x, x, y; mov.b64 {$0, $1}, x; }",
            "=f,=f,f,f,f,f", [x, y], tl.float32, True, 2,
        )  # fmt: skip
    else:
        return x + y


@triton.jit
def subtract(x, y, TWOS: tl.constexpr):
    """x - y, likewise."""
    if TWOS and PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 x, y; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; sub.rn.f32x2 x, x, y; mov.b64 {$0, $1}, x; }",
            "=f,=f,f,f,f,f", [x, y], tl.float32, True, 2,
        )  # fmt: skip
    else:
        return x - y


@triton.jit
def multiply(x, y, TWOS: tl.constexpr):
    """x y, likewise."""
    if TWOS and PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 x, y; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; mul.rn.f32x2 x, x, y; mov.b64 {$0, $1}, x; }",
            "=f,=f,f,f,f,f", [x, y], tl.float32, True, 2,
        )  # fmt: skip
    else:
        return x * y


@triton.jit
def multiply_add(x, y, z, TWOS: tl.constexpr):
    """x y + z, likewise."""
    if TWOS and PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 x, y, z; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; mov.b64 z, {$6, $7}; "
            "fma.rn.f32x2 x, x, y, z; mov.b64 {$0, $1}, x; }",
            "=f,=f,f,f,f,f,f,f", [x, y, z], tl.float32, True, 2,
        )  # fmt: skip
    else:
        return x * y + z


@triton.jit
def rounded_sum(x, y):
    """x + y, if each is rounded: the compiler keeps products that it adds unrounded, and starts sums of them from y."""
    if PTX:
        return tl.inline_asm_elementwise("add.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)
    else:
        return x + y


@triton.jit
def total(x, AXIS: tl.constexpr):
    """The sum over an axis of what may be products. Threads that sum the same two of them, each with its own unrounded,
    would find different numbers and write them to one place."""
    if PTX:
        return tl.reduce(x, AXIS, rounded_sum)
    else:
        return tl.sum(x, AXIS)


@triton.jit
def as_if_wide(x):
    """x, of which the compiler does not see that it was loaded as 8 or 16 bits.

    For sm_100 it multiplies float32 as tf32, whatever it is told, if a factor depends on any narrower load, as weights
    do on a mask (triton issue 10176). It does not look past a reduction: this one is over an axis of 1.
    """
    return tl.max(x[:, :, None], 2)


@triton.jit
def root(x, inverse, TWOS: tl.constexpr):
    """x times its inverse root, NaN where x is not above 0. A number that is too small for an inverse root is 0 here
    too, or it would be infinite."""
    if PTX and TWOS:
        return tl.inline_asm_elementwise(
            "{ .reg .b64 x, y; mov.b64 x, {$2, $3}; mov.b64 y, {$4, $5}; mul.rn.ftz.f32x2 x, x, y; "
            "mov.b64 {$0, $1}, x; }",
            "=f,=f,f,f,f,f", [x, inverse], tl.float32, True, 2,
        )  # fmt: skip
    elif PTX:
        return tl.inline_asm_elementwise("mul.ftz.f32 $0, $1, $2;", "=f,f,f", [x, inverse], tl.float32, True, 1)
    else:
        return tl.sqrt(tl.maximum(x, 0.0))


@triton.jit
def larger_size(x, y):
    """max(x, |y|), and |y| where x is NaN. Of the size of a product LLVM makes an instruction of its own."""
    if PTX:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 size; abs.f32 size, $2; max.f32 $0, $1, size; }", "=f,f,f", [x, y], tl.float32, True, 1
        )
    else:
        return tl.maximum(x, tl.abs(y))


@triton.jit
def inverse(x):
    """1 / x, off by a unit in the last place; the division of the language has ten steps more."""
    if PTX:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return 1 / x


@triton.jit
def log2(x, FAST: tl.constexpr):
    """The GPU's own instruction, where FAST: off by 2^-22, of 1 or of the result."""
    if FAST and PTX:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def inverse_root(x):
    """1/sqrt(x), and 0 at x = 0, where the slope of a root is 0, and where x is so small that the GPU may read 0."""
    return tl.where(x > 1.2e-38, tl.rsqrt(x), 0.0)


@triton.jit
def angle(m):
    """Between two directions, from the square of their chord: 2 asin(chord / 2)."""
    x = tl.minimum(tl.sqrt(m) * 0.5, 1.0)
    steep = x > 0.5
    z = tl.where(steep, (1 - x) * 0.5, x * x)
    root = tl.where(steep, tl.sqrt(z), x)
    # asin(x) = x + x^3 (1/6 + ...), of least error up to 1/2; beyond, asin(x) = pi/2 - 2 asin(sqrt((1 - x)/2))
    p = 4.2163199048e-2
    p = p * z + 2.4181311049e-2
    p = p * z + 4.5470025998e-2
    p = p * z + 7.4953002686e-2
    p = p * z + 1.6666752422e-1
    half = root * z * p + root
    return tl.where(steep, 3.14159265358979 - 4 * half, 2 * half)


@triton.jit
def sinh(t):
    """By its series below 1, where the exponentials would cancel."""
    sq = t * t
    p = 1 + sq * (1 / 72)
    p = 1 + sq * p * (1 / 42)
    p = 1 + sq * p * (1 / 20)
    near = t * (1 + sq * p * (1 / 6))
    e = tl.exp(tl.minimum(tl.abs(t), 80.0))
    far = (e - 1 / e) * 0.5
    return tl.where(sq < 1, near, tl.where(t < 0, -far, far))


@triton.jit
def asinh(x):
    """log(1 + z) of z = x + x^2 / (1 + sqrt(1 + x^2)), for x >= 0; a small z by the series of log(1 + z)."""
    root = tl.where(x < 1e8, tl.sqrt(x * x + 1), x)
    z = x + x * (x / (1 + root))
    s = z / (2 + z)  # log(1 + z) = 2 atanh(s)
    sq = s * s
    p = 1 / 11 + sq * (1 / 13)
    p = 1 / 9 + sq * p
    p = 1 / 7 + sq * p
    p = 1 / 5 + sq * p
    p = 1 / 3 + sq * p
    return tl.where(z < 1, 2 * s * (1 + sq * p), tl.log(1 + z))
