"""make reproduce: on stand-ins of the released files, in the layouts and from the
places of the real ones, in GPT-2's own vocabulary."""

import json
import re

import pytest
import test_released
import torch
from helpers import needs_gpt2, prepared, write_jsonl

from aogpt.checkpoints import load
from aogpt.runtime.errors import UserError
from studies import reproduce

BLOCK = 16


@pytest.fixture
def stand_ins(tmp_path, monkeypatch):
    """Released files by repository, and two sets; what was downloaded, in order."""
    monkeypatch.setattr(test_released, "VOCAB", 50304)
    monkeypatch.setattr(test_released, "TOKENS", 50257)
    monkeypatch.setattr(test_released, "BLOCK", BLOCK)
    downloads = []

    def download_file(repository, file):
        downloads.append(f"{repository}/{file}")
        path = tmp_path / "hub" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        layout = "sigma-GPT" if "sigmaGPT" in file else "AO-GPT"
        torch.save(test_released.container(layout)[0], path)
        return str(path)

    def download_folder(repository, allow_patterns):
        downloads.append(repository)
        layout = "SEDD" if "sedd" in repository else "RADD"
        settings, state, _ = test_released.diffusion(layout)
        folder = tmp_path / "hub" / repository
        return str(test_released.write_folder(folder, settings, state))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download_file)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download_folder)
    texts = [f"It was number {n} of a long list of short sentences." for n in range(40)]
    for name in ("ptb", "lambada"):
        source = write_jsonl(tmp_path / f"{name}.jsonl", texts)
        if name == "ptb":
            source = tmp_path / "ptb.txt"
            source.write_text("\n".join(texts))
        prepared(name, tmp_path / name, source, tokenizer="gpt2", block_size=BLOCK)
    monkeypatch.setattr(reproduce, "prepared", lambda name: tmp_path / name)
    return downloads


@pytest.mark.slow(reason="six processes of eval_ppl.py, a minute")
@needs_gpt2
def test_tables_are_made_of_released_files_and_go_on(stand_ins, script, tmp_path):
    words = ["--models", "AO-GPT", "sigma-GPT", "SEDD", "--datasets", "ptb", "lambada"]
    words += [
        "--max-sequences",
        4,
        "--num-orders",
        2,
        "--ensemble",
        1,
        8,
        "--out",
        tmp_path / "out",
    ]
    status, _, errors = script(reproduce, *words)
    assert status == 0, errors
    repository = "Cauthyyy/AO-GPT-MDM"
    assert stand_ins == [
        f"{repository}/124M/124M-AdaLN6_NoRep_cond_128_trunc_bs1M_wd_0.03_drop_0.0"
        "_CL_0.1_qknorm/ckpt_250000.pt",
        f"{repository}/sigmaGPT/124M/ckpt_1000000.pt",
        "louaaron/sedd-small",
    ]
    text = (tmp_path / "out" / "README.md").read_text()
    rows = {
        line.split("|")[1].strip(): line
        for line in text.splitlines()
        if line[:2] == "| "
    }
    assert "135.96" in rows["AO-GPT, left to right (small)"]
    assert "/ 54.92" in rows["AO-GPT, any order, 64 orders (small)"]
    # not measured
    assert rows["AO-GPT, any order, 64 orders (small)"].count("| - /") == 2
    measured = json.loads(
        (tmp_path / "out" / "AO-GPT_small_random_ensemble_4.json").read_text()
    )["results"]
    for row in measured:
        if (row["orders"], row["ensemble"], row["dataset"]) == ("random", 8, "ptb"):
            line = rows["AO-GPT, any order, 8 orders (small)"]
            assert f"{row['perplexity']:.2f}" in line
            break
    else:
        raise AssertionError("no ensemble was measured")
    # A random model is far from every published number, and the table says so.
    assert rows["SEDD, any order (small)"].count("**") == 4
    assert "RADD, any order (small)" not in rows
    # Again: everything is at hand but the weights, which the hub's own cache keeps.
    files = {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.json")
    }
    assert script(reproduce, *words)[0] == 0
    assert files == {
        path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.json")
    }


