"""Judges of generated text: language models that score its tokens left to right, in
float32.

A judge is one of `transformers` (GPT-2 Large is the field's) or a decoder of this
project. Samples of another tokenizer reach it as text. Without a start token (GPT-2) it
scores all tokens but the first. Samples longer than its context are cut into windows,
each scored like a sample."""

import abc
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..checkpoints import load
from ..data.tokenizers import END_OF_TEXT, get_tokenizer
from ..runtime.errors import UserError
from ..runtime.validation import expand_home, read_json
from ..scoring import token_log_probs
from ..systems import parameter_counts

# Elements in a batch: 1 GiB in float32, some 5 windows of 1024 tokens of GPT-2.
MAX_LOGITS = 2**28


class Judge(abc.ABC):
    """The base of all judges: a language model that scores text."""

    name: str  # as the user gave it
    source: str  # where its weights are
    tokenizer: str
    vocab_size: int  # rows of its token table
    context: int | None  # tokens of a window; None: no limit
    start: bool  # whether it has a start token
    parameters: int
    device: torch.device
    libraries: dict[str, str] = {}  # versions, besides the project's own

    @abc.abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the judge's ids of a text, in which "<|endoftext|>" ends a
        document."""

    @abc.abstractmethod
    def has_ids_of(self, tokenizer: str) -> bool:
        """Return whether the judge has the same ids as this tokenizer."""

    @abc.abstractmethod
    def nll(self, tokens: Tensor) -> Tensor:
        """Return -log p of each of the tokens (B, T) given those before it, nats,
        (B, T). Without a start token the first column means nothing."""

    def score(
        self, samples: Sequence[Sequence[int]], batch_size: int, quiet: bool = True
    ) -> list[tuple[float, int]]:
        """Return for each sample, in the judge's ids, the sum of -log p over its scored
        tokens, in nats, and their number.

        batch_size: windows in one pass, at most; quiet: no progress bar."""
        longest_sample = max((len(ids) for ids in samples), default=0)
        width = self.context or longest_sample or 1
        windows = []
        for number, ids in enumerate(samples):
            for start in range(0, len(ids), width):
                windows.append((number, ids[start : start + width]))
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
                total = float(row[first : len(ids)].sum())
                if math.isnan(total):
                    raise UserError(
                        f"the judge {self.name} gives a token no probability (NaN): "
                        "its weights overflowed or hold NaN"
                    )
                totals[sample] += total
                counts[sample] += max(0, len(ids) - first)
        return list(zip(totals, counts, strict=True))

    def describe(self) -> dict:
        """Return the properties of the judge on which a reported number depends."""
        scored = "every token"
        if not self.start:
            scored = "all tokens but the first (no start token)"
        return {
            "name": self.name,
            "source": self.source,
            "tokenizer": self.tokenizer,
            "parameters": self.parameters,
            "context": self.context,
            "dtype": "float32",
            "start_token": self.start,
            "scored": scored,
        }


def load_judge(name: str, device: torch.device) -> Judge:
    """Return the judge of that name: a run folder, checkpoint, export or released
    weights, as `load` takes them; a folder with a causal language model of
    transformers; else a Hugging Face id."""
    path = expand_home(name)
    if not path.exists():
        return TransformersJudge(name, device)
    settings: dict[str, Any] = {}
    if (path / "config.json").is_file():
        settings = read_json(path / "config.json", dict[str, Any], "get it again")
    if settings.get("model_type", "aogpt") != "aogpt":
        return TransformersJudge(str(path), device)
    return DecoderJudge(str(path), device)


class DecoderJudge(Judge):
    """A decoder of this project."""

    def __init__(self, name: str, device: torch.device):
        loaded = load(name, "ema", device)
        config = loaded.model.config
        if config.is_encoder:
            raise UserError(f"--judge {name} is an encoder; give a left-to-right model")
        self.name = name
        self.source = loaded.description
        self.device = device
        self.model = loaded.model.to(device, torch.float32)
        self.tokenizer = loaded.tokenizer
        self.vocab_size = config.vocab_size
        self._tokenizer = loaded.get_tokenizer()
        self.context = config.block_size
        self.start = loaded.scored_from == 0
        self.parameters = sum(parameter_counts(loaded.model).values())

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, in which "<|endoftext|>" ends a document."""
        return self._tokenizer.encode_documents(text).tolist()

    def has_ids_of(self, tokenizer: str) -> bool:
        """Return whether the judge has the same ids as this tokenizer."""
        return tokenizer == self.tokenizer

    def nll(self, tokens: Tensor) -> Tensor:
        """Return -log p of each of the tokens (B, T), nats, (B, T)."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        left_to_right = steps.expand_as(tokens)
        return -token_log_probs(self.model, tokens, left_to_right)


class TransformersJudge(Judge):
    """A causal language model of transformers, read as safetensors, without code of its
    own."""

    def __init__(self, name: str, device: torch.device):
        try:
            import transformers

            transformers.logging.set_verbosity_error()
            transformers.logging.disable_progress_bar()
            # The small file first: it shows what is wrong before anything large is
            # fetched.
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(name)
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                name,
                use_safetensors=True,
                output_loading_info=True,
                dtype=torch.float32,
            )
        # Packages, network, ids, access and files fail with many kinds of errors, all
        # the user's.
        except Exception as error:
            reason = " ".join(str(error).split())[:300].rstrip(".")
            raise UserError(
                f"--judge {name} could not be loaded: {type(error).__name__}: "
                f"{reason}. Give a run of this project; or, with pip install "
                "transformers, a causal language model's folder or Hugging Face id "
                "(needs the network once)"
            ) from error
        self.vocab_size = model.get_input_embeddings().weight.shape[0]
        missing = sorted(info["missing_keys"])
        if missing:
            raise UserError(
                f"--judge {name}: {len(missing)} weights are missing, e.g. {missing[0]}"
            )
        # Without files transformers makes an empty tokenizer.
        is_empty = not self._tokenizer("The cat.").input_ids
        if is_empty or len(self._tokenizer) > self.vocab_size:
            raise UserError(
                f"--judge {name}: its tokenizer is missing or has more than "
                f"{self.vocab_size} tokens"
            )
        self.name = name
        self.device = device
        self.model = model.to(device).eval()
        commit = getattr(model.config, "_commit_hash", None)
        self.source = f"{name} at {commit}" if commit else name
        self.tokenizer = f"{type(self._tokenizer).__name__} of {name}"
        self.libraries = {"transformers": transformers.__version__}
        self.parameters = sum(p.numel() for p in model.parameters())
        # Models were trained as their tokenizers write text: with a start token in
        # front or not.
        self._bos = self._tokenizer.bos_token_id
        first_ids = self._tokenizer("").input_ids[:1]
        self.start = self._bos is not None and first_ids == [self._bos]
        limit = getattr(model.config, "max_position_embeddings", None)
        self.context = limit and limit - self.start  # the start token takes a place
        self._check_causal()

    def _check_causal(self) -> None:
        """Raise UserError if the score of a token depends on those after it: the
        library loads an encoder (BERT) as a causal language model, too."""
        length = min(8, self.context or 8)
        ids = torch.arange(length, device=self.device) % self.vocab_size
        changed = ids.clone()
        changed[-1] = (ids[-1] + 1) % self.vocab_size
        first, second = self.nll(torch.stack([ids, changed]))[:, :-1]
        if not torch.allclose(first, second, rtol=1e-3, atol=1e-3):
            raise UserError(
                f"--judge {self.name} reads the tokens after the one that it scores: "
                "give a left-to-right model"
            )

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, in which "<|endoftext|>" ends a document."""
        text = text.replace(END_OF_TEXT, self._tokenizer.eos_token or END_OF_TEXT)
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def has_ids_of(self, tokenizer: str) -> bool:
        """Return whether the judge has the same ids as this tokenizer."""
        ours = get_tokenizer(tokenizer)
        if ours.vocab_size > len(self._tokenizer):
            return False
        ids = [[i] for i in range(ours.vocab_size)]
        theirs = self._tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False)
        return theirs == [ours.decode(one) for one in ids]

    @torch.inference_mode()
    def nll(self, tokens: Tensor) -> Tensor:
        """Return -log p of each of the tokens (B, T), nats, (B, T)."""
        if self.start:
            tokens = F.pad(tokens, (1, 0), value=self._bos)
        # Padding is at the end: a causal model does not see it.
        mask = torch.ones_like(tokens)
        output = self.model(input_ids=tokens, attention_mask=mask, use_cache=False)
        # One row at a time: cross_entropy of all would take several times the memory of
        # the logits.
        rows = []
        for logits, row in zip(output.logits, tokens, strict=True):
            rows.append(F.cross_entropy(logits[:-1], row[1:], reduction="none"))
        nll = torch.stack(rows)
        if self.start:
            return nll
        return F.pad(nll, (1, 0))
