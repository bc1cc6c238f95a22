"""Which Triton kernels and CUDA graphs a GPU may use: those that agree with tensor code
here.

The check takes about a second, once in a process for each kind of model. What does not
agree, or fails, is left out, and a line on stderr says so."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor

from ..model import AOGPT
from ..runtime import devices
from ..runtime.command_line import show, visible
from .cached import KVCache, Step, cached_hidden
from .compiled import GraphRunner, Stage
from .token_choice import TokenChoice, choose_tokens

ROWS = 64  # tokens drawn by the check
WRONG_DRAWS = 1  # of them, that rounding may change
# The largest difference of hidden states, relative to their norm.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1, torch.float16: 0.05}


@dataclass(frozen=True)
class Kernels:
    """The code that takes the place of tensor code on a GPU; None: nothing does."""

    choice: ModuleType | None  # `aogpt.sampling.kernels`
    attention: ModuleType | None  # `aogpt.sampling.attention_kernel`
    graphs: bool  # whether steps are recorded as CUDA graphs


CHECKED: dict[tuple, Kernels | None] = {}


def load_kernels(model: AOGPT, vocab_size: int | None = None) -> Kernels | None:
    """Return the kernels that agree with tensor code for this model, or None, as
    without a GPU."""
    weight = model.wte.weight
    if not devices.can_run_triton(weight.device):
        return None
    key = model.config, weight.device, weight.dtype, vocab_size
    if key not in CHECKED:
        # Triton's kernels run on the current GPU.
        with torch.accelerator.device_index(weight.device.index), torch.no_grad():
            CHECKED[key] = check_kernels(model, vocab_size)
    return CHECKED[key]


def check_kernels(model: AOGPT, vocab_size: int | None) -> Kernels | None:
    """Return the kernels that agree with tensor code for this model; None if the choice
    of tokens does not."""
    from . import attention_kernel, kernels  # which import Triton

    config = model.config
    weight = model.wte.weight
    vocabulary = vocab_size or config.vocab_size
    if not agrees(
        "token choice", lambda: wrong_draws(kernels, vocabulary, weight.device)
    ):
        return None
    attention = None
    # What queries of their own see is in masks.
    attends = not config.is_encoder and not model.separate_queries
    if attends and attention_kernel.can_attend(config.head_dim, weight.dtype):
        if agrees("attention", lambda: attention_error(attention_kernel, model)):
            attention = attention_kernel
    graphs = agrees("CUDA graphs", lambda: graph_error(weight.device))
    return Kernels(
        choice=kernels,
        attention=attention,
        graphs=graphs,
    )


def agrees(name: str, check: Callable[[], str]) -> bool:
    """Return whether a check finds no difference; if it does, or fails, say so on
    stderr."""
    try:
        difference = check()
    except Exception as error:  # of Triton, its compiler or the driver: of any type
        if devices.out_of_memory(error):
            raise
        difference = f"{type(error).__name__}: {error}"
    if difference:
        reason = visible(difference, one_line=True)[:200]
        show(
            f"{name}: going on without the faster code, which does not agree here "
            f"({reason})",
            file=sys.stderr,
            flush=True,
        )
    return not difference


def wrong_draws(
    kernels: ModuleType,
    vocabulary: int,
    device: torch.device,
) -> str:
    """Return what is wrong with the tokens that the kernel draws; "": nothing."""
    choice = TokenChoice(
        temperature=0.9,
        top_k=min(50, vocabulary),
        top_p=0.95,
    )
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(ROWS, vocabulary, generator=generator)
    uniforms = torch.rand(
        ROWS,
        generator=generator,
        dtype=torch.float64,
    )
    logits = logits.to(device)
    uniforms = uniforms.to(device)
    tokens, _ = kernels.choose(logits, uniforms, choice)
    wrong = int((tokens != choose_tokens(logits, uniforms, choice)).sum())
    if wrong <= WRONG_DRAWS:
        return ""
    return f"{wrong} of {ROWS} tokens differ"


def attention_error(kernel: ModuleType, model: AOGPT) -> str:
    """Return what is wrong with hidden states of the model if its attention is the
    kernel; "": nothing. Two passes: over a context, and over what follows it, with a
    cache."""
    length = min(model.config.block_size, 64)
    known = length // 2
    hidden = []
    for chosen in (None, kernel):
        hidden.append(
            two_passes(
                model,
                length,
                known,
                chosen,
            )
        )
    difference = hidden[1].float() - hidden[0].float()
    error = float(difference.norm() / hidden[0].float().norm())
    limit = TOLERANCE[model.wte.weight.dtype]
    if error <= limit:
        return ""
    return f"hidden states differ by {error:.2g} of their norm"


def two_passes(
    model: AOGPT,
    length: int,
    known: int,
    kernel: ModuleType | None,
) -> Tensor:
    """Return the hidden states of `known` tokens in a random order and of all positions
    after them, for two rows, of which the second is one token shorter."""
    weight = model.wte.weight
    device = weight.device
    generator = torch.Generator().manual_seed(0)
    orders = [torch.randperm(length, generator=generator) for _ in range(2)]
    order = torch.stack(orders).to(device)
    tokens = torch.randint(model.config.vocab_size, (2, length), generator=generator)
    tokens = tokens.to(device)
    cache = KVCache(
        model.config,
        2,
        length,
        device,
        weight.dtype,
    )
    hidden = []
    for cached, count in ((0, known), (known, length - known)):
        rows = [[cached] * 2, [known] * 2, [count, count - 1], [0, 0], [0, 0]]
        step = Step(
            rows=torch.tensor(rows, device=device),
            inputs=2 * count - 1,
            width=count,
            end=length,
            active=2,
            all_candidates=0,
            all_size=0,
        )
        states = cached_hidden(
            model,
            tokens,
            order,
            step,
            cache,
            kernel=kernel,
        )
        hidden.append(states)
    return torch.cat(hidden)


def graph_error(device: torch.device) -> str:
    """Return what is wrong with a small CUDA graph; "": nothing."""

    def twice(engine: None, step: Step) -> Tensor:
        return 2 * step.rows + 1

    stage = Stage(twice, size=lambda step: step.inputs)
    runner = GraphRunner(
        torch.zeros(
            5,
            1,
            dtype=torch.long,
            device=device,
        )
    )
    runner.record(None, stage, 8)
    rows = torch.arange(5, device=device)[:, None]
    step = Step(
        rows,
        inputs=1,
        width=0,
        end=0,
        active=1,
        all_candidates=0,
        all_size=0,
    )
    if torch.equal(runner(None, stage, step), 2 * rows + 1):
        return ""
    return "a graph returned other numbers than its code"
