"""Folders for `transformers`: they are used in a process that cannot import the
project, and what it found is compared with the project's own model, tokenizer and
sampler."""

import ast
import base64
import html
import importlib.util
import json
import re
import shutil
import sys
from dataclasses import asdict, replace

import pytest
import safetensors.torch
import torch
from helpers import (
    ALONE,
    ROOT,
    make_data,
    metrics,
    needs_gpt2,
    run_script,
    some_slow,
    tiny_config,
)
from hypothesis import given
from hypothesis import strategies as st
from reference import ENCODERS, ROTARY_GPT, SYSTEMS, make_system, seeded

from aogpt.checkpoints import CheckpointError, hub, load, load_model, store
from aogpt.checkpoints.load import config_of
from aogpt.checkpoints.model_card import model_card
from aogpt.data.tokenizers import END_OF_TEXT, get_tokenizer
from aogpt.evaluation.judges import DecoderJudge, load_judge
from aogpt.sampling.race import draw
from aogpt.sampling.simple import nucleus, simple_generate
from aogpt.sampling.token_choice import TokenChoice, probabilities
from aogpt.scoring import token_log_probs
from aogpt.systems import build_model
from aogpt.systems.encoder import log_linear_noise
from aogpt.systems.parameters import init_weights
from convert import convert
from train import train

VOCABULARY = 257
MASK = 257
LENGTH = 40
START = 7  # a token that stands for a begin-of-text of a pretrained model
PLAIN = ["GPT-2", ROTARY_GPT, "Llama, plain"]
NAMES = [*SYSTEMS, "Llama, A3", "Llama, plain"]
# A decoder of each kind of conditioning, a plain GPT and an encoder.
FEW = ["AO-GPT", "GPT-2", "target rotary", "two_stream", "Llama, A3", "SEDD"]
every_system = pytest.mark.parametrize(
    "system",
    some_slow(
        [(name,) for name in NAMES],
        lambda system: system in FEW,
        "the client uses the folder of each system",
    ),
)
TEXTS = [
    "The cat sat.",
    " two  spaces\n\n\ttabs ",
    "naïve 漢字 \U0001f600 a'll",
    "",
    "x[MASK][MASK] y",
]
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers"
)


def write_export(folder, model, **changes):
    """Write a folder as convert.py does, of a model of this process."""
    folder.mkdir()
    weights = folder / "model.safetensors"
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    safetensors.torch.save_file(tensors, weights)
    settings = {
        "format": "aogpt-export-2",
        "model": asdict(model.config),
        "step": 3,
        "weights": "raw",
        "tokenizer": "bytes",
        "vocab_size": VOCABULARY,
        "files": {"model.safetensors": store.sha256_file(weights)},
        "scored_from": 0,
        "system": None,
        "source": "out/x",
    }
    settings.update(changes)
    settings = json.loads(json.dumps(settings))
    settings["sha256"] = store.digest(settings)
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def tiny(system):
    """float32, of a table with more rows than the vocabulary has ids, except of an
    encoder."""
    tokens = VOCABULARY if system in ENCODERS else 300
    return make_system(system, dtype=torch.float32, tokens=tokens, block_size=LENGTH)


