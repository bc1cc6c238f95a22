"""This model for `transformers`: convert.py --hub writes this file after the sources of the model.

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, trust_remote_code=True)
    ids = tokenizer("The cat[MASK][MASK][MASK] home.", return_tensors="pt").input_ids
    print(tokenizer.decode(model.generate(ids)[0]))

Shapes: B sequences, T positions, V vocabulary."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from ..model import AOGPT, ModelConfig, Transformer
from ..runtime.errors import UserError
from ..scoring import (
    at_least_float32,
    check_permutations,
    check_tokens,
    masked_log_probs,
    token_log_probs,
)
from ..systems.encoder import Encoder, log_linear_noise
from ..systems.mask_query import MaskQuery
from ..systems.parameters import init_weight
from ..systems.two_stream import TwoStream
from .race import draw
from .simple import simple_generate


class AOGPTConfig(PreTrainedConfig):
    """aogpt: what convert.py writes about a model; its key `model` holds the ModelConfig.
    mask_token_id: [MASK] of the tokenizer. start_token_id: the begin-of-text that a pretrained
    model's tokenizer writes; the model has its own, [None]."""

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
    if shape.is_encoder:
        return Encoder(shape)
    if shape.target == "two_stream":
        return TwoStream(shape)
    if shape.target == "mask_query":
        return MaskQuery(shape)
    return AOGPT(shape)


