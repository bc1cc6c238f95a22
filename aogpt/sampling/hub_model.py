"""This model for `transformers`: convert.py --hub copies this file as
modeling_aogpt.py, and what it imports of the package beside it.

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    ids = tokenizer("The cat[MASK][MASK][MASK] home.", return_tensors="pt").input_ids
    print(tokenizer.decode(model.generate(ids)[0]))

Shapes: B sequences, T positions, V vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..model import ModelConfig, Transformer, inverse_permutation
from ..runtime.errors import UserError
from ..scoring import (
    at_least_float32,
    check_permutations,
    check_tokens,
    masked_log_probs,
    token_log_probs,
)
from ..systems.encoder import Encoder  # noqa: F401
from ..systems.kinds import system_of
from ..systems.mask_query import MaskQuery  # noqa: F401
from ..systems.parameters import init_weight
from ..systems.queries import QueryDecoder  # noqa: F401
from ..systems.two_stream import TwoStream  # noqa: F401

# transformers 5.0 copies what this file imports
from .cached import KVCache  # noqa: F401
from .race import draw
from .simple import nucleus, simple_generate


class AOGPTConfig(PreTrainedConfig):
    """The configuration of a model for transformers.

    aogpt: what convert.py writes about a model; its key `model` holds the ModelConfig.
    mask_token_id: [MASK] of the tokenizer. start_token_id: the begin-of-text that a
    pretrained model's tokenizer writes; the model has its own, [None]."""

    model_type = "aogpt"

    def __init__(
        self, aogpt: dict | None = None, mask_token_id=None, start_token_id=None, **more
    ):
        self.aogpt = aogpt or {}
        self.mask_token_id = mask_token_id
        self.start_token_id = start_token_id
        more["tie_word_embeddings"] = bool(aogpt and aogpt["model"]["tied_head"])
        super().__init__(**more)


def make_network(config: AOGPTConfig) -> Transformer:
    """Return the model of a configuration, with weights of no value."""
    settings = dict(config.aogpt["model"])
    if settings.get("rope_scaling"):
        settings["rope_scaling"] = tuple(settings["rope_scaling"])
    shape = ModelConfig(**settings)
    return system_of(shape)(shape)