def inputs_of(system):
    """What the client calls, by what it is compared with."""
    tokens = torch.randint(VOCABULARY, (2, 12), generator=seeded(1))
    assert START not in tokens[:, 0]
    order = torch.stack([torch.randperm(12, generator=seeded(i)) for i in (2, 3)])
    gap = tokens.clone()
    gap[:, -5:] = MASK
    if system not in PLAIN:
        gap[0, 2:6] = MASK
    long = torch.zeros(1, LENGTH + 1, dtype=torch.long)
    refused = {"at most": ("forward", {"input_ids": long})}
    refused["continuing too far"] = (
        "generate",
        {"input_ids": tokens, "max_new_tokens": LENGTH},
    )
    hidden = {"input_ids": tokens, "attention_mask": torch.zeros(2, 12)}
    refused["hidden row"] = "forward", hidden
    another = {"input_ids": tokens, "attention_mask": torch.ones(1, 12)}
    refused["another mask"] = "generate", another
    packed = torch.tensor([0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5])[None]
    refused["packed"] = "forward", {"input_ids": tokens, "position_ids": packed}
    few = {"input_ids": tokens, "position_ids": packed[:, :5]}
    refused["few positions"] = "forward", few
    refused["no nucleus"] = "generate", {"input_ids": gap, "top_p": 0.0}
    refused["no such order"] = "generate", {"input_ids": gap, "order": "r2l"}
    refused["no permutation"] = "generate", {"input_ids": gap, "order": order * 0}
    refused["start"] = (
        "generate",
        {"input_ids": tokens.index_fill(1, torch.tensor(0), START)},
    )
    refused["unknown id"] = "forward", {"input_ids": tokens + 400}
    if system in ENCODERS:
        inputs = {"input_ids": gap}
        refused["order"] = "forward", {"input_ids": gap, "order": order}
    else:
        inputs = {"input_ids": tokens, "order": None if system in PLAIN else order}
        refused["masks"] = "forward", {"input_ids": gap}
    if system in PLAIN:
        refused["order"] = "forward", {"input_ids": tokens, "order": order}
        refused["gap"] = "generate", {"input_ids": gap.flip(1)}
    if system == "GPT-2":
        refused["no prompt"] = "generate", {"input_ids": gap * 0 + MASK}
    filled = {"input_ids": gap, "max_new_tokens": 6, "order": "l2r", "seed": 5}
    if system not in PLAIN:
        longer = torch.cat([order, torch.arange(12, 18).expand(2, 6)], 1)
        filled["order"] = longer.flip(1)
    labelled = dict(inputs)
    labelled["labels"] = tokens
    if system in ENCODERS:
        labelled["labels"] = torch.where(gap == MASK, tokens, -100)
    return {
        "texts": TEXTS if system == "AO-GPT" else [],
        "inputs": inputs,
        "labelled": labelled,
        "generate": {
            "filled": filled,
            "greedy": {**filled, "temperature": 0},
            "not sampled": {**filled, "do_sample": False},
            "nucleus": {**filled, "top_p": 0.5},
            "default": {"input_ids": gap, "attention_mask": torch.ones(2, 12)},
        },
        "refused": refused,
        "gap": gap,
        "card": system in ("AO-GPT", "GPT-2", "SEDD"),
    }


def library_file(folder):
    """Return the tokenizer of a pretrained model's tokenizer.json: bytes, and a
    begin-of-text that it writes itself."""
    from tokenizers import Tokenizer, processors

    values = json.loads(hub.library_tokenizer(get_tokenizer("bytes")).to_str())
    values["added_tokens"].pop()  # [MASK]
    tokenizer = Tokenizer.from_str(json.dumps(values))
    tokenizer.add_special_tokens(["<s>"])
    start = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", None, start)
    tokenizer.save(str(folder / "tokenizer.json"))
    return get_tokenizer("tokenizer.json", folder=folder)


def used_by_client(root, systems, tokenizers):
    """What the client found in the folders of these systems, and of these tokenizers
    alone, by name; the folders and cases are under `folder`."""
    result = {"folder": root}
    for system in systems:
        scored_from = 1 if system == "GPT-2" else 0
        source = root / f"{system} source"
        write_export(source, tiny(system), scored_from=scored_from)
        convert(str(source), root / system, hub=True)
        place = root / system / "config.json"
        settings = json.loads(place.read_text())
        settings["start_token_id"] = START
        place.write_text(json.dumps(settings))
        torch.save(inputs_of(system), root / f"{system}.pt")
    for name, tokenizer in tokenizers.items():
        (root / name).mkdir()
        result[name, "ids"] = hub.write_tokenizer(root / name, tokenizer)
        for file in ("config.json", "modeling_aogpt.py"):
            shutil.copy(root / "AO-GPT" / file, root / name)
        torch.save({"texts": TEXTS}, root / f"{name}.pt")
    names = [*systems, *tokenizers]
    folders = [root / name for name in names]
    run_apart(root, ROOT / "tests" / "hub_client.py", *folders)
    for name in names:
        result[name] = torch.load(root / f"{name}.found.pt")
    return result


def run_apart(root, *words):
    """Python without this project on its path, with caches under this folder."""
    run_script(
        "-I",
        *words,
        HF_HOME=str(root / "home"),
        HF_MODULES_CACHE=str(root / "modules"),
        HF_HUB_OFFLINE="1",
        PYTHONPATH="",
    )


