"""The benchmark of molecules: its files are read without running code, and its measures
are what the paper defines."""

import gzip
import io
import json
import zipfile
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from aogpt.data.loader import TokenDataset
from aogpt.data.tokenizers import get_tokenizer
from aogpt.runtime.errors import UserError
from aogpt.systems import build_on_meta
from studies import molecules
from studies.molecule_runs import RECIPE, best_encoder, load_runs, systems_of, train
from studies.moses import (
    Moses,
    canonical,
    chemnet,
    cosine,
    diversity,
    fingerprints,
    fragments,
    frechet,
    measures,
    nearest,
    normal,
    passes,
    read_molecule,
    scaffolds,
    tanimoto,
)

TEXTS = ["CCO", "c1ccccc1C(=O)NC", "c1ccc2ccccc2c1", "Cc1ccccc1", "CC(=O)Oc1ccccc1"]
MCF = "names,smarts\nMCF1,[#6]=&!@[#6]-[#6]#[#7]\n"
PAINS = '"[#6]-[#53]"   \n'


def packed(content):
    """Return the bytes of the file of statistics that holds this."""
    array = np.empty((), dtype=object)
    array[()] = content
    stream = io.BytesIO()
    np.savez_compressed(stream, stats=array)
    return stream.getvalue()


def statistics(texts):
    """Return what the benchmark keeps of a set of molecules."""
    read, same = canonical(texts)
    mean, covariance = normal(chemnet(same))
    return {
        "FCD": {"mu": mean, "sigma": covariance},
        "SNN": {"fps": fingerprints(read).numpy()},
        "Frag": {"frag": fragments(read)},
        "Scaf": {"scaf": scaffolds(read)},
    }


def write_wheel(path, train, test, scaffold_test, of_test, of_scaffolds):
    with zipfile.ZipFile(path, "w") as wheel:
        sets = {"train": train, "test": test, "test_scaffolds": scaffold_test}
        for name, texts in sets.items():
            rows = "\n".join(["SMILES", *texts]) + "\n"
            wheel.writestr(
                f"moses/dataset/data/{name}.csv.gz", gzip.compress(rows.encode())
            )
        for name, content in (("test", of_test), ("test_scaffolds", of_scaffolds)):
            wheel.writestr(f"moses/dataset/data/{name}_stats.npz", packed(content))
        wheel.writestr("moses/metrics/mcf.csv", MCF)
        wheel.writestr("moses/metrics/wehi_pains.csv", PAINS)
    return Moses(path)


@pytest.fixture(scope="module")
def benchmark(tmp_path_factory):
    """The benchmark's wheel, small: both test sets are TEXTS."""
    of_texts = statistics(TEXTS)
    path = tmp_path_factory.mktemp("moses") / "molsets.whl"
    return write_wheel(path, ["CCO", "CCN"], TEXTS, TEXTS, of_texts, of_texts)


def test_a_set_measured_against_itself_is_at_no_distance(benchmark):
    row = measures(TEXTS, benchmark, training=frozenset(["CCO"]))
    assert row["valid"] == row["unique"] == row["filters"] == 1
    assert row["novelty"] == pytest.approx(4 / 5)
    for split in ("test", "scaffolds"):
        assert row[f"FCD {split}"] == pytest.approx(0, abs=1e-3)
        for name in ("SNN", "Frag", "Scaf"):
            assert row[f"{name} {split}"] == pytest.approx(1)


def test_what_is_no_molecule_counts_in_one_share_alone(benchmark):
    """An open ring, a valence too many, nothing at all."""
    row = measures(
        ["c1ccc", "C(C)(C)(C)(C)C", "", "CCO", "OCC"], benchmark, frozenset()
    )
    assert row["valid"] == pytest.approx(2 / 5)
    assert row["unique"] == 1 / 2  # ethanol, written twice
    assert row["novelty"] == 1
    assert measures(["c1", "C("], benchmark, frozenset()) == {"valid": 0}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("CCO", True),
        ("C[N+](C)(C)C", False),  # a charge
        ("C1CCCCCCC1", False),  # a ring of eight
        ("CP", False),  # an element that is not allowed
        ("CCI", False),  # neither is iodine, which a pattern names, too
        ("C=CC#N", False),  # a pattern
    ],
)
def test_filters_keep_what_could_be_of_the_data(benchmark, text, right):
    assert passes(read_molecule(text), benchmark.filters) is right


def test_similarity_is_bits_of_both_by_bits_of_either():
    a = torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1]], dtype=torch.uint8)
    b = torch.tensor([[1, 0, 1, 0]], dtype=torch.uint8)
    assert tanimoto(a, b).tolist() == [[pytest.approx(1 / 3)], [pytest.approx(1 / 3)]]
    assert nearest(a, torch.cat([b, a])) == 1
    # Of four pairs two are equal, two have nothing in common.
    assert diversity(a) == pytest.approx(1 / 2)


def test_the_frechet_distance_of_normal_distributions_with_one_basis():
    """Their covariances commute: |m - m'|^2 + the sum of (s - s')^2."""
    rng = np.random.default_rng(0)
    basis, _ = np.linalg.qr(rng.normal(size=(6, 6)))
    a, b, m, n = rng.uniform(0, 3, size=(4, 6))
    a[0] = 0
    covariances = [(basis * spread**2) @ basis.T for spread in (a, b)]
    distance = np.square(m - n).sum() + np.square(a - b).sum()
    measured = frechet((m, covariances[0]), (n, covariances[1]))
    assert measured == pytest.approx(distance, rel=1e-9)


