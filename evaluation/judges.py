"""Judges of generated text, and measures of it that need no judge.

A judge is a language model that scores tokens left to right: one of `transformers` (GPT-2 Large is the field's), or a
decoder of this project. Tokens of another tokenizer reach it through their text.

Conventions: nats; a judge without a start token (GPT-2) scores tokens 2..n given those before them, one with a start
token all n; a sample longer than the judge's context is cut into windows of that length that do not overlap, and every
window is scored like a sample of its own.
"""

from __future__ import annotations

import collections
import json
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from checkpoints import store as checkpoint
from data.tokenizers import END_OF_TEXT, get_tokenizer
from evaluation.estimates import t_quantile

LOGITS_ALIVE = 2**28  # of a batch that is scored
PROBE = "The cat sat on the mat, 1 of 2."


class Judge:
    """What judges share.

    Attributes: `name` as the user gave it; `source`, where its weights lie; `tokenizer`, its name; `context`, tokens of
    a window (None: no limit); `start`, whether there is a start token; `vocab_size`, rows of its token table;
    `parameters`; `dtype`; `libraries`, versions of those it needs besides the project's own.
    """

    name: str
    source: str
    tokenizer: str
    context: int | None
    start: bool
    vocab_size: int
    parameters: int
    dtype: torch.dtype
    device: torch.device
    libraries: Mapping[str, str] = types.MappingProxyType({})

    def encode(self, text: str) -> list[int]:
        """The judge's ids of a text, in which "<|endoftext|>" stands for the end of a document, as samples have it."""
        raise NotImplementedError

    def has_ids_of(self, tokenizer: str) -> bool:
        """Whether the ids of the project's tokenizer of that name mean the same to the judge."""
        raise NotImplementedError

    def nll(self, tokens: Tensor) -> Tensor:
        """-log p of each token given those before it, LongTensor (B, T) -> float tensor (B, T); the first column means
        nothing without a start token."""
        raise NotImplementedError

    def score(
        self,
        samples: Sequence[Sequence[int]],
        batch_size: int,
        progress: Callable[[int], None] | None = None,
    ) -> list[tuple[float, int]]:
        """Of each sample of the judge's ids: the sum of -log p over the tokens that are scored, and how many they are.

        Args:
            batch_size: windows in one pass; fewer where their logits would take too much memory.
            progress: called with the number of windows done.

        Raises ValueError for ids that the judge's model does not have.
        """
        largest = max((max(ids) for ids in samples if len(ids)), default=0)
        if largest >= self.vocab_size:
            raise ValueError(
                f"the judge {self.name} has {self.vocab_size} tokens, but id {largest} is to be scored: do its "
                "tokenizer and its model belong together?"
            )
        # long windows first: batches of equal lengths waste little, and what does not fit into memory shows at once
        windows = sorted(self.windows(samples), key=lambda window: -len(window[1]))
        totals, counts, first = [0.0] * len(samples), [0] * len(samples), 0 if self.start else 1
        while windows:
            rows = min(batch_size, max(1, LOGITS_ALIVE // (self.vocab_size * len(windows[0][1]))))
            batch, windows = windows[:rows], windows[rows:]
            tokens = pad_sequence([torch.tensor(ids) for _, ids in batch], batch_first=True)
            nll = self.nll(tokens.to(self.device)).double().cpu()
            for (sample, ids), row in zip(batch, nll, strict=True):
                totals[sample] += float(row[first : len(ids)].sum())
                counts[sample] += max(0, len(ids) - first)
            if progress is not None:
                progress(len(batch))
        return list(zip(totals, counts, strict=True))

    def windows(self, samples: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int]]]:
        """The windows of all samples: (number of the sample, ids)."""
        windows = []
        for number, ids in enumerate(samples):
            size = self.context or max(1, len(ids))
            windows += [(number, ids[start : start + size]) for start in range(0, len(ids), size)]
        return windows

    def describe(self) -> dict:
        """What a reported number depends on."""
        names = ("name", "source", "tokenizer", "parameters", "context")
        facts = {name: getattr(self, name) for name in names} | {
            "dtype": str(self.dtype).removeprefix("torch.")
        }
        scored = (
            "every token"
            if self.start
            else "tokens 2 to n of a window, given those before (no start token)"
        )
        return facts | {
            "start_token": self.start,
            "scored": scored,
            "longer": "windows that do not overlap",
        }


def load_judge(name: str, dtype: torch.dtype, device: torch.device) -> Judge:
    """The judge of that name.

    Args:
        name: a run folder, checkpoint, export or released weights, as `checkpoint.load` takes them; a folder with a
            causal language model of transformers (safetensors) and its tokenizer; else a Hugging Face id.

    Raises ValueError that says what is wrong, also for encoders, which have no left-to-right probabilities.
    """
    path = Path(name)
    if not path.exists() or path.is_dir() and "model_type" in _settings(path):
        return TransformersJudge(name, dtype, device)
    try:
        loaded = checkpoint.load(name, "ema", device)
    except checkpoint.CheckpointError as error:
        raise ValueError(
            f"--judge {name}: {error}. A judge can also be a folder that transformers has saved (config.json with a "
            "model_type, model.safetensors and a tokenizer), or a Hugging Face id, as gpt2-large"
        ) from error
    return OurJudge(name, loaded, dtype, device)