@pytest.fixture(scope="module")
def outputs_of_few(tmp_path_factory):
    root = tmp_path_factory.mktemp("hub")
    tokenizers = {"english": get_tokenizer("english"), "library": library_file(root)}
    return used_by_client(root, FEW, tokenizers)


@pytest.fixture(scope="module")
def outputs_of_others(tmp_path_factory):
    slow_names = [name for name in NAMES if name not in FEW]
    return used_by_client(tmp_path_factory.mktemp("hub"), slow_names, {})


@pytest.fixture
def client_outputs(request):
    """What the client found, of a slow test in the folders of the other systems."""
    if request.node.get_closest_marker("slow"):
        return request.getfixturevalue("outputs_of_others")
    return request.getfixturevalue("outputs_of_few")


# Reads a folder and a file of tokens and orders; writes log p along them.
OF_EARLIER_VERSION = """
import sys, torch
from transformers import AutoModel, AutoTokenizer
folder, inputs, output = sys.argv[1:]
model = AutoModel.from_pretrained(folder, trust_remote_code=True).float()
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
tokens, order = torch.load(inputs)
logits = model(tokens, order=order).logits
torch.save({"logits": logits, "ids": tokenizer("a cat").input_ids}, output)
"""


def test_a_folder_of_version_0_1_loads_with_its_own_code_and_here(tmp_path):
    """It has all its code in one file."""
    shutil.unpack_archive(ROOT / "tests" / "hub_export_0.1.zip", tmp_path)
    folder = tmp_path / "hub_export"
    tokens = torch.randint(256, (3, 16), generator=seeded(0))
    order = torch.stack([torch.randperm(16, generator=seeded(i)) for i in range(3)])
    inputs = tmp_path / "inputs.pt"
    output = tmp_path / "output.pt"
    torch.save((tokens, order), inputs)
    run_apart(tmp_path, "-c", OF_EARLIER_VERSION, folder, inputs, output)
    result = torch.load(output)
    assert result["ids"] == list(b"a cat")
    loaded = load(folder)
    assert (loaded.step, loaded.tokenizer) == (20, "bytes")
    with torch.no_grad():
        logits = loaded.model.logits(tokens, order)
    torch.testing.assert_close(result["logits"].float(), logits, rtol=0, atol=1e-5)


# ---- the process of a user -----------------------------------------------------------


@every_system
def test_transformers_computes_what_the_project_computes(client_outputs, system):
    model = load_model(client_outputs["folder"] / system)
    inputs, case = of_case(client_outputs, system)
    labels = case["labelled"]["labels"]
    with torch.no_grad():
        if system in ENCODERS:
            masked = inputs["input_ids"] == MASK
            sigma = None
            if model.config.noise:
                sigma = log_linear_noise(masked.double().mean(1))
            with_masks = model.with_masks(inputs["input_ids"], masked)
            logits = model.head_logits(model.hidden(with_masks, sigma))
            log_p = logits.log_softmax(-1)[masked].gather(1, labels[masked][:, None])
        else:
            order = inputs["order"]
            order = torch.arange(12).expand(2, 12) if order is None else order
            logits = model.head_logits(model.hidden(inputs["input_ids"], order))
            log_p = token_log_probs(model, labels, order)[:, int(system == "GPT-2") :]
    torch.testing.assert_close(
        client_outputs[system]["logits"], logits, rtol=0, atol=1e-6
    )
    assert client_outputs[system]["loss"] == pytest.approx(
        -log_p.mean().item(), abs=1e-5
    )


@every_system
def test_generate_fills_masks_with_ids_of_the_vocabulary_and_keeps_the_rest(
    client_outputs, system
):
    calls = of_case(client_outputs, system)[1]["generate"]
    for name, keywords in calls.items():
        gap = keywords["input_ids"]
        filled = client_outputs[system][name]
        assert filled.shape[1] == 12 + keywords.get("max_new_tokens", 0)
        assert filled.min() >= 0
        assert filled.max() < VOCABULARY
        is_prompt = gap != MASK
        assert torch.equal(filled[:, :12][is_prompt], gap[is_prompt])
        assert not is_prompt.all()


