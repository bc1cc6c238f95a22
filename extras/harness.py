"""Models of this project in lm-evaluation-harness (pip install -r
requirements/harness.txt):

    python -m extras.harness out/NAME --tasks hellaswag lambada_openai
    python -m extras.harness out/NAME --tasks my_task.yaml --order random

The YAML file of a task can run code: use only files that you trust."""

import aogpt.runtime.environment  # noqa: F401  # says if packages are missing

# isort: split
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import Tensor
from tqdm import tqdm

import aogpt
from aogpt.data.tokenizers import END_OF_TEXT, notes_on_special
from aogpt.orders import OrderConfig, orders_at
from aogpt.runtime.command_line import RunOptions, run_script, show, with_help
from aogpt.runtime.devices import pick_dtype
from aogpt.runtime.errors import UserError
from aogpt.runtime.outputs import OutputOptions, Outputs
from aogpt.runtime.randomness import SCORED_ORDERS, philox_bits, to_uniform
from aogpt.runtime.validation import Count
from aogpt.sampling import modes
from aogpt.sampling.modes import DecodingOptions

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import (
        get_rolling_token_windows,
        make_disjoint_window,
        make_table,
    )
except ImportError:
    raise UserError(
        "this needs the package lm_eval: pip install -r requirements/harness.txt"
    ) from None

Order = Literal["l2r", "random"]
SETTINGS = ("until", "max_gen_toks", "do_sample", "temperature", "top_p")


