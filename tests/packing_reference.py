"""The sedd packing as the package datasets makes it, written from the protocol without
the code under test.

python packing_reference.py JOBS.json: each job is [kind, source, rows or null, block
size, out], kind "ptb" or "lambada"; the blocks go to the .npy file `out`, int64
(number, block size)."""

import json
import sys
from itertools import chain

import numpy as np
import tiktoken
from datasets import Dataset, disable_progress_bars


def ptb(text):
    for old, new in (
        (" 's", "'s"),
        ("s ' ", "s' "),
        (" n't", "n't"),
        (" \n ", "\n"),
        ("\\/", "/"),
    ):
        text = text.replace(old, new)
    for _ in range(10):
        text = text.replace(" N ", " 1 ")
    return text.replace("$ 1", "$1").replace("# 1", "#1").replace("<unk>", "?")


def lambada(text):
    return "\n" + text.replace("\u201c", '"').replace("\u201d", '"').strip()


def blocks(kind, source, rows, block_size):
    with open(source, encoding="utf-8") as file:
        texts = [
            line.strip() if kind == "ptb" else json.loads(line)["text"] for line in file
        ]
    detokenise = {"ptb": ptb, "lambada": lambada}[kind]

    def tokenise(batch):
        encoding = tiktoken.get_encoding("r50k_base")
        ids = [encoding.encode_ordinary(detokenise(text)) for text in batch["text"]]
        return {"ids": [[*row, encoding.eot_token] for row in ids]}

    def group(batch):
        ids = list(chain(*batch["ids"]))
        whole = len(ids) // block_size * block_size
        return {
            "ids": [
                ids[start : start + block_size] for start in range(0, whole, block_size)
            ]
        }

    data = Dataset.from_dict({"text": texts[:rows]})
    data = data.map(tokenise, batched=True, num_proc=8, remove_columns=["text"])
    return np.array(data.map(group, batched=True, num_proc=8)["ids"][:], dtype=np.int64)


if __name__ == "__main__":
    disable_progress_bars()
    with open(sys.argv[1], encoding="utf-8") as jobs:
        for *job, out in json.load(jobs):
            np.save(out, blocks(*job))