@every_system
def test_generate_draws_what_the_model_gives(client_outputs, system):
    """The tokens are those of aogpt/sampling/simple.py (which other tests compare with
    enumeration), of encoders those of the plain loop, given the same order and
    uniforms."""
    model = load_model(client_outputs["folder"] / system)
    calls = of_case(client_outputs, system)[1]["generate"]
    uniforms = torch.rand(2, 2, 18, generator=seeded(5), dtype=torch.float64)[1]
    assert torch.equal(
        client_outputs[system]["not sampled"], client_outputs[system]["greedy"]
    )
    for name in ("filled", "greedy", "nucleus"):
        keywords = calls[name]
        ids = torch.nn.functional.pad(keywords["input_ids"], (0, 6), value=MASK)
        for row in range(2):
            order = torch.arange(18) if system in PLAIN else keywords["order"][row]
            is_prompt = (ids[row] != MASK)[order]
            order = torch.cat(
                [order[is_prompt], order[~is_prompt]]
            )  # stable, as the folder's
            count = int((~is_prompt).sum())
            temperature = keywords.get("temperature", 1.0)
            expected = filled_by_loop if system in ENCODERS else simple_generate
            tokens, _ = expected(
                model,
                order,
                [1] * count,
                uniforms[row],
                ids[row],
                temperature=temperature,
                vocab_size=VOCABULARY,
                top_p=keywords.get("top_p", 1.0),
            )
            assert torch.equal(client_outputs[system][name][row], tokens), name


@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 1.0])
def test_a_folders_nucleus_is_the_samplers(top_p):
    logits = torch.randn(40, 256, generator=seeded(1), dtype=torch.float64) * 3
    logits[0] = 0.0  # where all are equal, lower ids come first
    truncated = nucleus(logits.softmax(dim=-1), top_p)
    expected = probabilities(logits, TokenChoice(top_p=top_p))
    torch.testing.assert_close(
        truncated / truncated.sum(dim=-1, keepdim=True), expected
    )


@every_system
def test_rows_of_a_padded_batch_are_what_they_are_alone(client_outputs, system):
    pairs = client_outputs[system]["rows"]
    assert len(pairs) == 8
    for method, side, alone, padded in pairs:
        if method == "generate":
            assert torch.equal(alone, padded), side
        else:
            torch.testing.assert_close(alone, padded, rtol=0, atol=1e-5, msg=side)


@every_system
def test_a_missing_tensor_is_an_error_and_a_saved_folder_is_read_again(
    client_outputs, system
):
    assert "lacks model.blocks.0.attn.proj.weight" in client_outputs[system]["lacking"]
    assert torch.equal(client_outputs[system]["saved"], client_outputs[system]["again"])


def filled_by_loop(
    model, order, sizes, uniforms, tokens, temperature, vocab_size, top_p
):
    tokens = tokens.clone()
    for position in order[-len(sizes) :].tolist():
        masked = (tokens == MASK)[None]
        sigma = None
        if model.config.noise:
            sigma = log_linear_noise(masked.double().mean(1))
        with torch.no_grad():
            logits = model.logits(model.with_masks(tokens[None], masked), sigma)
        logits = logits[0, position].double()
        if temperature == 0:
            tokens[position] = logits.argmax()
        else:
            p = nucleus(logits.softmax(-1)[None], top_p)
            tokens[position] = draw(p, uniforms[position, None])[0]
    return tokens, None


@every_system
def test_the_library_continues_texts_with_a_decoder_in_padded_batches(
    client_outputs, system
):
    labelled = of_case(client_outputs, system)[1]["labelled"]
    result = client_outputs[system]
    assert result["embeddings"]
    if system in ENCODERS:
        assert "an encoder fills in [MASK]" in result["causal"]
        return
    model = load_model(client_outputs["folder"] / system)
    tokens = labelled["input_ids"]
    with torch.no_grad():
        for _ in range(6):
            longer = torch.nn.functional.pad(tokens, (0, 1))
            steps = torch.arange(longer.shape[1]).expand_as(longer)
            logits = model.logits(longer, steps)[:, 1:]
            if tokens.shape[1] == 12:
                torch.testing.assert_close(result["causal"], logits, rtol=0, atol=1e-5)
            if tokens.shape[1] < 17:
                next_logits = logits[:, -1:, :VOCABULARY]  # ids that the tokenizer has
                tokens = torch.cat([tokens, next_logits.argmax(dim=-1)], dim=1)
    assert torch.equal(result["continued"], tokens)
    # A begin-of-text stands for [None]: it is not read beside it.
    after_begin, without_begin = result["after begin"]
    torch.testing.assert_close(after_begin[:, 1:], without_begin, rtol=0, atol=1e-5)
    assert "no [MASK] is continued" in result["refused masks"]
    assert "one text in each row" in result["refused positions"]
    for loss in result["losses"]:
        torch.testing.assert_close(loss, result["losses"][0], rtol=0, atol=1e-5)
    assert "pad on the left" in result["refused padding"]
    assert result["sampled"] == (2, 17)
    assert result["ended"].shape == (2, 13)  # generate stops at the end of a text
    assert (result["ended"][:, -1] == VOCABULARY - 1).all()
    assert result["padded"].tolist()[0][0] == 0  # on the left
    assert result["text"].startswith("The cat")