def test_scaffolds_have_two_rings_and_no_side_chains():
    read, _ = canonical(["Cc1ccc2ccccc2c1", "Oc1ccc2ccccc2c1", "Cc1ccccc1"])
    assert scaffolds(read) == Counter({"c1ccc2ccccc2c1": 2})
    assert cosine(Counter(a=3, b=4), Counter(a=3)) == pytest.approx(3 / 5)
    assert cosine(Counter(a=1), Counter()) == 0


class Evil:
    def __reduce__(self):
        return (print, ("run",))


def test_statistics_run_no_code(tmp_path, capsys):
    moses = write_wheel(tmp_path / "w", [], [], [], {"FCD": Evil()}, {})
    with pytest.raises(ValueError, match="builtins.print"):
        moses.statistics("test")
    assert "run" not in capsys.readouterr().out
    assert moses.statistics("test_scaffolds") == {}


def test_the_molecules_become_records(benchmark, tmp_path):
    """Of the scaffold test set in a folder of its own; no molecule for validation is in
    training."""
    chosen = [f"C{'C' * n}O" for n in range(40)]
    moses = write_wheel(tmp_path / "w.whl", chosen, TEXTS[:2], TEXTS[2:], {}, {})
    molecules.prepare(moses.wheel, out=tmp_path / "m", validation=5)
    tokenizer = get_tokenizer(f"alphabet:{molecules.LETTERS}")

    def texts(folder, split):
        records = TokenDataset(folder, split, molecules.BLOCK_SIZE)
        rows = records.blocks(range(records.num_blocks))
        return {
            tokenizer.decode(row.tolist()).split("<|endoftext|>")[0] for row in rows
        }

    train = texts(tmp_path / "m", "train")
    val = texts(tmp_path / "m", "val")
    assert len(train) == 35
    assert train | val == set(chosen)
    assert texts(tmp_path / "m", "test") == set(TEXTS[:2])
    assert texts(tmp_path / "m_scaffolds", "test") == set(TEXTS[2:])


def test_the_ruler_prints_its_row_below_the_published_one(benchmark, tmp_path, capsys):
    out = tmp_path / "ruler.json"
    molecules.ruler(benchmark.wheel, count=2, out=out)
    said = capsys.readouterr().out
    assert "| published | 1.0000 |" in said
    assert "| measured | 1.0000 |" in said
    assert out.is_file()


def test_distances_by_the_number_of_molecules(tmp_path, capsys):
    """All of the training set has the distance of the whole table."""
    chosen = [f"C{'C' * n}O" for n in range(16)]
    of_all = statistics(chosen)
    moses = write_wheel(tmp_path / "w.whl", chosen, chosen, [], of_all, {})
    out = tmp_path / "sizes.json"
    molecules.sizes(moses.wheel, most=16, out=out)
    rows = json.loads(out.read_text())["rows"]
    assert [row["molecules"] for row in rows] == [2, 4, 8, 16]
    assert rows[-1]["FCD test"] == pytest.approx(0, abs=1e-3)
    assert rows[1]["FCD test"] > 0.1


def test_without_the_wheel_one_line_says_how_to_get_it(tmp_path):
    with pytest.raises(ValueError, match="pip download --no-deps molsets==0.3.1"):
        molecules.ruler(tmp_path / "none.whl")


def test_the_systems_have_equal_parameters_and_letters():
    """Within one percent, and each has its short run, on which it is tuned."""
    experiment, claims = load_runs()
    run_configs = experiment.recipes[RECIPE]
    names = systems_of(experiment)
    counts = []
    for name in names:
        rate = run_configs[name].untuned
        config = experiment.config(RECIPE, run_configs[name], 300, rate)
        short = experiment.config(RECIPE, run_configs[f"{name}_short"], 100, rate)
        assert config.train.steps == 6170
        assert short == replace(
            config,
            name=short.name,
            seed=100,
            train=replace(config.train, steps=440),
            optim=replace(config.optim, warmup_steps=44),
            eval=replace(config.eval, interval=440),
        )
        model = build_on_meta(config.model)
        counts.append(sum(weight.numel() for weight in model.parameters()))
    assert max(counts) < 1.01 * min(counts)
    assert len(claims) == 3
    for claim in claims:
        for figure in (claim.lower, claim.higher):
            assert figure.partition(":")[0] in names


def test_an_unknown_system_is_refused(tmp_path):
    with pytest.raises(UserError, match="no system 'lstm'"):
        train(["lstm"], tmp_path / "rows.jsonl")


class Tuned:
    """Stands for a runner whose tuning runs are done."""

    def __init__(self, losses):
        self.experiment, _ = load_runs()
        self.losses = losses

    def tune(self, recipe, run_configs):
        (run_config,) = run_configs
        return [({"optim.muon_lr": 0.02}, self.losses[run_config.name])]


def test_the_encoder_has_the_loss_that_ended_lowest():
    losses = {"encoder_short": 0.9, "encoder_ce_short": 0.8, "encoder_k_short": 0.85}
    assert best_encoder(Tuned(losses)) == "encoder_ce"
