"""This model for `transformers`: convert.py --hub writes this file behind the sources of the model.

    model = AutoModel.from_pretrained(FOLDER, trust_remote_code=True)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer("The cat[MASK][MASK][MASK] home.", return_tensors="pt").input_ids
    print(tokenizer.decode(model.generate(ids)[0]))

Shapes: B sequences, T positions, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from model import AOGPT, ModelConfig
from sampling.race import draw
from sampling.simple import simple_generate
from variants.encoder import Encoder, log_linear_noise
from variants.scoring import Decoder
from variants.two_stream import TwoStream


class AOGPTConfig(PreTrainedConfig):
    """aogpt: the settings that convert.py writes, `model` those of ModelConfig. mask_token_id:
    [MASK] of the tokenizer, the first id that cannot be generated."""

    model_type = "aogpt"

    def __init__(self, aogpt: dict | None = None, mask_token_id: int | None = None, **more):
        self.aogpt, self.mask_token_id = aogpt or {}, mask_token_id
        more["tie_word_embeddings"] = bool(aogpt and aogpt["model"]["tied_head"])
        super().__init__(**more)


class AOGPTModel(PreTrainedModel):
    """The model itself is `.model`: its `token_log_probs(tokens, order)` and
    `masked_log_probs(tokens, masked)` score known sequences."""

    config_class = AOGPTConfig
    main_input_name = "input_ids"
    _tied_weights_keys = {"model.head.weight": "model.wte.weight"}  # if config.tie_word_embeddings

    def __init__(self, config: AOGPTConfig):
        super().__init__(config)
        settings = dict(config.aogpt["model"])
        if settings.get("rope_scaling"):
            settings["rope_scaling"] = tuple(settings["rope_scaling"])
        shape = ModelConfig(**settings)
        kind = TwoStream if shape.target == "two_stream" else Decoder
        self.model: AOGPT = (Encoder if shape.is_encoder else kind)(shape)
        self.post_init()

    def _init_weights(self, module) -> None:
        if isinstance(module, AOGPT):  # angles are no part of the file of weights
            module.make_angles(module.wte.weight.device)

    def forward(
        self, input_ids: Tensor, order: Tensor | None = None, labels: Tensor | None = None, **_
    ) -> CausalLMOutput:
        """logits (B, T, V): a decoder's predict position order[:, i] from positions order[:, :i],
        an encoder's every position from those that are not [MASK].

        input_ids (B, T). order (B, T), rows are permutations of 0..T-1; None: left to right, where
        logits[:, i] predict token i, not i + 1. labels (B, T), by position, -100 where none is:
        the loss is their mean in nats."""
        model, config = self.model, self.model.config
        if config.is_encoder:
            masked = input_ids == config.mask_token
            sigma = log_linear_noise(masked.double().mean(dim=1)) if config.noise else None
            logits, wanted = model.logits(input_ids, masked, sigma), labels
        else:
            if order is None:
                order = torch.arange(input_ids.shape[1], device=input_ids.device)
                order = order.expand_as(input_ids)
            logits = model.logits(input_ids, order)
            wanted = None if labels is None else labels.gather(1, order)
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        return CausalLMOutput(loss=loss, logits=logits)

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int = 0,
        order: str | Tensor | None = None,
        temperature: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The sequences with every [MASK] filled in, one position a step, and after them
        max_new_tokens that are generated, (B, T + max_new_tokens).

        input_ids (B, T). order: "random" (default), "l2r" (a plain GPT's only order), or
        (B, T + max_new_tokens) permutations, in which positions that are known move to the front.
        temperature: 0 takes the likeliest tokens."""
        tokens = F.pad(input_ids, (0, max_new_tokens), value=self.config.mask_token_id)
        unknown = tokens == self.config.mask_token_id
        shape, device = tokens.shape, tokens.device
        uniforms = torch.rand(2, *shape, generator=generator, dtype=torch.float64).to(device)
        if isinstance(order, Tensor):
            place = order.argsort(dim=1)
        elif order == "l2r" or self.model.config.l2r_only:
            place = torch.arange(shape[1], device=device).expand(shape)
        else:
            place = uniforms[0].argsort(dim=1).argsort(dim=1)
        order = torch.where(unknown, place, place - shape[1]).argsort(dim=1)
        fill = self._fill_encoder if self.model.config.is_encoder else simple_generate
        settings = {"temperature": temperature, "vocab_size": self.config.mask_token_id}
        rows = zip(order, unknown.sum(dim=1).tolist(), uniforms[1], tokens, strict=True)
        filled = [fill(self.model, o, [1] * n, u, t, **settings)[0] for o, n, u, t in rows]
        return torch.stack(filled)

    def _fill_encoder(self, model, order, sizes, uniforms, tokens, temperature, vocab_size):
        for position in order[len(order) - len(sizes) :]:
            logits = self(tokens[None]).logits[0, position, None, :vocab_size].double()
            weights = (logits / (temperature or 1)).softmax(dim=-1)
            token = draw(weights, uniforms[position, None]) if temperature else weights.argmax(-1)
            tokens = tokens.index_put((position[None],), token)
        return tokens, None