@every_system
def test_a_new_model_of_a_folder_has_our_initial_values(client_outputs, system):
    if system in ENCODERS:
        assert "fresh" not in client_outputs[system]
        return
    expected = build_model(tiny(system).config)
    init_weights(expected, seeded(1))
    expected = dict(expected.named_parameters())
    fresh = client_outputs[system]["fresh"]
    assert fresh.keys() == expected.keys()
    for name, p in fresh.items():
        if expected[name].min() == expected[name].max():
            assert torch.equal(p, expected[name]), name
        elif p.numel() >= 1000:
            assert p.std() == pytest.approx(expected[name].std().item(), rel=0.1), name


REFUSALS = {
    "start": "add_special_tokens=False",
    "at most": "41 tokens a sequence; this model takes 1 to 40",
    "continuing too far": "52 tokens a sequence; this model takes 1 to 40",
    "hidden row": "attention_mask hides a whole sequence",
    "another mask": "attention_mask is",
    "packed": "this model reads one text in each row",
    "few positions": "this model reads one text in each row",
    "no nucleus": "give a probability above 0",
    "no such order": "give 'random', 'l2r' or permutations",
    "no permutation": "must be a permutation",
    "unknown id": "this model knows 0 to",
    "order": "leave out order|an encoder has no order",
    "masks": "generate fills in",
    "gap": "a plain GPT only continues",
    "no prompt": "at least one token",
}


@every_system
def test_mistakes_are_told_in_one_line(client_outputs, system):
    for name, message in client_outputs[system]["refused"].items():
        assert "\n" not in message
        assert re.search(REFUSALS[name], message), name


def test_the_code_of_the_model_card_runs(client_outputs):
    for name in ("AO-GPT", "GPT-2", "SEDD"):
        assert client_outputs[name]["printed"].count("\n") >= 2, name
    assert "The cat" in client_outputs["AO-GPT"]["printed"]
    assert "home." in client_outputs["SEDD"]["printed"]


def of_case(client_outputs, system):
    case = torch.load(client_outputs["folder"] / f"{system}.pt")
    return case["inputs"], case


# ---- the tokenizer -------------------------------------------------------------------


def test_transformers_gets_the_ids_of_our_tokenizers_and_a_mask_after_them(
    client_outputs,
):
    for name, key in (
        ("bytes", "AO-GPT"),
        ("english", "english"),
        ("bytes", "library"),
    ):
        tokenizer = get_tokenizer(name)
        start = int(key == "library")
        # that file has a begin-of-text, which is no id of a text
        mask = tokenizer.vocab_size + start
        assert client_outputs[key]["mask"] == mask
        if key != "AO-GPT":
            start_id = 257 if start else None
            assert client_outputs[key, "ids"] == (mask, start_id, False)
        *ids, masked = client_outputs[key]["ids"]
        assert ids == [tokenizer.encode(text) for text in TEXTS[:-1]]
        assert masked == [*tokenizer.encode("x"), mask, mask, *tokenizer.encode(" y")]
        assert client_outputs[key]["back"] == TEXTS


WORDS = st.text(st.characters(exclude_categories=["Cs"])) | st.text(
    "aths \n\t'é漢\u0301\xa0<|", max_size=40
)