def _settings(folder: Path) -> dict:
    """The object in config.json; empty if there is none."""
    try:
        settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):  # what loads the folder says so with more words
        return {}
    return settings if isinstance(settings, dict) else {}


class OurJudge(Judge):
    """A decoder of this project, scored left to right."""

    def __init__(
        self, name: str, loaded: checkpoint.Loaded, dtype: torch.dtype, device: torch.device
    ):
        config = loaded.model.config
        if config.is_encoder:
            raise ValueError(
                f"--judge {name} is an encoder: it has no left-to-right probabilities; give a decoder or a causal "
                "language model"
            )
        self.model = loaded.model.to(dtype)
        self.name, self.source, self.tokenizer = name, loaded.describe(), loaded.tokenizer
        self.context, self.start, self.vocab_size = (
            config.block_size,
            loaded.scored_from == 0,
            config.vocab_size,
        )
        self.parameters, self.dtype, self.device = (
            sum(loaded.model.num_params().values()),
            dtype,
            device,
        )

    def encode(self, text: str) -> list[int]:
        tokenizer = get_tokenizer(self.tokenizer)
        first, *others = (tokenizer.encode(document) for document in text.split(END_OF_TEXT))
        return first + [token for document in others for token in (tokenizer.eot, *document)]

    def has_ids_of(self, tokenizer: str) -> bool:
        return tokenizer == self.tokenizer

    def nll(self, tokens: Tensor) -> Tensor:
        order = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return -self.model.token_log_probs(tokens, order)


class TransformersJudge(Judge):
    """A causal language model of transformers, read as safetensors; no code that it brings along is run."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device):
        try:
            import transformers
        except ImportError as error:
            raise ValueError(
                f"--judge {name} needs the package transformers: pip install transformers; or give a run or checkpoint "
                "of this project as the judge"
            ) from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if not Path(name).exists() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
            raise ValueError(f"--judge {name}: there is no such file or folder")
        safe = {"trust_remote_code": False}
        # the small files first: they tell what is wrong before anything large is fetched
        config = _loaded(
            name, "config.json", lambda: transformers.AutoConfig.from_pretrained(name, **safe)
        )
        tokenizer = _loaded(
            name, "tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(name, **safe)
        )
        self.name, self._tokenizer, self.libraries = (
            name,
            tokenizer,
            {"transformers": transformers.__version__},
        )
        if not self.encode(
            PROBE
        ):  # transformers makes an empty tokenizer where there is no file of one
            raise ValueError(
                f"--judge {name} has no tokenizer: save the files of its tokenizer beside the model"
            )
        options = safe | {"use_safetensors": True, "dtype": dtype, "output_loading_info": True}
        make = transformers.AutoModelForCausalLM.from_pretrained
        model, info = _loaded(name, "model", lambda: make(name, **options))
        if missing := sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):
            raise ValueError(
                f"--judge {name} is no complete causal language model: {len(missing)} of its weights are missing, "
                f"e.g. {missing[0]}"
            )
        self.model = model.to(device).eval()
        self._describe(config, dtype, device)
        if not self._is_causal():
            raise ValueError(
                f"--judge {name} ({config.model_type}) is no causal language model: what it says of a token depends on "
                "later ones; give a left-to-right model, as gpt2-large"
            )

    def _describe(self, config, dtype: torch.dtype, device: torch.device) -> None:
        commit = getattr(config, "_commit_hash", None)
        self.source = f"{self.name} at {commit}" if commit else self.name
        self.tokenizer = f"{type(self._tokenizer).__name__} of {self.name}"
        # some tokenizers put a start token in front by themselves: that is how their models were trained
        self._bos = self._tokenizer.bos_token_id
        self.start = self._bos is not None and self._tokenizer("").input_ids[:1] == [self._bos]
        limits = (
            getattr(config, key, None)
            for key in ("max_position_embeddings", "n_positions", "n_ctx")
        )
        context = next((limit for limit in limits if isinstance(limit, int) and limit > 0), None)
        self.context = context - 1 if context and self.start else context
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        self.parameters, self.dtype, self.device = (
            sum(p.numel() for p in self.model.parameters()),
            dtype,
            device,
        )
        self._same = {}

    def encode(self, text: str) -> list[int]:
        text = text.replace(END_OF_TEXT, self._tokenizer.eos_token or END_OF_TEXT)
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def has_ids_of(self, tokenizer: str) -> bool:
        """Whether every id that the project's tokenizer has decodes to the same text."""
        if tokenizer not in self._same:
            ours = get_tokenizer(tokenizer)
            ids = range(ours.vocab_size)
            same = len(self._tokenizer) >= ours.vocab_size
            if same:
                options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
                theirs = self._tokenizer.batch_decode([[i] for i in ids], **options)
                same = theirs == [ours.decode([i]) for i in ids]
            self._same[tokenizer] = same
        return self._same[tokenizer]

    @torch.inference_mode()
    def nll(self, tokens: Tensor) -> Tensor:
        if self.start:
            tokens = F.pad(tokens, (1, 0), value=self._bos)
        logits, targets = self._logits(tokens)[:, :-1], tokens[:, 1:]
        # one row at a time: float32 copies of all logits would take several times their memory
        pairs = zip(logits, targets, strict=True)
        nll = torch.stack(
            [F.cross_entropy(row.float(), target, reduction="none") for row, target in pairs]
        )
        return nll if self.start else F.pad(nll, (1, 0))

    def _logits(self, tokens: Tensor) -> Tensor:
        """Padding stands at the end, where no earlier token of a causal model sees it."""
        return self.model(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False
        ).logits

    @torch.inference_mode()
    def _is_causal(self) -> bool:
        """Whether changing the last token leaves the predictions before it as they are."""
        size = min(self.vocab_size, 8, self.context or 8)
        tokens = torch.arange(size, device=self.device)[None]
        change = (self._logits(tokens) - self._logits(tokens.where(tokens < size - 1, 0))).abs()
        return float(change[:, :-1].max()) <= 1e-4 * float(change[:, -1].max()) + 1e-6