def real_tokens(input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Return which tokens are no padding, BoolTensor (B, T). Raises UserError."""
    if attention_mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if attention_mask.shape != input_ids.shape:
        raise UserError(
            f"attention_mask is {tuple(attention_mask.shape)}, and input_ids are "
            f"{tuple(input_ids.shape)}"
        )
    is_real = attention_mask != 0
    if not is_real.any(dim=-1).all():
        raise UserError("attention_mask hides a whole sequence: leave it out")
    return is_real


def check_positions(position_ids: Tensor | None, is_real: Tensor) -> None:
    """Raise UserError for position ids (B, T) that do not count the tokens of one text
    in each row."""
    if position_ids is None:
        return
    is_counted = position_ids.shape[-1] == is_real.shape[-1]
    if is_counted:
        shift = (position_ids - is_real.cumsum(dim=1)).expand_as(is_real)
        first = shift.gather(1, padding_last(is_real)[:, :1])
        is_counted = not ((shift != first) & is_real).any()
    if not is_counted:
        raise UserError(
            "position_ids do not count the tokens one by one: this model reads one "
            "text in each row"
        )


def padding_last(is_real: Tensor) -> Tensor:
    """Return positions (B, T): those of real tokens, from left to right, then those of
    padding, which no other position sees at the end."""
    return (~is_real).to(torch.uint8).argsort(dim=1, stable=True)


def take(hidden: Tensor, place: Tensor) -> Tensor:
    """Return hidden (B, T, D) in the order of `place` (B, T)."""
    return hidden.gather(1, place[:, :, None].expand_as(hidden))


class AOGPTModel(PreTrainedModel):
    """A model of any order for transformers. The model itself is `.model`;
    `token_log_probs(tokens, order)` and `masked_log_probs(tokens, masked)` score known
    sequences. Mistakes in the arguments raise ValueError."""

    config_class = AOGPTConfig
    main_input_name = "input_ids"
    # the Trainer divides the loss by its accumulation steps
    accepts_loss_kwargs = False
    # if config.tie_word_embeddings
    _tied_weights_keys = {"model.head.weight": "model.wte.weight"}

    def __init__(self, config: AOGPTConfig):
        super().__init__(config)
        self.model = make_network(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *places, output_loading_info: bool = False, **options):
        """Load as every model of transformers. Raises UserError for a missing
        tensor."""
        loaded: Any = super().from_pretrained(
            *places, output_loading_info=True, **options
        )
        model, info = loaded
        if info["missing_keys"]:
            raise UserError(
                f"the file of weights lacks {sorted(info['missing_keys'])[0]}"
            )
        return (model, info) if output_loading_info else model

    def get_input_embeddings(self) -> torch.nn.Module:
        """Return the token table."""
        return self.model.wte

    def _init_weights(self, module) -> None:
        if not isinstance(module, Transformer):
            return
        module.make_angles(module.wte.weight.device)  # not in the file of weights
        for name, p in module.named_parameters():
            if not getattr(p, "_is_hf_initialized", False):  # read from a file
                init_weight(module, name, p)

    def forward(
        self, input_ids: Tensor, order=None, labels=None, attention_mask=None, **ignored
    ) -> CausalLMOutput:
        """Predict tokens. logits (B, T, V): a decoder's predict position order[:, i]
        from positions order[:, :i], an encoder's every position from those that are not
        [MASK].

        Args:
            input_ids: (B, T).
            order: (B, T), rows are permutations of 0..T-1; None: left to right, where
                logits[:, i] predict token i, not i + 1.
            labels: (B, T), by position, -100 for positions without loss: the loss is
                their mean cross-entropy in nats.
            attention_mask: (B, T), 0 at padding, on any side, whose logits mean
                nothing; None: no padding."""
        model = self.model
        if model.config.is_encoder and order is not None:
            raise UserError(
                "an encoder has no order: it predicts every [MASK] from the rest"
            )
        is_real = real_tokens(input_ids, attention_mask)
        check_positions(ignored.get("position_ids"), is_real)
        order = self._checked(input_ids, order, is_real)
        place = padding_last(is_real)
        steps = padding_last(is_real.gather(1, order))
        tokens = input_ids.gather(1, place)
        masked = tokens == self.config.mask_token_id
        masked &= is_real.gather(1, place)
        wanted = None  # (B, T), the labels of the logits
        if labels is not None:
            wanted = labels.where(is_real, -100)
        if model.config.is_encoder:
            lengths = None if is_real.all() else is_real.sum(dim=1)
            hidden = model.masked_hidden(tokens, masked, lengths)
            # By position again.
            hidden = take(hidden, inverse_permutation(place))
        else:
            if masked.any():
                raise UserError(
                    "a decoder scores known tokens; generate fills in [MASK]"
                )
            compact_order = inverse_permutation(place).gather(1, order.gather(1, steps))
            hidden = model.hidden(tokens, compact_order)
            hidden = take(hidden, inverse_permutation(steps))
            if wanted is not None:
                wanted = wanted.gather(1, order)
        logits = model.head_logits(hidden)
        loss = None
        if wanted is not None:
            # Without a start token the first step has nothing to predict from.
            first = steps[:, : self.config.aogpt["scored_from"]]
            wanted = wanted.scatter(1, first, -100)
            scored = at_least_float32(logits.flatten(0, 1))
            loss = F.cross_entropy(scored, wanted.flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def token_log_probs(self, tokens: Tensor, order: Tensor) -> Tensor:
        """Return log p of every token along an order, (B, T): see `token_log_probs`.
        That of the first step means nothing in a model without a start token, whose
        loss leaves it out."""
        return token_log_probs(self.model, tokens, order)

    def masked_log_probs(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """Return log p of every masked token given all others, (B, T): see
        `masked_log_probs`."""
        return masked_log_probs(self.model, tokens, masked)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 0,
        order: str | Tensor = "random",
        temperature: float = 1.0,
        top_p: float = 1.0,
        do_sample: bool = True,
        seed: int | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """Return the sequences with every [MASK] filled in, one position a step,
        followed by max_new_tokens that are generated, too: (B, T + max_new_tokens).

        Args:
            input_ids: (B, T).
            order: "random", "l2r" (a plain GPT's only order), or permutations
                (B, T + max_new_tokens), in which positions that are known move to the
                front.
            temperature: 0 takes the most probable tokens.
            top_p: draw from the most probable tokens that together have this
                probability.
            do_sample: False takes the most probable tokens.
            seed: of all random numbers.
            attention_mask: (B, T), 0 at padding, on any side, which stays as it is."""
        if temperature < 0 or max_new_tokens < 0:
            raise UserError("temperature and max_new_tokens must not be negative")
        if not 0 < top_p <= 1:
            raise UserError(f"top_p is {top_p}; give a probability above 0")
        given = order if isinstance(order, Tensor) else None
        if given is None and order not in ("random", "l2r"):
            raise UserError(f"order is {order!r}; give 'random', 'l2r' or permutations")
        is_real = real_tokens(input_ids, attention_mask)
        is_real = F.pad(is_real, (0, max_new_tokens), value=True)
        tokens = F.pad(input_ids, (0, max_new_tokens), value=self.config.mask_token_id)
        self._checked(tokens, given, is_real)
        shape = tokens.shape
        device = tokens.device
        config = self.model.config
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        uniforms = torch.rand(2, *shape, generator=generator, dtype=torch.float64)
        uniforms = uniforms.to(device)
        if given is not None:
            rank = given.argsort(dim=1)
        elif order == "l2r" or config.l2r_only:
            rank = torch.arange(shape[1], device=device).expand(shape)
        else:
            rank = uniforms[0].argsort(dim=1).argsort(dim=1)
        fill = self._fill_encoder if config.is_encoder else simple_generate
        filled = tokens.clone()
        for row, is_text in enumerate(is_real):
            text = tokens[row, is_text]
            unknown = text == self.config.mask_token_id
            self._check_prompt(unknown)
            # What is known comes first.
            place = torch.where(
                unknown, rank[row, is_text], rank[row, is_text] - shape[1]
            )
            filled[row, is_text], _ = fill(
                self.model,
                place.argsort(),
                [1] * int(unknown.sum()),
                uniforms[1, row, is_text],
                text,
                temperature=temperature if do_sample else 0.0,
                vocab_size=self.config.aogpt["vocab_size"],
                top_p=top_p,
            )
        return filled

    def _check_prompt(self, unknown: Tensor) -> None:
        """Raise UserError for a text that the model cannot fill. unknown: BoolTensor
        (T,)."""
        is_gap = (unknown[:-1] & ~unknown[1:]).any()
        if self.model.config.l2r_only and is_gap:
            raise UserError(
                "a plain GPT only continues a text: no [MASK] may come before a token"
            )
        if (~unknown).sum() < self.config.aogpt["scored_from"]:
            raise UserError("this model has no start token: give it at least one token")

    def _checked(self, tokens: Tensor, order: Tensor | None, is_real: Tensor) -> Tensor:
        """Return the order, left to right by default. Raises UserError for what the
        model cannot take."""
        l2r = torch.arange(tokens.shape[-1], device=tokens.device).expand_as(tokens)
        if order is None:
            order = l2r
        shown = tokens.masked_fill(tokens == self.config.mask_token_id, 0)
        shown = shown.masked_fill(~is_real, 0)
        check_tokens(self.model, shown, order)
        check_permutations(order)
        first = tokens.gather(1, padding_last(is_real)[:, :1])
        if self.config.start_token_id in first.flatten().tolist():
            raise UserError(
                "no begin-of-text is needed: tokenizer(text, add_special_tokens=False)"
            )
        if self.model.config.l2r_only and not torch.equal(order, l2r):
            raise UserError(
                "a plain GPT predicts from left to right only: leave out order"
            )
        return order

    def _fill_encoder(
        self, model, order, sizes, uniforms, tokens, temperature, vocab_size, top_p
    ):
        """Return what `simple_generate` does of a decoder, for one position a step, but
        no log-probabilities."""
        for position in order[len(order) - len(sizes) :]:
            logits = self(tokens[None]).logits[0, position, None, :vocab_size].double()
            if temperature == 0:
                token = logits.argmax(dim=-1)
            else:
                probs = (logits / temperature).softmax(dim=-1)
                token = draw(nucleus(probs, top_p), uniforms[position, None])
            tokens = tokens.index_put((position[None],), token)
        return tokens, None


class AOGPTForCausalLM(AOGPTModel, GenerationMixin):
    """A decoder from left to right, as transformers knows them: logits[:, i] predict
    token i + 1. For `AutoModelForCausalLM`, `pipeline` and the library's own
    `generate`."""

    def __init__(self, config: AOGPTConfig):
        if config.aogpt["model"]["attention"] == "full":
            raise UserError(
                "an encoder fills in [MASK] and continues no text: AutoModel"
            )
        super().__init__(config)

    def forward(  # type: ignore[override]  # no order: the arguments of the library
        self, input_ids: Tensor, attention_mask=None, labels=None, **ignored
    ) -> CausalLMOutput:
        """Predict each next token. attention_mask (B, T): 0 at padding, on any side,
        whose logits mean nothing. labels (B, T): -100 for positions without loss.

        A begin-of-text that the tokenizer writes is the model's own [None]."""
        is_real = real_tokens(input_ids, attention_mask)
        check_positions(ignored.get("position_ids"), is_real)
        place = padding_last(is_real)
        tokens = input_ids.gather(1, place).masked_fill(~is_real.gather(1, place), 0)
        if (is_real & (input_ids == self.config.mask_token_id)).any():
            raise UserError("no [MASK] is continued; generate of AutoModel fills it in")
        check_tokens(self.model, tokens, tokens)
        start = self.config.start_token_id
        begins = tokens[:, 0] == (-1 if start is None else start)
        first = 1
        if begins.all():
            tokens = tokens[:, 1:]
            first = 0
        elif begins.any():
            raise UserError("only some of the texts have a begin-of-text")
        size = tokens.shape[1] + 1
        limit = self.model.config.block_size
        if size > limit:
            raise UserError(
                f"{size - 1} tokens a sequence; this model continues {limit - 1}"
            )
        steps = torch.arange(size, device=tokens.device).expand(len(tokens), -1)
        hidden = self.model.hidden(F.pad(tokens, (0, 1)), steps)[:, first:]
        logits = self.model.head_logits(take(hidden, inverse_permutation(place)))
        loss = None
        if labels is not None:
            # The logits before a text's first token are those of padding.
            is_predicted = is_real[:, 1:] & is_real[:, :-1]
            wanted = labels[:, 1:].where(is_predicted, -100)
            scored = at_least_float32(logits[:, :-1].flatten(0, 1))
            loss = F.cross_entropy(scored, wanted.flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(  # type: ignore[override]  # fewer of them
        self, input_ids: Tensor, attention_mask=None, **ignored
    ) -> dict:
        """Return the arguments of `forward` for the next token; there is no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def generate(self, *inputs, **options):
        """Continue texts as every model of transformers: do_sample, top_p, num_beams,
        ... No id is drawn that the tokenizer does not have. Raises UserError for texts
        with padding on the right, whose next token would follow the padding."""
        mask = options.get("attention_mask")
        if mask is not None and (mask[:, -1] == 0).any():
            raise UserError(
                'pad on the left: tokenizer(texts, padding=True, padding_side="left")'
            )
        rows = self.model.config.vocab_size
        beyond = list(range(self.config.aogpt["vocab_size"], rows))
        if beyond:
            options.setdefault("suppress_tokens", beyond)
        options["use_cache"] = False  # there is none
        return GenerationMixin.generate(self, *inputs, **options)