class AOGPTModel(PreTrainedModel):
    """The model itself is `.model`; `token_log_probs(tokens, order)` and
    `masked_log_probs(tokens, masked)` score known sequences. Mistakes in the arguments raise
    ValueError."""

    config_class = AOGPTConfig
    main_input_name = "input_ids"
    accepts_loss_kwargs = (
        False  # the Trainer divides the loss by its accumulation steps
    )
    _tied_weights_keys = {
        "model.head.weight": "model.wte.weight"
    }  # if config.tie_word_embeddings

    def __init__(self, config: AOGPTConfig):
        super().__init__(config)
        self.model = make_network(config)
        self.post_init()

    @classmethod
    def from_pretrained(cls, *places, output_loading_info: bool = False, **options):
        """Load as every model of transformers. Raises UserError for a missing tensor."""
        model, info = super().from_pretrained(
            *places, output_loading_info=True, **options
        )
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
        """logits (B, T, V): a decoder's predict position order[:, i] from positions order[:, :i],
        an encoder's every position from those that are not [MASK].

        input_ids (B, T). order (B, T): rows are permutations of 0..T-1; None: left to right, where
        logits[:, i] predict token i, not i + 1. labels (B, T), by position, -100 for positions
        without loss: the loss is their mean cross-entropy in nats. attention_mask: all ones."""
        model = self.model
        config = self.model.config
        if config.is_encoder and order is not None:
            raise UserError(
                "an encoder has no order: it predicts every [MASK] from the rest"
            )
        order = self._checked(input_ids, order, attention_mask)
        masked = input_ids == self.config.mask_token_id
        if config.is_encoder:
            sigma = (
                log_linear_noise(masked.double().mean(dim=1)) if config.noise else None
            )
            inputs = model.with_masks(input_ids, masked)
            logits = model.head_logits(model.hidden(inputs, sigma))
            wanted = labels
        else:
            if masked.any():
                raise UserError(
                    "a decoder scores known tokens; generate fills in [MASK]"
                )
            logits = model.head_logits(model.hidden(input_ids, order))
            wanted = None if labels is None else labels.gather(1, order)
        loss = None
        if (
            labels is not None
        ):  # without a start token the first step has nothing to predict from
            first = self.config.aogpt["scored_from"]
            scored = at_least_float32(logits[:, first:].flatten(0, 1))
            loss = F.cross_entropy(scored, wanted[:, first:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def token_log_probs(self, tokens: Tensor, order: Tensor) -> Tensor:
        """log p of every token along an order, (B, T): see `token_log_probs`."""
        return token_log_probs(self.model, tokens, order)

    def masked_log_probs(self, tokens: Tensor, masked: Tensor) -> Tensor:
        """log p of every masked token given all others, (B, T): see `masked_log_probs`."""
        return masked_log_probs(self.model, tokens, masked)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 0,
        order: str | Tensor = "random",
        temperature: float = 1.0,
        seed: int | None = None,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        """The sequences with every [MASK] filled in, one position a step, followed by
        max_new_tokens that are generated, too: (B, T + max_new_tokens).

        input_ids (B, T). order: "random", "l2r" (a plain GPT's only order), or permutations
        (B, T + max_new_tokens), in which positions that are known move to the front. temperature: 0
        takes the most probable tokens. seed: of all random numbers. attention_mask: all ones."""
        if temperature < 0 or max_new_tokens < 0:
            raise UserError("temperature and max_new_tokens must not be negative")
        given = order if isinstance(order, Tensor) else None
        if given is None and order not in ("random", "l2r"):
            raise UserError(f"order is {order!r}; give 'random', 'l2r' or permutations")
        tokens = F.pad(input_ids, (0, max_new_tokens), value=self.config.mask_token_id)
        unknown = tokens == self.config.mask_token_id
        self._checked(tokens, given, attention_mask)
        shape = tokens.shape
        device = tokens.device
        config = self.model.config
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        uniforms = torch.rand(2, *shape, generator=generator, dtype=torch.float64).to(
            device
        )
        if given is not None:
            place = given.argsort(dim=1)
        elif order == "l2r" or config.l2r_only:
            place = torch.arange(shape[1], device=device).expand(shape)
        else:
            place = uniforms[0].argsort(dim=1).argsort(dim=1)
        if config.l2r_only and (unknown[:, :-1] & ~unknown[:, 1:]).any():
            raise UserError(
                "a plain GPT only continues a text: no [MASK] may come before a token"
            )
        if (~unknown).sum(dim=1).min() < self.config.aogpt["scored_from"]:
            raise UserError("this model has no start token: give it at least one token")
        order = torch.where(unknown, place, place - shape[1]).argsort(dim=1)
        fill = self._fill_encoder if config.is_encoder else simple_generate
        settings = {
            "temperature": temperature,
            "vocab_size": self.config.aogpt["vocab_size"],
        }
        rows = zip(order, unknown.sum(dim=1).tolist(), uniforms[1], tokens, strict=True)
        filled = [
            fill(self.model, o, [1] * n, u, t, **settings)[0] for o, n, u, t in rows
        ]
        return torch.stack(filled)

    def _checked(
        self, tokens: Tensor, order: Tensor | None, attention_mask: Tensor | None
    ) -> Tensor:
        """The order, left to right by default. Raises UserError for what the model cannot take."""
        if attention_mask is not None and not attention_mask.all():
            raise UserError(
                "padding is not supported: give sequences of one length, unpadded"
            )
        if tokens.dim() == 2:  # otherwise check_tokens refuses it
            l2r = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
            order = l2r if order is None else order
        known = tokens.masked_fill(tokens == self.config.mask_token_id, 0)
        check_tokens(self.model, known, tokens if order is None else order)
        check_permutations(order)
        if self.config.start_token_id in tokens[:, 0].tolist():
            raise UserError(
                "no begin-of-text is needed: tokenizer(text, add_special_tokens=False)"
            )
        if self.model.config.l2r_only and not torch.equal(order, l2r):
            raise UserError(
                "a plain GPT predicts from left to right only: leave out order"
            )
        return order

    def _fill_encoder(
        self, model, order, sizes, uniforms, tokens, temperature, vocab_size
    ):
        for position in order[len(order) - len(sizes) :]:
            logits = self(tokens[None]).logits[0, position, None, :vocab_size].double()
            if temperature == 0:
                token = logits.argmax(dim=-1)
            else:
                weights = (logits / temperature).softmax(dim=-1)
                token = draw(weights, uniforms[position, None])
            tokens = tokens.index_put((position[None],), token)
        return tokens, None


class AOGPTForCausalLM(AOGPTModel, GenerationMixin):
    """A decoder from left to right, as transformers knows them: logits[:, i] predict token
    i + 1. For `AutoModelForCausalLM`, `pipeline` and the library's own `generate`."""

    def __init__(self, config: AOGPTConfig):
        if config.aogpt["model"]["attention"] == "full":
            raise UserError(
                "an encoder fills in [MASK] and continues no text: AutoModel"
            )
        super().__init__(config)

    def forward(
        self, input_ids: Tensor, attention_mask=None, labels=None, **ignored
    ) -> CausalLMOutput:
        """Predict each next token. attention_mask (B, T): 0 at padding, on any side, whose
        logits mean nothing. labels (B, T): -100 for positions without loss."""
        size = input_ids.shape[1]
        limit = self.model.config.block_size - 1
        if size > limit:
            raise UserError(f"{size} tokens a sequence; this model continues {limit}")
        known = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        # What is padded on the left moves to the start, as positions count from there.
        order = known.ne(0).logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        tokens = F.pad(input_ids.gather(1, order), (0, 1))
        steps = torch.arange(size + 1, device=tokens.device).expand(len(tokens), -1)
        hidden = self.model.hidden(tokens, steps)[:, 1:]
        moved = self.model.head_logits(hidden)
        place = order.argsort(dim=1)[:, :, None].expand_as(moved)
        logits = moved.gather(1, place)
        loss = None
        if labels is not None:
            scored = at_least_float32(logits[:, :-1].flatten(0, 1))
            loss = F.cross_entropy(scored, labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, attention_mask=None, **ignored
    ) -> dict:
        """Return the arguments of `forward` for the next token; there is no cache."""
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def generate(self, *inputs, **options):
        """Continue texts as every model of transformers: do_sample, top_p, num_beams, ..."""
        return GenerationMixin.generate(self, *inputs, use_cache=False, **options)
