"""The judge of generated text: a decoder that scores its tokens left to right, in
float32.

Every decoder that `load` reads can judge, but one of records whose end is given; GPT-2
Large is the field's. Samples of another tokenizer reach it as text. Without a start
token (GPT-2) it scores all tokens but the first. Samples longer than its context are
cut into windows, each scored like a sample."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..checkpoints import load
from ..runtime.errors import UserError
from ..scoring import check_finite, token_log_probs
from ..systems import parameter_counts

# Elements in a batch: 1 GiB in float32, some 5 windows of 1024 tokens of GPT-2.
MAX_LOGITS = 2**28


class Judge:
    """A decoder that scores text. name: as `load` takes it. Raises UserError for an
    encoder and for a model of records whose end is given, which reads that first."""

    def __init__(self, name: str, device: torch.device):
        self.loaded = load(name, "ema", device)
        config = self.loaded.model.config
        if config.is_encoder:
            raise UserError(f"--judge {name} is an encoder; give a left-to-right model")
        if self.loaded.record_end is not None:
            raise UserError(
                f"--judge {name} was trained on records whose end is given (data.end): "
                "`aogpt score` scores records"
            )
        self.name = name
        self.device = device
        self.model = self.loaded.model.to(device, torch.float32)
        self.tokenizer = self.loaded.get_tokenizer()
        self.vocab_size = config.vocab_size  # rows of its token table
        self.context = config.block_size
        self.start = self.loaded.scored_from == 0  # whether it has a start token

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, in which "<|endoftext|>" ends a document."""
        return self.tokenizer.encode_documents(text).tolist()

    def nll(self, tokens: Tensor) -> Tensor:
        """Return -log p of each of the tokens (B, T) given those before it, nats,
        (B, T). Without a start token the first column means nothing."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        left_to_right = steps.expand_as(tokens)
        return -token_log_probs(self.model, tokens, left_to_right)

    def score(
        self, samples: Sequence[Sequence[int]], batch_size: int, quiet: bool = True
    ) -> list[tuple[float, int]]:
        """Return for each sample, in the judge's ids, the sum of -log p over its scored
        tokens, in nats, and their number.

        batch_size: windows in one pass, at most; quiet: no progress bar."""
        windows = []
        for number, ids in enumerate(samples):
            for start in range(0, len(ids), self.context):
                windows.append((number, ids[start : start + self.context]))
        # Long windows first: little padding, and memory runs out at once or never.
        windows.sort(key=lambda window: -len(window[1]))
        longest = len(windows[0][1]) if windows else 1
        most_rows = max(1, MAX_LOGITS // (self.vocab_size * longest))
        size = min(batch_size, most_rows)
        first = 0 if self.start else 1
        totals = [0.0] * len(samples)
        counts = [0] * len(samples)
        starts = range(0, len(windows), size)
        for start in tqdm(starts, desc="judge", disable=quiet or None, leave=False):
            batch = windows[start : start + size]
            rows = [torch.tensor(ids) for _, ids in batch]
            tokens = pad_sequence(rows, batch_first=True)
            nll = self.nll(tokens.to(self.device)).double().cpu()
            for (sample, ids), row in zip(batch, nll, strict=True):
                scored = row[first : len(ids)]
                check_finite(scored, f"the judge {self.name}")
                totals[sample] += float(scored.sum())
                counts[sample] += max(0, len(ids) - first)
        return list(zip(totals, counts, strict=True))

    def describe(self) -> dict:
        """Return the properties of the judge on which a reported number depends."""
        scored = "every token"
        if not self.start:
            scored = "all tokens but the first (no start token)"
        return {
            "name": self.name,
            "source": self.loaded.description,
            "tokenizer": self.loaded.tokenizer,
            "parameters": sum(parameter_counts(self.model).values()),
            "context": self.context,
            "dtype": "float32",
            "start_token": self.start,
            "scored": scored,
        }