def test_results_of_other_options_are_not_taken(tmp_path, monkeypatch):
    commands = []

    def report_of(*words):
        commands.append(words)
        return {"results": [{"call": len(commands)}]}

    monkeypatch.setattr(reproduce, "report_of", report_of)
    models = {model.name: model for model in reproduce.read_config().models}

    def evaluated(sets, **options):
        arguments = reproduce.Arguments(out=tmp_path, quick=True, **options)
        folders = [tmp_path / name for name in sets]
        results = reproduce.evaluated(
            arguments, models["AO-GPT"], "small", "path", folders
        )
        return [result["call"] for result in results]

    results = [evaluated(["ptb"])]
    assert evaluated(["ptb"]) == results[0]
    for options in ({}, {"num_orders": 64}, {"num_orders": 64, "ensemble": (1,)}):
        results.append(evaluated(["ptb", "lambada"], **options))
        assert evaluated(["ptb", "lambada"], **options) == results[-1]
    assert len(set(map(tuple, results))) == 4


def test_one_sequence_has_no_interval():
    line = reproduce.read_config().lines[0]
    row = {
        "dataset": "ptb",
        "orders": line.orders,
        "ensemble": line.ensemble,
        "perplexity": 20.0,
        "perplexity_95": [None, None],
        "sequences": 1,
    }
    assert reproduce.cell([row], "ptb", line, 30.0, ["a"], 256) == "20.00 / 30.00"


def test_a_cell_is_bold_outside_of_both_intervals():
    """With four times the published number's sequences the interval of that number is
    twice as wide as ours."""
    line = reproduce.read_config().lines[0]
    row = {
        "dataset": "ptb",
        "orders": line.orders,
        "ensemble": line.ensemble,
        "perplexity": 20.0,
        "perplexity_95": [20.0 / 1.1, 20.0 * 1.1],
        "sequences": 1024,
    }

    def is_bold(published, sequences=256):
        cell = reproduce.cell([row], "ptb", line, published, ["a"], sequences)
        return "**" in cell

    assert not is_bold(20.0 * 1.09)
    assert not is_bold(20.0 * 1.2)  # outside of ours alone
    assert not is_bold(20.0 / 1.2)
    assert is_bold(20.0 * 1.22)
    assert is_bold(20.0 / 1.22)
    assert is_bold(20.0 * 1.2, sequences=1024)
    assert not is_bold(20.0 * 1.09, sequences=10**6)


@pytest.mark.parametrize(
    "options, whole, l2r, averaged",
    [
        ({}, None, 64, None),
        ({"quick": True}, 64, 4, 8),
        ({"max_sequences": 2, "quick": True}, 2, 2, 2),
        ({"max_sequences": 32}, 32, 32, 32),
    ],
    ids=["all", "quick", "fewer", "part"],
)
def test_what_takes_many_passes_is_of_fewer_sequences(options, whole, l2r, averaged):
    """A sequence takes 1,024 of an encoder left to right, 136 averaged over context
    orders, eight in single orders."""
    models = {model.name: model for model in reproduce.read_config().models}
    arguments = reproduce.Arguments(**options)
    for name in ("RADD", "SEDD"):
        assert reproduce.sequences_of(arguments, models[name], "l2r") == l2r
    assert reproduce.sequences_of(arguments, models["RADD"], "random") == whole
    assert reproduce.scorings_of(arguments, models["RADD"]) == [
        (order, ()) for order in models["RADD"].orders
    ]
    aogpt = models["AO-GPT"]
    limits = {}
    for order, ensemble in reproduce.scorings_of(arguments, aogpt):
        limit = reproduce.sequences_of(arguments, aogpt, order, ensemble)
        limits[order, ensemble] = limit
    expected = {("random", (1, 8, 64)): averaged}
    if arguments.quick:
        expected = {("random", ()): whole, ("random", (8, 64)): averaged}
    assert limits == {("l2r", ()): whole, **expected}
    causes = [cause.says for cause in reproduce.causes_of(arguments, [aogpt])]
    named = any("of 8 sequences" in says for says in causes)
    assert named == (whole != averaged)


