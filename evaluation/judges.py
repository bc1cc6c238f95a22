"""Judges of generated text: language models that score its tokens left to right.

A judge is one of `transformers` (GPT-2 Large is the field's) or a decoder of this project. Tokens
of another tokenizer reach it through their text.

Conventions: nats; float32. A judge without a start token (GPT-2) scores tokens 2..n given those
before them, one with a start token all n. A sample longer than the judge's context is cut into
windows of that length that do not overlap, each scored like a sample of its own.

Shapes: B windows of a batch, T tokens of the longest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from checkpoints.errors import CheckpointError
from checkpoints.load import Loaded, load
from data.tokenizers import END_OF_TEXT, get_tokenizer
from runtime.errors import UserError
from runtime.validation import read_bounded
from variants import parameter_counts

# Elements of the logits of one batch, so that a large vocabulary does not exhaust the memory: a
# GiB in float32, some 5 windows of 1024 tokens of GPT-2.
LOGITS_ALIVE = 2**28
PROBE = "The cat sat on the mat, 1 of 2."  # any text that every tokenizer has tokens for


class Judge:
    """What judges share.

    Attributes:
        name: as the user gave it. source: where its weights lie.
        tokenizer: its name. vocab_size: rows of its token table.
        context: tokens of a window; None: no limit.
        start: whether it has a start token.
        parameters: how many. libraries: versions of those that it needs besides the project's own.
    """

    name: str
    source: str
    tokenizer: str
    vocab_size: int
    context: int | None
    start: bool
    parameters: int
    device: torch.device
    libraries: dict[str, str]

    def encode(self, text: str) -> list[int]:
        """The judge's ids of a text, in which "<|endoftext|>" ends a document, as samples have
        it."""
        raise NotImplementedError  # every judge has its own

    def has_ids_of(self, tokenizer: str) -> bool:
        """Whether the ids of the project's tokenizer of that name mean the same to the judge."""
        raise NotImplementedError  # every judge has its own

    def nll(self, tokens: Tensor) -> Tensor:
        """-log p of each token given those before it: LongTensor (B, T) -> float tensor (B, T).
        Without a start token the first column means nothing."""
        raise NotImplementedError  # every judge has its own

    def score(
        self,
        samples: Sequence[Sequence[int]],
        batch_size: int,
        progress: Callable[[int], None] | None = None,
    ) -> list[tuple[float, int]]:
        """Of each sample: the sum of -log p over its scored tokens, in nats, and their number.

        Args:
            samples: the judge's ids.
            batch_size: windows in one pass; fewer where their logits would take too much memory.
            progress: called with the number of windows done.

        Raises ValueError for ids that the judge's model does not have.
        """
        largest = max((max(ids) for ids in samples if ids), default=0)
        if largest >= self.vocab_size:
            raise UserError(
                f"the judge {self.name} has {self.vocab_size} tokens, but id {largest} is to be "
                "scored: do its tokenizer and its model belong together?"
            )
        # Long windows first: batches of equal lengths waste little on padding, and what does not
        # fit into memory shows at once.
        windows = sorted(self.windows(samples), key=lambda window: -len(window[1]))
        first = 0 if self.start else 1
        totals, counts = [0.0] * len(samples), [0] * len(samples)
        while windows:
            longest = len(windows[0][1])
            fitting = max(1, LOGITS_ALIVE // (self.vocab_size * longest))
            size = min(batch_size, fitting)
            batch, windows = windows[:size], windows[size:]
            tokens = pad_sequence([torch.tensor(ids) for _, ids in batch], batch_first=True)
            nll = self.nll(tokens.to(self.device)).double().cpu()
            for (sample, ids), row in zip(batch, nll, strict=True):
                totals[sample] += float(row[first : len(ids)].sum())
                counts[sample] += max(0, len(ids) - first)
            if progress is not None:
                progress(len(batch))
        return list(zip(totals, counts, strict=True))

    def windows(self, samples: Sequence[Sequence[int]]) -> list[tuple[int, Sequence[int]]]:
        """The windows of all samples, each with the number of its sample."""
        windows = []
        for number, ids in enumerate(samples):
            size = self.context or max(1, len(ids))
            windows += [(number, ids[start : start + size]) for start in range(0, len(ids), size)]
        return windows

    def describe(self) -> dict:
        """What a reported number depends on."""
        scored = "every token"
        if not self.start:
            scored = "tokens 2 to n of a window, given those before (no start token)"
        return {
            "name": self.name,
            "source": self.source,
            "tokenizer": self.tokenizer,
            "parameters": self.parameters,
            "context": self.context,
            "dtype": "float32",
            "start_token": self.start,
            "scored": scored,
            "longer": "windows that do not overlap",
        }


def load_judge(name: str, device: torch.device) -> Judge:
    """The judge of that name, in float32.

    Args:
        name: a run folder, checkpoint, export or released weights, as `checkpoints` loads them; a
            folder with a causal language model of transformers (safetensors) and its tokenizer;
            else a Hugging Face id.

    Raises ValueError that says what is wrong, also for encoders, which have no left-to-right
    probabilities.
    """
    path = Path(name)
    if not path.exists() or _is_of_transformers(path):
        return TransformersJudge(name, device)
    try:
        loaded = load(name, "ema", device)
    except CheckpointError as error:
        raise UserError(
            f"--judge {name}: {error}. A judge can also be a folder that transformers has saved "
            "(config.json with a model_type, model.safetensors and a tokenizer), or a Hugging Face "
            "id, as gpt2-large"
        ) from error
    return DecoderJudge(name, loaded, device)


def _is_of_transformers(path: Path) -> bool:
    """Whether this is a folder with a config.json of transformers."""
    try:
        settings = json.loads(read_bounded(path / "config.json"))
    except (OSError, ValueError, RecursionError):
        # No folder, or not theirs: what loads it says so in more words.
        return False
    return isinstance(settings, dict) and "model_type" in settings


class DecoderJudge(Judge):
    """A decoder of this project, scored left to right."""

    libraries = {}

    def __init__(self, name: str, loaded: Loaded, device: torch.device):
        config = loaded.model.config
        if config.is_encoder:
            raise UserError(
                f"--judge {name} is an encoder: it has no left-to-right probabilities; give a "
                "decoder or a causal language model"
            )
        self.name, self.source, self.device = name, loaded.describe(), device
        self.model = loaded.model.to(device, torch.float32)
        self.tokenizer, self.vocab_size = loaded.tokenizer, config.vocab_size
        self.context = config.block_size
        self.start = loaded.scored_from == 0
        self.parameters = sum(parameter_counts(loaded.model).values())

    def encode(self, text: str) -> list[int]:
        tokenizer = get_tokenizer(self.tokenizer)
        first, *others = [tokenizer.encode(document) for document in text.split(END_OF_TEXT)]
        for document in others:
            first += [tokenizer.eot, *document]
        return first

    def has_ids_of(self, tokenizer: str) -> bool:
        return tokenizer == self.tokenizer

    def nll(self, tokens: Tensor) -> Tensor:
        left_to_right = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return -self.model.token_log_probs(tokens, left_to_right)


class TransformersJudge(Judge):
    """A causal language model of transformers, read as safetensors; no code that it brings along is
    run."""

    def __init__(self, name: str, device: torch.device):
        try:
            import transformers
        except ImportError as error:
            raise UserError(
                f"--judge {name} needs the package transformers: pip install transformers; or give "
                "a run or checkpoint of this project as the judge"
            ) from error
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        if not Path(name).exists() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
            raise UserError(f"--judge {name}: there is no such file or folder")
        self.name, self.device = name, device
        self.libraries = {"transformers": transformers.__version__}

        # The small files first: they tell what is wrong before anything large is fetched.
        safe = {"trust_remote_code": False}
        config = _obtain(
            name, "config.json", lambda: transformers.AutoConfig.from_pretrained(name, **safe)
        )
        self._tokenizer = _obtain(
            name, "tokenizer", lambda: transformers.AutoTokenizer.from_pretrained(name, **safe)
        )
        if not self.encode(PROBE):  # where no file is, transformers makes an empty tokenizer
            raise UserError(
                f"--judge {name} has no tokenizer: save the files of its tokenizer beside the model"
            )
        options = safe | {"use_safetensors": True, "output_loading_info": True}
        model, info = _obtain(
            name,
            "model",
            lambda: transformers.AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32, **options
            ),
        )
        if missing := sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"])):
            raise UserError(
                f"--judge {name} is no complete causal language model: {len(missing)} of its "
                f"weights are missing, e.g. {missing[0]}"
            )
        self.model = model.to(device).eval()
        self._set_attributes(config)
        if not self._is_causal():
            raise UserError(
                f"--judge {name} ({config.model_type}) is no causal language model: what it says "
                "of a token depends on later ones; give a left-to-right model, as gpt2-large"
            )

    def _set_attributes(self, config) -> None:
        commit = getattr(config, "_commit_hash", None)
        self.source = f"{self.name} at {commit}" if commit else self.name
        self.tokenizer = f"{type(self._tokenizer).__name__} of {self.name}"
        self.vocab_size = self.model.get_input_embeddings().weight.shape[0]
        self.parameters = sum(p.numel() for p in self.model.parameters())
        # Some tokenizers put a start token in front of every text: so their models were trained.
        self._bos = self._tokenizer.bos_token_id
        self.start = self._bos is not None and self._tokenizer("").input_ids[:1] == [self._bos]
        # Models name the length of their context differently; the start token takes a place of it.
        names = ("max_position_embeddings", "n_positions", "n_ctx")
        limits = [getattr(config, name, None) for name in names]
        limits = [limit for limit in limits if isinstance(limit, int) and limit > 0]
        self.context = limits[0] - self.start if limits else None
        self._has_ids_of: dict[str, bool] = {}

    def encode(self, text: str) -> list[int]:
        text = text.replace(END_OF_TEXT, self._tokenizer.eos_token or END_OF_TEXT)
        return self._tokenizer(text, add_special_tokens=False).input_ids

    def has_ids_of(self, tokenizer: str) -> bool:
        """Whether every id that the project's tokenizer has decodes to the same text."""
        if tokenizer not in self._has_ids_of:
            ours = get_tokenizer(tokenizer)
            ids = range(min(ours.vocab_size, len(self._tokenizer)))
            options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
            theirs = self._tokenizer.batch_decode([[i] for i in ids], **options)
            complete = len(ids) == ours.vocab_size
            self._has_ids_of[tokenizer] = complete and theirs == [ours.decode([i]) for i in ids]
        return self._has_ids_of[tokenizer]

    @torch.inference_mode()
    def nll(self, tokens: Tensor) -> Tensor:
        if self.start:
            tokens = F.pad(tokens, (1, 0), value=self._bos)
        logits, targets = self._logits(tokens)[:, :-1], tokens[:, 1:]
        # One row at a time: cross_entropy of all would take several times the memory of the logits.
        pairs = zip(logits, targets, strict=True)
        nll = torch.stack([F.cross_entropy(row, target, reduction="none") for row, target in pairs])
        return nll if self.start else F.pad(nll, (1, 0))

    def _logits(self, tokens: Tensor) -> Tensor:
        """Padding stands at the end, where no earlier token of a causal model sees it: all ones in
        the mask."""
        mask = torch.ones_like(tokens)
        return self.model(input_ids=tokens, attention_mask=mask, use_cache=False).logits

    @torch.inference_mode()
    def _is_causal(self) -> bool:
        """Whether changing the last token leaves the predictions before it as they are."""
        size = min(self.vocab_size, 8, self.context or 8)
        tokens = torch.arange(size, device=self.device)[None]
        other = tokens.where(tokens < size - 1, 0)
        change = (self._logits(tokens) - self._logits(other)).abs()
        return float(change[:, :-1].max()) <= 1e-4 * float(change[:, -1].max()) + 1e-6


def _obtain(name: str, what: str, read: Callable):
    """read(), its many kinds of errors as a ValueError: no network, no such id, no access, a file
    that is missing or of another kind."""
    try:
        return read()
    except Exception as error:
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(
            f"--judge {name}: its {what} could not be had: {type(error).__name__}: {reason}. Give "
            "a run or checkpoint of this project, a folder with config.json, model.safetensors "
            "and a tokenizer, or the id of a causal language model on Hugging Face (which needs "
            "the network once), as gpt2-large"
        ) from error
