"""Training on batches of random lengths: eager DistributedDataParallel, torch.compile(dynamic=True), and one graph.

    python -m benchmarks.wrapped_loops.moving_sizes                           # 2 ranks on the CPU, a small GPT
    python -m benchmarks.wrapped_loops.moving_sizes --workload W1             # GPUs, a reference training
    python -m benchmarks.wrapped_loops.moving_sizes --model bert              # of Hugging Face, with padded rows
    python -m benchmarks.wrapped_loops.moving_sizes --lengths 8               # batches that users sort by length
    python -m benchmarks.wrapped_loops.moving_sizes --passes 2                # behind thousands of steps
    python -m benchmarks.wrapped_loops.moving_sizes --ways eager graph inductor --json

Each rank draws lengths of its own, from an eighth of the workload's length to all of it. All ways take the same batches
by turns in one run. `first` is the wall time of the first batches, all compilation included; `ms` is the median of the
batches after them, whose wall time ends when the device is idle, and `mean` their mean. `constant` are as many tokens
in batches of one length, as compiled for that alone; `padded` has each batch made longer, up to a multiple of 64
(`ws.compile(pad=)`), for the GPT alone, whose loss stays the same. Losses are compared with those of the eager loop.

On a GPU a length has a CUDA graph from its second batch on. With `--passes 2` our ways take two batches of every length
before those that are measured, as a training of thousands of steps has.

A library that prepares itself for each new length (cuDNN's attention) does so for whoever comes first. So the forward
and backward of eager code see all lengths before, and no way pays for that.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

import wholestep as ws
from benchmarks.wrapped_loops.measure import SIZES, make_step, timed
from wholestep.cli.workloads.reference_lm import LanguageModelSize, build

MEASURED = 60
WAYS = ("eager", "torch.compile", "graph", "inductor", "padded", "constant")
BACKENDS = {"graph": "eager", "inductor": "inductor", "padded": "inductor", "constant": "inductor"}
"""Of our ways: the eager kernels in one graph, compiled segments, and those of one length alone."""
MULTIPLE = 64
PADS = {"x": ws.Pad(dim=1, multiple=MULTIPLE), "y": ws.Pad(dim=1, multiple=MULTIPLE, value=-100)}
"""Of `padded`: no loss is taken past the end of a row, and no token before sees what comes later."""


def possible_lengths(size: LanguageModelSize, num_lengths: int) -> range:
    """So many lengths, the same way apart; with 0 all from an eighth of the workload's length on."""
    step = size.length // num_lengths if num_lengths else 1
    return range(step if num_lengths else size.length // 8, size.length + 1, step)


def batches(
    size: LanguageModelSize, device: torch.device, rank: int, count: int, num_lengths: int = 0
) -> list[tuple[Tensor, Tensor]]:
    """Tokens and the tokens after them, of another length in each; `num_lengths`: of so many lengths, 0 for any."""
    draw, numbers = random.Random(rank + 1), torch.Generator().manual_seed(rank + 1)
    lengths, made = possible_lengths(size, num_lengths), []
    for _ in range(count):
        length = draw.choice(lengths)
        tokens = torch.randint(1, size.vocabulary, (size.rows, length + 1), generator=numbers).to(device)
        made.append((tokens[:, :-1], tokens[:, 1:]))
    return made


class Bert(nn.Module):
    """One of Hugging Face that learns to say the next token, where the last quarter of every second row is padding."""

    def __init__(self, size: LanguageModelSize) -> None:
        super().__init__()

        config = BertConfig(
            vocab_size=size.vocabulary, hidden_size=size.width, num_hidden_layers=size.num_layers,
            num_attention_heads=size.num_heads, intermediate_size=4 * size.width,
            max_position_embeddings=2 * size.length, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )  # fmt: skip
        self.model = BertForMaskedLM(config)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Both [rows, length]."""
        words = torch.full((x.shape[0], 1), x.shape[1], device=x.device)
        words[::2] = x.shape[1] * 3 // 4
        mask = torch.arange(x.shape[1], device=x.device)[None] < words
        loss: Tensor = self.model(input_ids=x, attention_mask=mask, labels=y.masked_fill(~mask, -100)).loss
        return loss


MODELS: dict[str, Callable[[LanguageModelSize, torch.device], nn.Module]] = {
    "gpt": build,
    "bert": lambda size, device: Bert(size).to(device),
}


def contender(way: str, model_name: str, size: LanguageModelSize, device: torch.device) -> Callable[..., Tensor]:
    """The step of one way. All begin with the same parameters."""
    torch.manual_seed(0)
    plain = MODELS[model_name](size, device)
    model: Any = DistributedDataParallel(plain, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device.type == "cuda")
    if way == "torch.compile":
        model = torch.compile(model, dynamic=True)
    step = make_step(model, optimizer, casts=device.type == "cuda")
    if way not in BACKENDS:
        return step
    backend: Any = BACKENDS[way]
    pads = PADS if way == "padded" else None
    return ws.compile(step, backend=backend, fullgraph=True, dynamic=way != "constant", pad=pads)


def meet(model_name: str, size: LanguageModelSize, data: Sequence[tuple[Tensor, Tensor]], device: torch.device) -> None:
    """Has libraries prepare themselves for the lengths of all batches."""
    model = MODELS[model_name](size, device)
    for batch in data:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(*batch)
        loss.backward()


def measure(
    workload: str, model_name: str, ways: Sequence[str], first: int, lengths: tuple[int, int]
) -> dict[str, dict[str, float]]:
    """Of each way: seconds of the first batches, ms of the others, difference of a loss from eager code. `lengths`: of
    how many batches are, 0 for any, and how often our ways take each before those that are measured."""
    world, size = ws.init(), SIZES[workload]
    num_lengths, passes = lengths
    data = batches(size, world.device, world.rank, first + MEASURED, num_lengths)
    meet(model_name, size, data, world.device)
    middle = 16 * math.ceil(statistics.mean(x.shape[1] for x, _ in data[first:]) / 16)
    steps = {way: contender(way, model_name, size, world.device) for way in ways}
    times: dict[str, list[float]] = {way: [] for way in ways}
    losses: dict[str, list[Tensor]] = {way: [] for way in ways}
    for number, batch in enumerate(data):
        if number == first:
            take_all_lengths(
                [steps[way] for way in ways if way in BACKENDS and way != "constant"], size, world.device, lengths
            )
        for way in ways if number % 2 else reversed(ways):
            ms, loss = timed(steps[way], of_length(batch, middle) if way == "constant" else batch)
            times[way].append(ms)
            losses[way].append(loss)
    # Where all lengths are taken first, ours have trained on more.
    compared = slice(0, first if passes else None)
    eager = torch.stack(losses["eager"][compared])
    return {
        way: {
            "first_s": sum(times[way][:first]) / 1e3,
            "ms": statistics.median(times[way][first:]),
            "mean_ms": statistics.mean(times[way][first:]),
            "difference": (
                float((torch.stack(losses[way][compared]) - eager).abs().max()) if way != "constant" else float("nan")
            ),
            "traces": steps[way].cache_info().traces if way in BACKENDS else float("nan"),  # type: ignore[attr-defined]
        }
        for way in ways
    }


def of_length(batch: tuple[Tensor, Tensor], length: int) -> tuple[Tensor, Tensor]:
    """The batch, cut or padded to a length."""
    own = (one[:, :length] for one in batch)
    x, y = (nn.functional.pad(one, (0, length - one.shape[1])) for one in own)
    return x.clone(memory_format=torch.contiguous_format), y.clone(memory_format=torch.contiguous_format)


def take_all_lengths(
    steps: Sequence[Callable[..., Tensor]],
    size: LanguageModelSize,
    device: torch.device,
    lengths: tuple[int, int],
) -> None:
    """Has steps take batches of each length, as often as `lengths` says behind the number of lengths."""
    num_lengths, passes = lengths
    numbers = torch.Generator().manual_seed(0)
    for _ in range(passes):
        for length in possible_lengths(size, num_lengths):
            tokens = torch.randint(1, size.vocabulary, (size.rows, length + 1), generator=numbers).to(device)
            for step in steps:
                step(tokens[:, :-1], tokens[:, 1:])


def main() -> None:
    """Prints a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=sorted(SIZES), default="small")
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--first", type=int, default=20, help="batches that count as the first ones")
    parser.add_argument("--lengths", type=int, default=0, help="draw from so many lengths; 0: from all")
    parser.add_argument("--passes", type=int, default=0, help="batches of each length before those that are measured")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=("eager", "graph", "inductor"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.first < 1:
        parser.error("--first counts from 1: the losses of these batches are compared with eager code's")
    ways = ("eager", *(way for way in options.ways if way != "eager"))
    lengths = (options.lengths, options.passes)
    run = functools.partial(measure, options.workload, options.model, ways, options.first, lengths)
    found = ws.run(run, options.nproc)[0]
    if options.json:
        print(json.dumps(found))
        return
    table = Table(
        "way", "ms", "mean", "eager / this", f"first {options.first}, s", "traces", "largest difference of a loss"
    )
    for way, row in found.items():
        texts = [
            f"{row['ms']:.2f}",
            f"{row['mean_ms']:.2f}",
            f"{found['eager']['ms'] / row['ms']:.2f}",
            f"{row['first_s']:.1f}",
        ]
        table.add_row(way, *texts, f"{row['traces']:.0f}", f"{row['difference']:.1e}")
    Console().print(table)


if __name__ == "__main__":
    main()
