"""Ways in which code uses a number of Python: a size, or a rate. Each gives what a graph can be multiplied by."""

from __future__ import annotations

import cmath
import copy
import decimal
import fractions
import functools
import itertools
import json
import math
import numbers
import operator
import pickle
import statistics
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

Use = Callable[[Any], Any]
Point = namedtuple("Point", "x y")


@dataclass(frozen=True, order=True)
class Held:
    value: Any


class Level(IntEnum):
    LOW, HIGH = 0, 1


def _matched(n: Any) -> int:
    match n:
        case int():
            return 1
        case float():
            return 2
        case _:
            return 3


def _raised(n: Any) -> int:
    try:
        n.no_such_attribute  # noqa: B018
    except AttributeError:
        return 5
    return 6


def _error_of(call: Callable[[], Any]) -> str:
    try:
        return str(call())
    except Exception as error:
        return type(error).__name__


def _walrus(n: Any) -> Any:
    if (half := n / 2) > 1:
        return half
    return n


BOTH: dict[str, Use] = {
    "isinstance_int": lambda n: isinstance(n, int),
    "isinstance_float": lambda n: isinstance(n, float),
    "isinstance_pair": lambda n: isinstance(n, (int, float)),
    "isinstance_number": lambda n: isinstance(n, numbers.Number),
    "isinstance_real": lambda n: isinstance(n, numbers.Real),
    "isinstance_integral": lambda n: isinstance(n, numbers.Integral),
    "isinstance_bool": lambda n: isinstance(n, bool),
    "isinstance_tensor": lambda n: isinstance(n, torch.Tensor),
    "type_is_int": lambda n: type(n) is int,
    "type_is_float": lambda n: type(n) is float,
    "type_in": lambda n: type(n) in (int, float),
    "type_equal": lambda n: type(n) == int or type(n) == float,  # noqa: E721
    "type_name": lambda n: len(type(n).__name__),
    "type_called": lambda n: type(n)(3),
    "class_attribute": lambda n: n.__class__ in (int, float),
    "issubclass": lambda n: issubclass(type(n), (int, float)),
    "match": _matched,
    "callable": callable,
    "hasattr": lambda n: hasattr(n, "bit_length"),
    "hasattr_item": lambda n: hasattr(n, "item"),
    "dir": lambda n: "__add__" in dir(n),
    "missing_attribute": _raised,
    "format": lambda n: len(format(n, ".3f")),
    "fstring": lambda n: len(f"{n}"),
    "fstring_precision": lambda n: len(f"{n:.4g}"),
    "fstring_width": lambda n: len(f"{n:>12}"),
    "percent": lambda n: len("%s" % n),  # noqa: UP031
    "percent_g": lambda n: len("%.3g" % n),  # noqa: UP031
    "str": lambda n: float(str(n)),
    "repr": lambda n: float(repr(n)),
    "text_in_key": lambda n: {f"{n}": 2.0}[f"{n}"],
    "round": round,
    "round_digits": lambda n: round(n, 2),
    "int": int,
    "float": float,
    "complex": lambda n: complex(n).real,
    "bool": lambda n: 2 if n else 3,
    "not": lambda n: not n,
    "abs": abs,
    "neg": operator.neg,
    "pow": lambda n: n**2,
    "pow_builtin": lambda n: pow(n, 2),
    "divmod": lambda n: sum(divmod(n, 3)),
    "floordiv": lambda n: n // 2,
    "mod": lambda n: n % 3,
    "rdiv": lambda n: 1.0 / n,
    "chain": lambda n: 0 < n < 100,
    "equal": lambda n: n == 3,
    "max": lambda n: max(n, 2),
    "min": lambda n: min(n, 2),
    "max_of_list": lambda n: max([n, 1, 4]),
    "sum": lambda n: sum([n, n, 1]),
    "fsum": lambda n: math.fsum([n, 1]),
    "sorted": lambda n: sorted([n, 2, 5])[1],
    "sorted_key": lambda n: sorted([n, 2, 5], key=lambda one: -one)[0],
    "index_of_list": lambda n: [1, n, 2].index(n),
    "in_list": lambda n: n in [1, 2, 3],
    "in_set": lambda n: n in {1, 2, 3},
    "hash": lambda n: hash(n) == hash(copy.copy(n)),
    "hash_value": lambda n: hash(n) % 7,
    "dict_key": lambda n: {n: 4.0}[n],
    "dict_lookup": lambda n: {2: 4.0, 3: 5.0}.get(n, 6.0),
    "set_size": lambda n: len({n, 2, 3}),
    "counter": lambda n: Counter([n, 2, n])[n],
    "defaultdict": lambda n: defaultdict(float, {n: 1.5})[n],
    "frozen_dataclass": lambda n: {Held(n): 2.0}[Held(n)],
    "ordered_dataclass": lambda n: Held(n) < Held(100),
    "named_tuple": lambda n: Point(n, 1)._replace(y=2).x,
    "tuple_compare": lambda n: (n, 1) < (3, 0),
    "unpacked": lambda n: sum((*[n], 1)),
    "json": lambda n: json.loads(json.dumps({"n": n}))["n"],
    "pickle": lambda n: pickle.loads(pickle.dumps(n)),
    "copy": copy.copy,
    "deepcopy": lambda n: copy.deepcopy({"n": [n]})["n"][0],
    "struct": lambda n: struct.unpack("d", struct.pack("d", n))[0],
    "struct_length": lambda n: len(struct.pack("<f", n)),
    "fraction": lambda n: float(fractions.Fraction(n) + 1),
    "decimal": lambda n: float(decimal.Decimal(n) + 1),
    "decimal_text": lambda n: float(decimal.Decimal(str(n))),
    "math_sqrt": math.sqrt,
    "math_log": math.log,
    "math_log2": math.log2,
    "math_exp": lambda n: math.exp(-n),
    "math_floor": math.floor,
    "math_ceil": math.ceil,
    "math_trunc": math.trunc,
    "math_pow": lambda n: math.pow(n, 0.5),
    "math_isclose": lambda n: math.isclose(n, 3.0),
    "math_isfinite": math.isfinite,
    "math_isnan": math.isnan,
    "math_cos": math.cos,
    "math_hypot": lambda n: math.hypot(n, 1.0),
    "math_fmod": lambda n: math.fmod(n, 2.0),
    "math_frexp": lambda n: math.frexp(n)[0],
    "math_modf": lambda n: math.modf(n)[0],
    "math_copysign": lambda n: math.copysign(n, -1),
    "math_prod": lambda n: math.prod([n, 2]),
    "math_ldexp": lambda n: math.ldexp(n, 2),
    "math_atan2": lambda n: math.atan2(n, 2),
    "cmath": lambda n: abs(cmath.exp(1j * n)),
    "statistics": lambda n: statistics.mean([n, 1, 2]),
    "numpy_sqrt": lambda n: float(np.sqrt(n)),
    "numpy_array": lambda n: float(np.array([n, 1.0]).sum()),
    "numpy_float": lambda n: float(np.float64(n) * 2),
    "numpy_full": lambda n: float(np.full(2, n).mean()),
    "numpy_clip": lambda n: float(np.clip(n, 0, 2)),
    "numpy_maximum": lambda n: float(np.maximum(n, 2)),
    "numpy_isscalar": lambda n: bool(np.isscalar(n)),
    "numpy_interp": lambda n: float(np.interp(n, [0, 10], [1.0, 2.0])),
    "numpy_linspace": lambda n: float(np.linspace(0.0, n, 3)[1]),
    "is_integer": lambda n: float(n).is_integer(),
    "as_integer_ratio": lambda n: n.as_integer_ratio()[0] % 5,
    "conjugate": lambda n: n.conjugate(),
    "real": lambda n: n.real,
    "imag": lambda n: n.imag,
    "hex": lambda n: len(float(n).hex()),
    "partial": lambda n: functools.partial(operator.add, n)(1),
    "reduce": lambda n: functools.reduce(operator.mul, [n, 2, 3]),
    "accumulate": lambda n: [*itertools.accumulate([n, 1, 2])][-1],
    "zip": lambda n: sum(a * b for a, b in zip([n, 1], [2, 3], strict=True)),
    "map": lambda n: sum(map(float, [n, 1])),
    "any": lambda n: any([n > 2, n < 1]),
    "all": lambda n: all([n > 2, n < 9]),
    "bool_and": lambda n: (n and 2) + 1,
    "bool_or": lambda n: n or 7,
    "deque": lambda n: deque([1, n], maxlen=1)[0],
    "ordered_dict": lambda n: OrderedDict(a=n)["a"],
    "enum": lambda n: Level(int(n > 2)) + 1,
    "walrus": _walrus,
    "error_of_division": lambda n: len(_error_of(lambda: n / 0)),
    "error_of_text": lambda n: len(_error_of(lambda: n + "a")),
    "error_of_length": lambda n: len(_error_of(lambda: len(n))),
    "error_of_iteration": lambda n: len(_error_of(lambda: list(n))),
    "error_of_call": lambda n: len(_error_of(lambda: n())),
    "identity": lambda n: (lambda m: m is n)(n),
    "eq_none": lambda n: n is None,
    "tensor": lambda n: torch.tensor(n).double(),
    "tensor_list": lambda n: torch.tensor([n, 1]).sum().double(),
    "full": lambda n: torch.full((2,), n).sum().double(),
    "tensor_dtype": lambda n: 1.0 if torch.tensor(n).dtype.is_floating_point else 2.0,
}
"""Of a size and of a rate."""