@pytest.mark.parametrize(
    "name", ["bytes", "english", "own", pytest.param("gpt2", marks=needs_gpt2)]
)
def test_the_written_tokenizer_gives_our_ids_of_any_text(name, tmp_path):
    if name == "own":  # no merge gives the last token
        tokens = [bytes([i]) for i in range(256)]
        tokens += [b"th", b"ath", b"hs", b" a", b" aaths"]
        path = tmp_path / "own.tiktoken"
        with path.open("wb") as file:
            for i, token in enumerate(tokens):
                file.write(base64.b64encode(token) + b" %d\n" % i)
        name = str(path)
    tokenizer = get_tokenizer(name)
    library_tokenizer = hub.library_tokenizer(tokenizer)
    assert library_tokenizer.get_vocab_size() == tokenizer.vocab_size + 1

    @given(WORDS)
    def check(text):
        if END_OF_TEXT not in text and hub.MASK not in text:
            ids = library_tokenizer.encode(text).ids
            assert ids == tokenizer.encode(text)
            assert library_tokenizer.decode(ids, skip_special_tokens=False) == text

    check()


# ---- the file of code ----------------------------------------------------------------


def test_the_files_of_code_import_each_other_and_torch_and_transformers_alone(tmp_path):
    hub.write_code(tmp_path)
    allowed = {"torch", "transformers", *sys.stdlib_module_names}
    relative = {}
    for path in tmp_path.iterdir():
        relative[path.stem] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level > 0:
                assert node.level == 1, path.name
                relative[path.stem].add(node.module)
            elif isinstance(node, ast.ImportFrom):
                assert node.module.split(".")[0] in allowed
            elif isinstance(node, ast.Import):
                assert {name.name.split(".")[0] for name in node.names} <= allowed
        source = hub.CODE[path.name]
        assert "MIT License. Copyright" in path.read_text().splitlines()[0]
        assert f"A copy of aogpt/{source} " in path.read_text().splitlines()[1]
        last = (ROOT / "aogpt" / source).read_text().splitlines()[-3:]
        assert path.read_text().splitlines()[-3:] == last
    # transformers 5.0 copies only what this file imports itself.
    assert relative.keys() - relative["modeling_aogpt"] == {"modeling_aogpt"}
    for names in relative.values():
        assert names <= relative.keys()


# ---- the way back --------------------------------------------------------------------


@every_system
def test_a_folder_is_read_back_without_running_its_code(client_outputs, system):
    """Also the one that transformers saved after a step of training."""
    written = dict(tiny(system).named_parameters())
    for name, expected in (
        (system, written),
        (f"{system}-tuned", client_outputs[system]["tuned"]),
    ):
        folder = client_outputs["folder"] / name
        (folder / "modeling_aogpt.py").write_text(
            "raise SystemExit('this code was run')"
        )
        loaded = load(folder)
        if system not in ENCODERS:
            assert isinstance(
                load_judge(str(folder), torch.device("cpu")), DecoderJudge
            )
        parameters = dict(loaded.model.named_parameters())
        assert parameters.keys() == expected.keys()
        assert all(torch.equal(p, expected[name]) for name, p in parameters.items())
        assert config_of(folder) == loaded.model.config
        assert loaded.step == 3
        assert loaded.tokenizer == "bytes"
        assert loaded.vocab_size == VOCABULARY
    assert not torch.equal(parameters["wte.weight"], written["wte.weight"])


def test_a_changed_export_in_a_folder_is_refused(tmp_path):
    source = write_export(tmp_path / "x", tiny("AO-GPT"))
    convert(str(source), tmp_path / "hub", hub=True)
    settings = json.loads((tmp_path / "hub" / "config.json").read_text())
    settings["aogpt"]["step"] = 4
    (tmp_path / "hub" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="config.json is damaged"):
        load(tmp_path / "hub")


@pytest.fixture
def own(tmp_path):
    """Return the folder of a model with a vocabulary of the user's."""
    vocabulary = tmp_path / "mine.tiktoken"
    lines = get_tokenizer("english").file.splitlines(True)
    vocabulary.write_bytes(b"".join(lines[:300]))
    sha256 = get_tokenizer(str(vocabulary)).sha256
    model = make_system("AO-GPT", dtype=torch.float32, tokens=320, block_size=LENGTH)
    vocabulary.rename(tmp_path / "tokenizer.tiktoken")
    source = write_export(
        tmp_path / "x",
        model,
        tokenizer="tokenizer.tiktoken",
        tokenizer_sha256=sha256,
        vocab_size=301,
    )
    convert(str(source), tmp_path / "hub", hub=True)
    return tmp_path / "hub"


