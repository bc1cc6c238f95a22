"""What a user of `transformers` does with exported folders: test_hub.py runs this file in a process
that cannot import the project, as python -I hub_client.py FOLDER..."""

import contextlib
import importlib.util
import io
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer

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
    # Fine-tuned for a step, and saved as transformers does.
    loss = model(**case["labelled"]).loss
    found["loss"] = loss.item()
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.save_pretrained(folder.with_name(f"{folder.name}-tuned"))
    found["tuned"] = {name: p.detach() for name, p in model.model.named_parameters()}
    return found


def refusal(model, method, keywords):
    try:
        getattr(model, method)(**keywords)
    except ValueError as error:
        return str(error)


for path in map(Path, sys.argv[1:]):
    torch.save(use(path), path.with_suffix(".found.pt"))
