"""Architectures of Hugging Face, compiled against eager, some 360 of them; an hour on one core.

    python benchmarks/library_architectures.py > architectures.md
    python benchmarks/library_architectures.py --task ctc --only wav2vec
    python benchmarks/library_architectures.py --task causal --backend inductor --rtol 1e-4 > /dev/null

Each is what `transformers` makes of its own configuration with all sizes made small, trained for four steps with AdamW
and clipping, dropout as configured, once eagerly and once compiled, from the same start. Losses, parameters and buffers
are compared at the end. Every architecture has a process of its own, which gets no longer than `--seconds`.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import logging
import os
import select
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import wholestep as ws

STEPS, ROWS, LENGTH, WORDS = 4, 2, 16, 160
MOST_PARAMETERS = 60_000_000
MAX_REASON = 170
"""Characters of a reason that a line shows."""

SMALL: dict[tuple[str, ...], int] = {
    ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "hidden_dim", "emb_dim", "embedding_size", "width"): 64,
    ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim", "mlp_dim"): 96,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "ffn_hidden_size", "intermediate_dim"): 96,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"): 2,
    ("num_decoder_layers", "num_encoder_layers", "num_hidden_groups"): 2,
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"): 4,
    ("num_key_value_heads", "n_kv_heads", "num_kv_heads", "num_experts_per_tok", "moe_k", "moe_topk"): 2,
    ("head_dim", "d_kv", "d_head", "attention_head_dim", "q_lora_rank", "kv_lora_rank", "state_size"): 16,
    ("qk_nope_head_dim", "v_head_dim", "mamba_d_state", "ssm_state_size"): 16,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"): 4,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length"): 128,
    ("n_group", "topk_group", "n_shared_experts"): 1,
    ("vocab_size",): WORDS, ("image_size",): 32, ("patch_size", "qk_rope_head_dim"): 8, ("num_labels",): 3,
    ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"): 0,
}  # fmt: skip
"""Names that configurations have for their sizes -> the largest that is left. A layer that is skipped by chance is
refused, with what to set."""

TASKS = {
    "causal": "CAUSAL_LM", "masked": "MASKED_LM", "seq2seq": "SEQ_TO_SEQ_CAUSAL_LM", "image": "IMAGE_CLASSIFICATION",
    "segmentation": "SEMANTIC_SEGMENTATION", "ctc": "CTC", "audio": "AUDIO_CLASSIFICATION",
    "masked_image": "MASKED_IMAGE_MODELING",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one architecture: ``equal``, ``different``, ``refused``, ``eager`` (it does not run eagerly in this
    way), ``unbuilt`` (it cannot be made so small) or ``late``."""

    task: str
    name: str
    kind: str
    why: str = ""


def shrink(config: Any, depth: int = 0) -> None:
    """Makes all sizes of a configuration small, in place, with those of its parts."""
    import transformers

    for names, value in SMALL.items():
        for name in names:
            held = getattr(config, name, None)
            if isinstance(held, (int, float)) and not isinstance(held, bool) and held > value:
                setattr(config, name, value)
    kinds, count = getattr(config, "layer_types", None), getattr(config, "num_hidden_layers", None)
    if isinstance(kinds, list) and isinstance(count, int) and len(kinds) > count:
        config.layer_types = (list(dict.fromkeys(kinds)) * count)[:count]
    for name in ("pad", "bos", "eos", "decoder_start", "mask", "sep", "cls"):
        if isinstance(held := getattr(config, f"{name}_token_id", None), int) and held >= WORDS:
            setattr(config, f"{name}_token_id", 1)
    for part in list(vars(config).values()):
        if isinstance(part, transformers.PretrainedConfig) and depth < 3:
            shrink(part, depth + 1)


