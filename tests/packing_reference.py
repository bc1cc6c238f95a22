"""The sedd packing as the package `datasets` makes it, written from the protocol without the code
under test.

python packing_reference.py JOB.json: each job is {"kind": "ptb"|"lambada", "source", "rows":
null|N, "block_size", "out"}; the blocks go to the .npy file `out`, int64 (number of blocks,
block_size).
"""

import json
import sys
from itertools import chain

import numpy as np
import tiktoken
from datasets import Dataset, disable_progress_bars


def ptb(text):
    text = (
        text.replace(" 's", "'s")
        .replace("s ' ", "s' ")
        .replace(" n't", "n't")
        .replace(" \n ", "\n")
    )
    text = text.replace("\\/", "/")
    for _ in range(10):
        text = text.replace(" N ", " 1 ")
    return text.replace("$ 1", "$1").replace("# 1", "#1").replace("<unk>", "?")


def lambada(text):
    return "\n" + text.replace("\u201c", '"').replace("\u201d", '"').strip()


def blocks(kind, source, rows, block_size):
    with open(source, encoding="utf-8") as file:
        texts = [line.strip() if kind == "ptb" else json.loads(line)["text"] for line in file][
            :rows
        ]
    detokenise = {"ptb": ptb, "lambada": lambada}[kind]

    def tokenise(batch):
        encoding = tiktoken.get_encoding("r50k_base")
        return {
            "ids": [
                encoding.encode_ordinary(detokenise(text)) + [encoding.eot_token]
                for text in batch["text"]
            ]
        }

    def group(batch):
        ids = list(chain(*batch["ids"]))
        whole = len(ids) // block_size * block_size
        return {"ids": [ids[start : start + block_size] for start in range(0, whole, block_size)]}

    data = Dataset.from_dict({"text": texts}).map(
        tokenise, batched=True, num_proc=8, remove_columns=["text"]
    )
    return np.array(data.map(group, batched=True, num_proc=8)["ids"][:], dtype=np.int64)


if __name__ == "__main__":
    disable_progress_bars()
    with open(sys.argv[1], encoding="utf-8") as jobs:
        for job in json.load(jobs):
            np.save(job.pop("out"), blocks(**job))
