"""What a user of `transformers` does with exported folders: test_hub.py runs this file
in a process that cannot import the project, as python -I hub_client.py FOLDER..."""

import contextlib
import importlib.util
import io
import re
import shutil
import sys
from pathlib import Path

import safetensors.torch
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

assert all(
    importlib.util.find_spec(name) is None
    for name in ("model", "sampling", "checkpoints")
)


def use(folder: Path) -> dict:
    """Everything that the tests compare, of one folder. case.pt: its inputs."""
    case = torch.load(folder.with_suffix(".pt"))
    outputs = {}
    if case["texts"]:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        outputs["ids"] = [
            tokenizer(text, add_special_tokens=False).input_ids
            for text in case["texts"]
        ]
        outputs["mask"] = tokenizer.mask_token_id
        outputs["back"] = tokenizer.batch_decode(outputs["ids"])
    if not (folder / "model.safetensors").exists():
        return outputs
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        outputs["logits"] = model(**case["inputs"]).logits
    for name, keywords in case["generate"].items():
        outputs[name] = model.generate(**keywords)
    outputs["refused"] = {
        name: refusal(model, method, keywords)
        for name, (method, keywords) in case["refused"].items()
    }
    if case["card"]:
        card = (folder / "README.md").read_text()
        code = re.search("```python\n(.*)```", card, re.DOTALL)[1]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code.replace("FOLDER", str(folder)), {})
        outputs["printed"] = out.getvalue()
    outputs["embeddings"] = model.get_input_embeddings() is model.model.wte
    outputs["rows"] = padded_rows(model, case)
    outputs["lacking"] = refusal(AutoModel, "from_pretrained", lacking(folder))
    outputs.update(continued(folder, case))
    # Fine-tuned for a step, and saved as transformers does.
    loss = model(**case["labelled"]).loss
    outputs["loss"] = loss.item()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    tuned = folder.with_name(f"{folder.name}-tuned")
    model.save_pretrained(tuned)
    again = AutoModel.from_pretrained(tuned, trust_remote_code=True)
    with torch.no_grad():
        outputs["saved"] = model(**case["inputs"]).logits
        outputs["again"] = again(**case["inputs"]).logits
    outputs["tuned"] = {name: p.detach() for name, p in model.model.named_parameters()}
    return outputs


def padded_rows(model, case: dict) -> list[tuple]:
    """Return what the model gives for rows of 12 and 9 tokens, alone and in one padded
    batch: logits and filled sequences, by side of the padding."""
    filling = {"input_ids": case["gap"], "do_sample": False, "order": "l2r"}
    pairs = []
    for side in ("left", "right"):
        mask = torch.ones(2, 12, dtype=torch.long)
        padding = slice(3) if side == "left" else slice(9, 12)
        mask[1, padding] = 0
        for method, inputs in (("forward", case["inputs"]), ("generate", filling)):
            function = getattr(model, method)
            for alone, together in alone_and_together(function, inputs, mask):
                pairs.append((method, side, alone, together))
    return pairs


def alone_and_together(function, inputs, mask):
    """Yield, for both rows, the output alone and in the padded batch, without padding.
    Logits are in the order of the inputs, sequences by position."""
    order = inputs.get("order")
    batch = dict(inputs)
    batch["input_ids"] = inputs["input_ids"] * mask
    together = output(function(**batch, attention_mask=mask))
    for row, real in enumerate(mask == 1):
        one = dict(inputs)
        one["input_ids"] = batch["input_ids"][row, real][None]
        shown = real
        if isinstance(order, torch.Tensor):
            shown = real[order[row]]
            first = real.nonzero()[0]
            one["order"] = (order[row][shown] - first)[None]
        yield output(function(**one))[0], together[row, shown]


def output(result):
    """Return the tensor of a call: logits, or sequences."""
    return getattr(result, "logits", result).detach()


def lacking(folder: Path) -> dict:
    """Return the arguments of from_pretrained for a copy of a folder without one
    tensor."""
    copy = folder.with_name(f"{folder.name}-lacking")
    shutil.copytree(folder, copy)
    tensors = safetensors.torch.load_file(copy / "model.safetensors")
    del tensors["model.blocks.0.attn.proj.weight"]
    safetensors.torch.save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return {"pretrained_model_name_or_path": copy, "trust_remote_code": True}


def continued(folder: Path, case: dict) -> dict:
    """What the library's own ways of continuing a text give, of decoders."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except ValueError as error:
        return {"causal": str(error)}
    tokens = case["labelled"]["input_ids"]
    padded = torch.nn.functional.pad(tokens, (3, 0))
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (3, 0))
    begun = tokens.index_fill(1, torch.tensor(0), model.config.start_token_id)
    with torch.no_grad():
        logits = model(padded, attention_mask=mask).logits[:, 3:]
        losses = [
            model(tokens, labels=tokens).loss,
            padded_loss(model, tokens, padding=(3, 0)),
            padded_loss(model, tokens, padding=(0, 3)),
        ]
        after_begin = model(begun).logits
        without_begin = model(begun[:, 1:]).logits
        generated = model.generate(
            padded,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=5,
            pad_token_id=0,
        )
        sampled = model.generate(
            tokens, do_sample=True, top_p=0.9, max_new_tokens=5, pad_token_id=0
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    if tokenizer.pad_token is None:
        raise AssertionError("no token to pad with")
    # A text whose next token is certainly its end.
    ended = model.generate(
        tokens,
        do_sample=False,
        max_new_tokens=5,
        sequence_bias={(tokenizer.eos_token_id,): 1e4},
    )
    batch = tokenizer(["x", "a longer text"], padding=True, return_tensors="pt")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = pipe("The cat", max_new_tokens=3)[0]["generated_text"]
    fresh = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    return {
        "causal": logits,
        "losses": losses,
        "refused padding": refusal(
            model,
            "generate",
            {"inputs": tokens, "attention_mask": mask.flip(1)[:, 3:]},
        ),
        "after begin": (after_begin, without_begin),
        "refused masks": refusal(model, "forward", {"input_ids": case["gap"]}),
        "refused positions": refusal(
            model,
            "forward",
            {"input_ids": tokens, "position_ids": torch.zeros_like(tokens)},
        ),
        "continued": generated[:, 3:],
        "sampled": sampled.shape,
        "ended": ended,
        "padded": batch.attention_mask,
        "text": text,
        "fresh": {name: p.detach() for name, p in fresh.model.named_parameters()},
    }


def padded_loss(model, tokens, padding: tuple[int, int]):
    """Return the loss of texts with padding (before, after), counted in tokens."""
    return model(
        torch.nn.functional.pad(tokens, padding),
        attention_mask=torch.nn.functional.pad(torch.ones_like(tokens), padding),
        labels=torch.nn.functional.pad(tokens, padding, value=-100),
    ).loss


def refusal(model, method, keywords):
    try:
        getattr(model, method)(**keywords)
    except ValueError as error:
        return str(error)


for path in map(Path, sys.argv[1:]):
    torch.save(use(path), path.with_suffix(".found.pt"))