def batch(task: str, config: Any, model: nn.Module, seed: int) -> dict[str, Tensor]:
    """Arguments of the model for one step of a task."""
    chance = torch.Generator().manual_seed(seed)
    size = getattr(config, "image_size", None) or 32
    size = size if isinstance(size, int) else size[0]
    labels = torch.randint(0, 2, (ROWS,), generator=chance)
    words = torch.randint(5, WORDS - 10, (ROWS, LENGTH), generator=chance)
    images = {"pixel_values": torch.randn(ROWS, getattr(config, "num_channels", 3), size, size, generator=chance)}
    if task in ("causal", "masked"):
        return {"input_ids": words, "labels": words.clone()}
    if task == "seq2seq":
        return {"input_ids": words, "labels": words[:, :8].clone()}
    if task == "image":
        return images | {"labels": labels}
    if task == "segmentation":
        return images | {"labels": torch.randint(0, 2, (ROWS, size, size), generator=chance)}
    if task == "masked_image":
        return images | {"bool_masked_pos": torch.rand(ROWS, (size // config.patch_size) ** 2, generator=chance) < 0.4}
    targets = torch.randint(1, 20, (ROWS, 3), generator=chance) if task == "ctc" else labels
    if "input_features" in inspect.signature(model.forward).parameters:
        width = getattr(config, "feature_projection_input_dim", None) or 80
        return {"input_features": torch.randn(ROWS, 64, width, generator=chance), "labels": targets}
    return {"input_values": torch.randn(ROWS, 8000, generator=chance), "labels": targets}


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., Tensor]:
    """The user's step."""

    def step(**arguments: Tensor) -> Tensor:
        found = model(**arguments)
        loss = found.loss if getattr(found, "loss", None) is not None else found[0].float().square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def trained(model: nn.Module, batches: list[dict[str, Tensor]], backend: Any) -> list[Tensor]:
    """Losses, parameters and buffers after all steps of a copy of the model; a backend of None is eager code."""
    twin = copy.deepcopy(model).train()
    step = step_of(twin, torch.optim.AdamW(twin.parameters(), 1e-3))
    run = step if backend is None else ws.compile(step, backend=backend, fullgraph=True)
    losses = []
    for number, arguments in enumerate(batches):
        torch.manual_seed(number)
        losses.append(run(**arguments).clone())
    return [*losses, *(one.detach() for one in (*twin.parameters(), *twin.buffers()))]


def outcome(task: str, name: str, backend: Any, rtol: float) -> Outcome:
    """Trains twice and compares."""
    from transformers import AutoConfig
    from transformers.models.auto import modeling_auto

    try:
        config = AutoConfig.for_model(name)
        shrink(config)
        kind = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING")[type(config)]
        torch.manual_seed(0)
        model = (kind[0] if isinstance(kind, tuple) else kind)(config)
        batches = [batch(task, config, model, seed % 3) for seed in range(STEPS)]
    except Exception as error:
        return Outcome(task, name, "unbuilt", short(error))
    if sum(one.numel() for one in model.parameters()) > MOST_PARAMETERS:
        return Outcome(task, name, "unbuilt", "too many parameters")
    try:
        wanted = trained(model, batches, None)
    except Exception as error:
        return Outcome(task, name, "eager", short(error))
    try:
        came = trained(model, batches, backend)
    except Exception as error:
        return Outcome(task, name, "refused", short(error))
    same = all(torch.allclose(a, b, rtol=rtol, atol=rtol, equal_nan=True) for a, b in zip(came, wanted, strict=True))
    return Outcome(
        task, name, "equal" if same else "different", f"losses {wanted[:STEPS]}, {came[:STEPS]}"[:MAX_REASON]
    )


def short(error: Exception) -> str:
    """One line that says what went wrong where."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if not line.startswith(("The step is ", "the value of a tensor decides"))]
    where = told[0].rpartition("site-packages/")[2] if told else ""
    return " / ".join([where, *told[1:]])[:MAX_REASON].replace("|", "/") or type(error).__name__


def apart(work: Callable[[], Outcome], otherwise: Outcome, seconds: int) -> Outcome:
    """What `work` gives in a process of its own; `otherwise` if it ends or takes longer."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reads)
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            text = json.dumps(asdict(work()))
            with os.fdopen(writes, "w") as pipe:
                pipe.write(text)
        finally:
            os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        ready, _, _ = select.select([pipe], [], [], seconds)
        if not ready:
            os.kill(child, signal.SIGKILL)
        text = pipe.read()
    os.waitpid(child, 0)
    return Outcome(**json.loads(text)) if text else otherwise


def offered(task: str) -> list[str]:
    """The architectures that `transformers` has for a task."""
    from transformers.models.auto import modeling_auto

    return list(getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING")._model_mapping)


def page(task: str, outcomes: list[Outcome]) -> Iterator[str]:
    """The section of one task."""
    count = Counter(one.kind for one in outcomes)
    yield f"\n## {task}\n"
    told = {"equal": "Equal", "different": "DIFFERENT", "late": "Not done in time"}
    for kind, text in told.items():
        if count[kind]:
            yield f"{text} ({count[kind]}): {', '.join(one.name for one in outcomes if one.kind == kind)}.\n"
    if count["refused"]:
        yield f"Refused ({count['refused']}):\n"
        yield from (f"- {one.name}: `{one.why}`" for one in outcomes if one.kind == "refused")
        yield ""
    yield f"Not tried: {count['unbuilt']} that cannot be made so small, {count['eager']} that do not run eagerly so."


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=TASKS, help="what the models are trained for")
    parser.add_argument("--only", default="", help="names that hold this text")
    parser.add_argument("--backend", default="eager", help="eager (default) or inductor")
    parser.add_argument("--rtol", type=float, default=0.0, help="how far numbers may part (default: not at all)")
    parser.add_argument("--seconds", type=int, default=150, help="for each architecture (default: 150)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("wholestep").setLevel(logging.ERROR)
    os.environ |= {"HF_HUB_OFFLINE": "1", "WHOLESTEP_CACHE": "0"}
    torch.set_num_threads(1)  # and so that children may be forked
    print(HEAD.format(torch=torch.__version__.partition("+")[0], transformers=version("transformers"), **vars(options)))
    wrong = []
    for task in options.task:
        names = [name for name in offered(task) if options.only in name]
        found = [
            apart(
                lambda name=name, task=task: outcome(task, name, options.backend, options.rtol),  # type: ignore[misc]
                Outcome(task, name, "late"),
                options.seconds,
            )
            for name in track(names, task, console=Console(stderr=True), transient=True)
        ]
        print("\n".join(page(task, found)), flush=True)
        wrong += [f"{task} {one.name}" for one in found if one.kind == "different"]
    if wrong:
        sys.exit(f"other numbers than eager code's: {', '.join(wrong)}")


HEAD = """# Architectures of Hugging Face: compiled against eager

torch {torch}, transformers {transformers}, CPU, backend `{backend}`: four steps of a small model of each configuration,
with dropout as configured. Losses, parameters and buffers are compared; they may part by {rtol}. What is refused raises
an error and leaves everything as it was; its reason is mostly the line that asks for the value of a tensor."""


if __name__ == "__main__":
    main()