class HarnessModel(TemplateLM):
    """A model for lm-evaluation-harness.

    The log-likelihood, in nats, of n tokens x given a context is

    order l2r               sum of log p(x_i | context, x_<i), exact
    order random, decoders  mean over M orders s of
                            sum of log p(x[s_i] | context, x[s_<i])
    order random, encoders  mean over M masks S of n / |S| times
                            sum over S of log p(x_i | context, x outside S)

    The last two estimate the any-order ELBO without bias: |S| is uniform on 1..n and
    stratified over the masks. "<|endoftext|>" in a text is one token, as in
    `TextModel.score`; an empty context is end-of-text; a context that is too long loses
    its beginning.

    Args:
        order: of log-likelihoods; by default l2r, and random of an encoder.
        num_orders: M.
        mode: of generation; by default l2r, and mdm of an encoder."""

    def __init__(
        self,
        text_model: aogpt.TextModel,
        order: Order | None = None,
        num_orders: int = 8,
        mode: str | None = None,
        seed: int = 0,
    ):
        super().__init__()
        self.model: Any = text_model.model
        self._device = text_model.device  # the harness reads `device`
        self.loaded = text_model.loaded
        self.tokenizer = text_model.tokenizer
        self.block_size = text_model.block_size
        self.is_encoder = self.model.config.is_encoder
        if self.loaded.record_end is not None:
            raise UserError(
                "this model was trained on records whose end is given (data.end), "
                "which the harness does not give it: `aogpt score` scores its texts"
            )
        self.order = order or ("random" if self.is_encoder else "l2r")
        self.mode = mode or ("mdm" if self.is_encoder else "l2r")
        if self.is_encoder and self.order == "l2r":
            raise UserError("an encoder has no left-to-right likelihood: order random")
        if self.model.config.l2r_only and (self.order, self.mode) != ("l2r", "l2r"):
            raise UserError("this model is a plain GPT: take order l2r and mode l2r")
        self.special: Counter[str] = Counter()  # the most in one text of a request
        self.num_orders = 1 if self.order == "l2r" else num_orders
        self.seed = seed

    @property
    def eot_token_id(self) -> int:
        """Return the id of end-of-text."""
        return self.tokenizer.eot

    def tok_encode(self, string: str, add_special_tokens=None, **kwargs) -> list[int]:
        """Return the tokens of a text, and count its special tokens that are read as
        ordinary text."""
        counts = self.tokenizer.count_special([string])
        counts.pop(END_OF_TEXT, None)  # which is a token here
        self.special |= counts
        return self.tokenizer.encode_documents(string).tolist()

    def _encode_pair(
        self, context: str, continuation: str
    ) -> tuple[list[int], list[int]]:
        """Return the tokens of both together, divided at the last boundary of tokens
        within the context, whose trailing spaces belong to the continuation."""
        tokens = self.tok_encode(context + continuation)
        # as the tokenizer writes it, which may compose letters
        context = self.tokenizer.decode(self.tok_encode(context.rstrip()))
        split = len(tokens)
        while not context.startswith(self.tokenizer.decode(tokens[:split])):
            split -= 1
        return tokens[:split], tokens[split:]

    def fitting(self, context: list[int], new: int) -> list[int]:
        """Return the end of a context that leaves room for new tokens in a block."""
        if context in ([], [self.eot_token_id]):
            # Pretrained models with a start token of their own read that.
            has_start = self.loaded.system and self.tokenizer.starts
            context = [] if has_start else [self.eot_token_id]
        if new + min(1, len(context)) > self.block_size:
            raise UserError(
                f"{new} tokens after a context do not fit in a block of "
                f"{self.block_size}: leave the task out"
            )
        return context[max(0, len(context) + new - self.block_size) :]

    def loglikelihood_rolling(
        self, requests, disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, in windows of a block."""
        totals = []
        for request in tqdm(requests, disable=disable_tqdm):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.block_size - 1,  # the context takes a place
                context_len=1,
            )
            total = 0.0
            for window in windows:
                log_prob, _ = self.score(*make_disjoint_window(window))
                total += log_prob
            totals.append(total)
        return totals

    def _loglikelihood_tokens(
        self, requests, disable_tqdm: bool = False, **kwargs
    ) -> list[tuple[float, bool]]:
        """Return the scores of each (anything, context, continuation), tokens."""
        scores = []
        for _, context, continuation in tqdm(requests, disable=disable_tqdm):
            scores.append(self.score(context, continuation))
        return scores

    @torch.no_grad()
    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, and whether every token of it
        was the most probable one in all orders.

        M orders, T tokens, D width, V vocabulary."""
        context = self.fitting(context, len(continuation))
        order, masked = self.orders(context, continuation)  # (M, T), (M,)
        tokens = torch.tensor(context + continuation, device=self.device)
        tokens = tokens.expand_as(order)
        targets = tokens.gather(1, order)
        if self.is_encoder:
            T = order.shape[1]
            last = torch.arange(T, device=self.device) >= T - masked[:, None]
            unknown = torch.zeros_like(last).scatter_(1, order, last)
            hidden = self.model.masked_hidden(tokens, unknown)  # (M, T, D), by position
            hidden = hidden.gather(1, order[..., None].expand_as(hidden))
        else:
            hidden = self.model.hidden(tokens, order)  # (M, T, D), by step
        log_probs = []
        is_greedy = True
        for states, target, count in zip(hidden, targets, masked.tolist(), strict=True):
            first = len(target) - count
            target = target[first:].cpu()
            logits = self.model.head_logits(states[first:]).cpu().double()  # (count, V)
            chosen = logits.log_softmax(dim=-1).gather(1, target[:, None])
            weight = len(continuation) / max(1, count)
            log_probs.append(weight * float(chosen.sum()))
            # Rows that pad the token table are no tokens.
            best = logits[:, : self.loaded.vocab_size].argmax(dim=-1)
            is_greedy &= torch.equal(best, target)
        return sum(log_probs) / len(log_probs), is_greedy

    def orders(
        self, context: list[int], continuation: list[int]
    ) -> tuple[Tensor, Tensor]:
        """Return orders (M, T) of a request that begin with its context, and how many
        of their last steps are scored, (M,): functions of seed and request alone."""
        c = len(context)
        n = len(continuation)
        M = self.num_orders
        order = torch.arange(c + n).repeat(M, 1)
        masked = torch.full((M,), n)
        if self.order == "random":
            key = zlib.crc32(str((context, continuation)).encode())
            config = OrderConfig("random")
            rows = range(M)
            order[:, c:] = c + orders_at(config, self.seed, key, rows, n, SCORED_ORDERS)
            # An order leaves the first of the n + 1 random numbers of its row unused.
            bits = philox_bits(self.seed, key, range(1), n + 1, SCORED_ORDERS)
            if self.is_encoder:
                share = (to_uniform(bits)[0, 0] + torch.arange(M).double() / M) % 1
                masked = (1 + (n * share).long()).clamp(max=n)
        return order.to(self.device), masked.to(self.device)

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """Return the text after each context, up to end-of-text or a stop string."""
        texts = []
        for number, request in enumerate(tqdm(requests, disable=disable_tqdm)):
            settings = normalize_gen_kwargs(
                request.args[1], default_max_gen_toks=min(256, self.block_size // 2)
            )
            unknown = settings.keys() - SETTINGS
            if unknown:
                names = ", ".join(sorted(unknown))
                raise UserError(
                    f"generation setting {names} is not supported: "
                    f"{', '.join(SETTINGS)} are"
                )
            new = settings["max_gen_toks"]
            context = self.fitting(self.tok_encode(request.args[0]), new)
            temperature = settings.get("temperature", 1.0)
            options = DecodingOptions(
                mode=self.mode,
                temperature=temperature if settings["do_sample"] else 0.0,
                top_p=settings.get("top_p", 1.0),
            )
            stops = [text for text in settings["until"] if text]
            planned = modes.plan_samples(
                options.plan, [context + [None] * new], self.seed + number
            )
            engine = options.engine(self.model, self.loaded.vocab_size)
            (sample,) = modes.generate_rows(engine, planned)
            answer = modes.text_until_end(self.tokenizer, sample[len(context) :])
            for stop in stops:
                answer = answer.partition(stop)[0]
            texts.append(answer)
        return texts


@dataclass(frozen=True, kw_only=True)
class Arguments(RunOptions, OutputOptions):
    tasks: tuple[str, ...]
    """Tasks, groups or tags of the harness by name, or YAML files of tasks."""
    include_path: Path | None = None
    """Folder with the YAML files of your own tasks."""
    order: Order | None = None
    """Order of log-likelihoods: l2r, or random, an estimate of the any-order ELBO of
    the continuation (the default of encoders)."""
    num_orders: Count = 8
    """random: orders, or an encoder's masks, of a request."""
    mode: str | None = None
    """How answers are generated; by default l2r, and mdm by encoders."""
    limit: Count | None = None
    """Use only the first rows of every task."""
    json: Path | None = None
    """Write the results to this file."""


def main() -> None:
    """Evaluate the tasks of the command line."""
    a = tyro.cli(
        with_help(Arguments), prog="python -m extras.harness", description=__doc__
    )
    outputs = Outputs({"--json": a.json}, [a.run, *a.tasks], a.overwrite)
    text_model = aogpt.load(
        a.run,
        weights=a.weights,
        device=a.device,
        block_size=a.block_size,
        checkpoint=a.checkpoint,
    )
    text_model.model.to(pick_dtype(a.dtype, text_model.device))
    model = HarnessModel(text_model, a.order, a.num_orders, a.mode, a.seed)
    results = lm_eval.simple_evaluate(
        model,
        tasks=list(a.tasks),
        task_manager=TaskManager(include_path=a.include_path),
        limit=a.limit,
    )
    with outputs:
        outputs.write_json(
            a.json, {"results": results["results"], "order": model.order}
        )
        show(f"{model.loaded.description}, log-likelihoods: {model.order}")
        show(make_table(results))
        for note in notes_on_special(model.special):
            show(f"note: in a request, {note}")


if __name__ == "__main__":
    run_script(main)