def test_without_averages_a_model_is_scored_once_in_an_order():
    models = {model.name: model for model in reproduce.read_config().models}
    alone = reproduce.Arguments(quick=True, ensemble=(1,))
    orders = [order for order, _ in reproduce.scorings_of(alone, models["AO-GPT"])]
    assert sorted(orders) == ["l2r", "random"]


@needs_gpt2
def test_radd_is_downloaded_as_a_folder_that_loads(stand_ins):
    models = {model.name: model for model in reproduce.read_config().models}
    assert load(reproduce.fetched(models["RADD"], "small")).model.config.is_encoder
    assert stand_ins == ["JingyangOu/radd-lambda-dce"]


def test_what_cannot_be_downloaded_and_what_is_unknown_is_named(monkeypatch):
    def refuse(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", refuse)
    model = reproduce.read_config().models[0]
    with pytest.raises(UserError, match=r"AO-GPT-MDM cannot be downloaded .*no route"):
        reproduce.fetched(model, "small")
    message = "--models GPT-3: choose among AO-GPT, sigma-GPT"
    with pytest.raises(UserError, match=message):
        reproduce.chosen(("GPT-3",), ["AO-GPT", "sigma-GPT"], "--models")


def test_every_line_has_a_published_number_for_every_set():
    config = reproduce.read_config()
    names = {model.name for model in config.models}
    for line in config.lines:
        assert line.model in names
        assert line.published.keys() == {"small", "medium"}
        for row in line.published.values():
            assert len(row) == len(config.datasets)
    for cause in config.causes:
        assert set(cause.models) <= names
        assert any(cause.applies_to(line) for line in config.lines)


def test_a_cell_that_differs_names_its_causes_alone():
    config = reproduce.read_config()
    results = {}
    for line in config.lines:
        row = {"dataset": "ptb", "orders": line.orders, "ensemble": line.ensemble}
        row |= {"perplexity": 10.0, "perplexity_95": [9.0, 11.0], "sequences": 256}
        results.setdefault(("small", line.model), []).append(row)
    results["small", "GPT-2"][0]["perplexity_95"] = [9.0, 200.0]
    arguments = reproduce.Arguments(quick=True)
    alone = {("small", "GPT-2"): results["small", "GPT-2"]}
    page = reproduce.table(arguments, config, ["ptb"], alone)
    assert "GPT-2 has no start token" in page
    assert "SEDD" not in page
    page = reproduce.table(arguments, config, ["ptb"], results)
    says = dict(re.findall(r"^- \*(\w)\*: (.*)\.$", page, flags=re.MULTILINE))

    def causes_of(title):
        (line,) = [line for line in page.splitlines() if f"| {title} (small)" in line]
        letters = re.search(r"\*\* \*([a-z, ]*)\*", line)
        return [says[letter] for letter in letters[1].split(", ")] if letters else None

    part = "16 batches on most sets, here sequences are spread"
    passes = "a pass for each token left to right: 4 sequences"
    orders = "8 random orders"
    expected = {
        "SEDD, left to right": [part, passes, "SEDD left to right is its cross"],
        "SEDD, any order": [part, orders, "SEDD's own bound"],
        "RADD, any order": [part, orders, "RADD in any order is its ELBO"],
        "AO-GPT, left to right": [part, "AO-GPT's weights"],
        "AO-GPT, any order, 64 orders": [
            part,
            orders,
            "averages over context orders are of 8 sequences",
            "AO-GPT's weights",
        ],
        "GPT-2, left to right": None,  # the published number is inside
    }
    for title, parts in expected.items():
        causes = causes_of(title)
        if parts is None:
            assert causes is None
            continue
        assert len(causes) == len(parts)
        for cause, part_of_cause in zip(causes, parts, strict=True):
            assert part_of_cause in cause
