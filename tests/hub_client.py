"""What a user of `transformers` does with exported folders: test_hub.py runs this file in a process
that cannot import the project, as python -I hub_client.py FOLDER..."""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

assert all(
    importlib.util.find_spec(name) is None
    for name in ("model", "sampling", "checkpoints")
)


def use(folder: Path) -> dict:
    """Everything that the tests compare, of one folder. case.pt: its inputs."""
    case = torch.load(folder.with_suffix(".pt"))
    found = {}
    if case["texts"]:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
        how = {"add_special_tokens": False}
        found = {"ids": [tokenizer(text, **how).input_ids for text in case["texts"]]}
        found |= {
            "mask": tokenizer.mask_token_id,
            "back": tokenizer.batch_decode(found["ids"]),
        }
    if not (folder / "model.safetensors").exists():
        return found
    model = AutoModel.from_pretrained(folder, trust_remote_code=True)
    with torch.no_grad():
        found["logits"] = model(**case["inputs"]).logits
    found |= {
        name: model.generate(**keywords) for name, keywords in case["generate"].items()
    }
    found["refused"] = {
        name: refusal(model, *call) for name, call in case["refused"].items()
    }
    if case["card"]:
        code = re.search(
            "```python\n(.*)```", (folder / "README.md").read_text(), re.DOTALL
        )[1]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code.replace("FOLDER", str(folder)), {})
        found["printed"] = out.getvalue()
    found["embeddings"] = model.get_input_embeddings() is model.model.wte
    found |= continued(folder, case)
    # Fine-tuned for a step, and saved as transformers does.
    loss = model(**case["labelled"]).loss
    found["loss"] = loss.item()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(folder.with_name(f"{folder.name}-tuned"))
    found["tuned"] = {name: p.detach() for name, p in model.model.named_parameters()}
    return found


def continued(folder: Path, case: dict) -> dict:
    """What the library's own ways of continuing a text give, of decoders."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except ValueError as error:
        return {"causal": str(error)}
    tokens = case["labelled"]["input_ids"]
    padded = torch.nn.functional.pad(tokens, (3, 0))
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (3, 0))
    greedy = {"do_sample": False, "max_new_tokens": 5, "pad_token_id": 0}
    with torch.no_grad():
        logits = model(padded, attention_mask=mask).logits[:, 3:]
        made = model.generate(padded, attention_mask=mask, **greedy)
        sampled = model.generate(
            tokens, do_sample=True, top_p=0.9, max_new_tokens=5, pad_token_id=0
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    if tokenizer.pad_token is None:
        raise AssertionError("no token to pad with")
    batch = tokenizer(["x", "a longer text"], padding=True, return_tensors="pt")
    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = pipe("The cat", max_new_tokens=3)[0]["generated_text"]
    fresh = AutoModelForCausalLM.from_config(model.config, trust_remote_code=True)
    return {
        "causal": logits,
        "continued": made[:, 3:],
        "sampled": sampled.shape,
        "padded": batch.attention_mask,
        "text": text,
        "fresh": {name: p.detach() for name, p in fresh.model.named_parameters()},
    }


def refusal(model, method, keywords):
    try:
        getattr(model, method)(**keywords)
    except ValueError as error:
        return str(error)


for path in map(Path, sys.argv[1:]):
    torch.save(use(path), path.with_suffix(".found.pt"))