SIZES: dict[str, Use] = {
    "range": lambda n: len(range(n)),
    "range_sum": lambda n: sum(range(n)),
    "loop": lambda n: sum(i * 2 for i in range(0, n, 2)),
    "index": operator.index,
    "slice_of_list": lambda n: len([1, 2, 3, 4, 5, 6, 7, 8][:n]),
    "item_of_list": lambda n: [1, 2, 3, 4, 5, 6, 7, 8, 9][n],
    "list_repeat": lambda n: len([0] * n),
    "text_repeat": lambda n: len("a" * n),
    "bytes": lambda n: len(bytes(n)),
    "bit_length": lambda n: n.bit_length(),
    "bit_count": lambda n: n.bit_count(),
    "to_bytes": lambda n: n.to_bytes(2, "big")[1],
    "and": lambda n: n & 3,
    "or": lambda n: n | 8,
    "xor": lambda n: n ^ 5,
    "shift_left": lambda n: n << 1,
    "shift_right": lambda n: n >> 1,
    "one_shifted": lambda n: 1 << n,
    "invert": operator.invert,
    "numerator": lambda n: n.numerator,
    "denominator": lambda n: n.denominator,
    "format_d": lambda n: len(f"{n:05d}"),
    "format_x": lambda n: len(f"{n:x}"),
    "bin": lambda n: len(bin(n)),
    "hex_of_int": lambda n: len(hex(n)),
    "chr": lambda n: ord(chr(n + 65)),
    "gcd": lambda n: math.gcd(n, 6),
    "lcm": lambda n: math.lcm(n, 4),
    "isqrt": math.isqrt,
    "comb": lambda n: math.comb(n, 2),
    "factorial": math.factorial,
    "fraction_of_two": lambda n: float(fractions.Fraction(n, 3)),
    "pow_modulo": lambda n: pow(n, 2, 5),
    "numpy_arange": lambda n: float(np.arange(n).sum()),
    "numpy_zeros": lambda n: np.zeros((n, 2)).size,
    "numpy_integer": lambda n: int(np.int64(n)),
    "islice": lambda n: len([*itertools.islice(itertools.count(), n)]),
    "enumerate": lambda n: [*enumerate([1, 2], start=n)][1][0],
    "struct_int": lambda n: struct.unpack("<q", struct.pack("<q", n))[0],
    "base": lambda n: int("11", n),
    "round_negative": lambda n: round(n, -1),
    "size_of_torch": lambda n: torch.Size([n, 2]).numel(),
    "arange": lambda n: torch.arange(n).sum().double(),
}
"""Of a size alone."""