def _loaded(name: str, what: str, load):
    """load(), its many kinds of errors as a ValueError."""
    try:
        return load()
    except (
        Exception
    ) as error:  # no network, no such id, no access, a file that is missing or of another kind
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise ValueError(
            f"--judge {name}: its {what} could not be had: {type(error).__name__}: {reason}. Give a run or "
            "checkpoint of this project, a folder with config.json, model.safetensors and a tokenizer, or the id of a "
            "causal language model on Hugging Face (which needs the network once), as gpt2-large"
        ) from error


# ---- measures of a sample's own tokens -------------------------------------------------------------------------------


def unigram_entropy(tokens: Sequence[int]) -> float:
    """Entropy, in nats, of the histogram of a sample's tokens; NaN for none."""
    if not len(tokens):
        return math.nan
    shares = [count / len(tokens) for count in collections.Counter(tokens).values()]
    return -math.fsum(share * math.log(share) for share in shares) + 0.0  # not -0.0


def distinct(tokens: Sequence[int], n: int) -> float:
    """Share of a sample's n-grams that are different from one another: types / n-grams; NaN if it has none."""
    grams = list(zip(*(tokens[start:] for start in range(n)), strict=False))
    return len(set(grams)) / len(grams) if grams else math.nan


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of a sample's n-grams that have occurred in it before; NaN if it has none."""
    return 1 - distinct(tokens, n)


def calls(step: Sequence[int], speculative: bool) -> int:
    """Model calls that a sample took part in (NFE); the same whatever samples it shared its batches with.

    step: as in `decode.Generation`. A speculative round drafts and verifies; a last one of a single token only drafts.
    """
    revealed = [s for s in step if s >= 0]
    rounds = len(set(revealed))
    if not speculative or not rounds:
        return rounds
    return 2 * rounds - (revealed.count(max(revealed)) == 1)


# ---- over samples ----------------------------------------------------------------------------------------------------


def corpus_perplexity(totals: Sequence[float], counts: Sequence[int]) -> dict[str, float]:
    """exp(all nats / all scored tokens), with its standard error in nats and a 95% interval over samples.

    The mean of samples that differ in length is a ratio: sum (total_i - mean count_i)^2 N / (N - 1), under the root and
    over all tokens, is its standard error, for equal lengths that of the mean. NaN for fewer than two samples. The
    interval is Student's with N - 1 degrees of freedom, also where lengths differ and it is an approximation.
    """
    pairs = [(total, count) for total, count in zip(totals, counts, strict=True) if count]
    tokens, N = sum(count for _, count in pairs), len(pairs)
    mean = math.fsum(total for total, _ in pairs) / tokens if tokens else math.nan
    error = math.nan
    if N > 1:
        squares = math.fsum((total - mean * count) ** 2 for total, count in pairs)
        error = math.sqrt(squares * N / (N - 1)) / tokens
    reach = t_quantile(N - 1) * error
    logs = {"perplexity": mean, "perplexity_low": mean - reach, "perplexity_high": mean + reach}
    return {"nll": mean, "standard_error": error} | {
        name: exp(value) for name, value in logs.items()
    }


def exp(value: float) -> float:
    """e to the power of value; infinite, not an OverflowError, where it is too large."""
    return float(torch.tensor(value, dtype=torch.float64).exp())


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error over the samples that have the value; NaN where there are too few."""
    known = torch.tensor([value for value in values if not math.isnan(value)], dtype=torch.float64)
    mean = float(known.mean()) if len(known) else math.nan
    return mean, float(known.std() / len(known) ** 0.5) if len(known) > 1 else math.nan