def test_a_vocabulary_of_the_users_travels_through_a_repository(
    own, tmp_path, monkeypatch
):
    import huggingface_hub

    tokenizer = load(own).get_tokenizer()
    (tmp_path / "tokenizer.tiktoken").unlink()
    assert json.loads((own / "config.json").read_text())["mask_token_id"] == 301
    wanted = []

    def snapshot_download(repo, allow_patterns):
        wanted.extend(allow_patterns)
        return own

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loaded = load("me/mine")
    assert loaded.get_tokenizer().sha256 == tokenizer.sha256 == loaded.tokenizer_sha256
    assert {"tokenizer.tiktoken", "tokenizer.json", "config.json"} <= set(wanted)
    assert not any("*.py" in pattern for pattern in wanted)


# ---- the model card ------------------------------------------------------------------


@pytest.mark.parametrize("weights", ["ema", "raw"])
def test_the_model_card_says_what_the_run_recorded(trained, tmp_path, weights):
    config = trained
    convert(str(config.run_folder), tmp_path / "hub", weights, hub=True)
    card = (tmp_path / "hub" / "README.md").read_text()
    suffix = "_raw" if weights == "raw" else ""
    for kind, orders in (("l2r", "left to right"), ("random", "any order")):
        loss = metrics(config, f"val_loss_{kind}{suffix}")[10]
        errors = metrics(config, f"val_error_{kind}")
        error = f"{errors[10]:.4f}" if kind == "random" and not suffix else "unknown"
        assert f"| {orders} | {loss:.4f} | {error} |" in card
    state = store.read_values(store.find(config.run_folder)[-1])
    count = sum(p.numel() for p in load_model(config.run_folder).parameters())
    splits = state["data"]["splits"]
    for words in (
        f"It has {count:,} parameters",
        f"step {state['step']:,}",
        f"{state['best']['loss']:.4f} at step {state['best']['step']}",
        f"| train | {splits['train']['tokens']:,} |",
        f"| val | {splits['val']['tokens']:,} |",
        "lr = 0.003",
        "batch_size = 8",
        'kind = "mixture"',
        "ema_decay = 0.9",
        "seed = 7",
        "library_name: transformers",
    ):
        assert words in card, words


def test_names_and_odd_metrics_are_text_of_the_card_and_no_more(trained, tmp_path):
    """A name is shown as it is; what is no number is left out; an older row counts."""
    loaded = load(trained.run_folder)
    copy = tmp_path / "step_00000010"
    shutil.copytree(store.find(trained.run_folder)[-1], copy)
    state = json.loads((copy / store.STATE).read_text())
    state["data"]["name"] = "a` <script>x()</script> ![](//b)\n# zz"
    state["data"]["splits"]["x|<b>"] = {"tokens": "many", "documents": None}
    del state["torch"]
    (copy / store.STATE).write_text(json.dumps(state))
    rows = [
        {"val_loss_l2r": 9.0},
        {"step": None, "val_loss_l2r": 8.0},
        {"step": 2, "val_loss_l2r": 1.25, "val_error_l2r": "small"},
        {"step": 3, "val_loss_l2r": None, "val_loss_random": "low"},
        {"step": 4, "val_loss_l2r": [], "val_loss_random": 10**400},
    ]
    card = model_card(replace(loaded, path=str(copy)), rows)
    assert "<script" not in card
    assert "<b>" not in card
    assert "![" not in card
    assert "\n# zz" not in card
    assert "| x&#124;&#60;b&#62; |  |  |" in card
    shown = html.unescape(re.search("<code>(.*)</code>[.]", card)[1])
    assert shown == r"a` <script>x()</script> ![](//b)\n# zz"
    assert "Of step 2." in card
    assert "| left to right | 1.2500 | unknown |" in card
    assert "| any order |" not in card


def test_a_card_without_a_run_has_no_figures_of_one(tmp_path):
    source = write_export(tmp_path / "x", tiny("AO-GPT"))
    convert(str(source), tmp_path / "hub", hub=True)
    card = (tmp_path / "hub" / "README.md").read_text()
    assert "## Use" in card
    assert "## Limits" in card
    assert not any(f"## {part}" in card for part in ("Data", "Training", "Validation"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained")
    config = tiny_config(make_data(folder), folder / "out", steps=10, eval__draws=2)
    train(config, ALONE)
    return config
