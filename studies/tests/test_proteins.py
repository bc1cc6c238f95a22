"""Scores of mutations beside an assay in ProteinGym's layout."""

import itertools
import math
import re

import pytest
import torch
from reference import make_system
from scipy import stats

import aogpt
from aogpt.checkpoints import Loaded
from aogpt.data.record_end import RecordEnd
from aogpt.runtime.errors import UserError
from studies import proteins

LETTERS = "ACDE"
WILD = "ACDEA"


@pytest.fixture
def model(monkeypatch):
    """A model of records of four letters that nobody trained."""
    end = RecordEnd(token=4, lengths=(1,) * 6)
    network = make_system(
        "mask_query", 3, tokens=8, block_size=6, dtype=torch.float64, scale=2.0
    )
    network.eval().exclude(5, end.token)
    loaded = Loaded(network, "x", 0, "raw", f"alphabet:{LETTERS}", 5, record_end=end)
    text_model = aogpt.TextModel(loaded)
    monkeypatch.setattr(aogpt, "load", lambda path: text_model)
    return text_model


def write_assay(path, rows, columns="mutant,DMS_score"):
    path.write_text("\n".join([columns, *rows]) + "\n")
    return path


def variants_of(*mutants):
    rows = [{"mutant": mutant, "DMS_score": "0"} for mutant in mutants]
    return [proteins.variant_of(row) for row in rows]


def test_the_exact_score_is_a_difference_of_joints(model):
    """All 16 pairs of letters at two places are a distribution."""
    (wild,) = model.score([WILD], predict=[(1, 2), (3, 4)])
    total = math.exp(wild.log_prob)
    mutants = []
    for a, b in itertools.product(LETTERS, repeat=2):
        if (a, b) != ("C", "E"):
            mutants.append(f"C2{a}:E4{b}")
    scores = proteins.joint_scores(model, WILD, variants_of(*mutants), orders=1)
    assert sum(map(math.exp, scores)) * total + total == pytest.approx(1)


def test_a_sum_is_of_single_scores_and_equal_for_one_mutation(model):
    variants = variants_of("C2A", "E4D", "C2A:E4D")
    first, second, both = proteins.joint_scores(model, WILD, variants, orders=1)
    sums = proteins.sums_of_singles(model, WILD, variants)
    assert sums == pytest.approx([first, second, first + second])
    assert abs(both - sums[2]) > 1e-3
    averaged = proteins.joint_scores(model, WILD, variants, orders=2)
    assert averaged[:2] == pytest.approx([first, second])
    assert abs(averaged[2] - both) > 1e-4


def test_an_assay_is_ranked_as_its_scores_are(model, tmp_path, capsys):
    """The wild type is found in the mutated sequences, as ProteinGym has them."""
    mutants = ["A1C", "C2A", "C2D:E4A", "D3A:E4C", "A1D:C2E:A5C"]
    variants = variants_of(*mutants)
    scores = proteins.joint_scores(model, WILD, variants, orders=1)
    rows = []
    for mutant, variant, value in zip(mutants, variants, scores, strict=True):
        rows.append(f"{mutant},{variant.applied(WILD)},{2 * value - 1}")
    file = write_assay(tmp_path / "a.csv", rows, "mutant,mutated_sequence,DMS_score")
    proteins.score("x", file, orders=6)
    shown = capsys.readouterr().out
    cells = [re.split(r" *\| *", line) for line in shown.splitlines()[2:]]
    assert [line[1:4] for line in cells] == [
        ["all variants", "5", "1.000"],
        ["one mutation", "2", "1.000"],
        ["several", "3", "1.000"],
    ]
    sums = proteins.sums_of_singles(model, WILD, variants)
    expected = stats.spearmanr(sums, scores).statistic
    assert float(cells[0][5]) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        ([], "mutant,DMS_score", "has no rows"),
        (["C2A,1"], "mutation,DMS_score", "no column 'mutant'"),
        (["C2,1"], "mutant,DMS_score", "line 2: mutant is 'C2'; write A12G"),
        (["C2A,1", "C2A:C2D,1"], "mutant,DMS_score", "line 3: .* place 2 twice"),
        (["C2A,?"], "mutant,DMS_score", "which is no number"),
        (["C2A,nan"], "mutant,DMS_score", "which is no number"),
        (["C2A"], "mutant,DMS_score", "DMS_score is None, which is no number"),
        (["D2A,1"], "mutant,DMS_score", "D2A does not fit .* has C at place 2"),
        (["C2A,MCD,1"], "mutant,mutated_sequence,DMS_score", "is not the wild type"),
        (["D9A,1"], "mutant,DMS_score", "has nothing at place 9"),
    ],
)
def test_a_bad_row_is_one_line(tmp_path, rows, columns, words):
    file = write_assay(tmp_path / "a.csv", rows, columns)
    with pytest.raises(UserError, match=words):
        proteins.read_assay(file, WILD)


def test_without_a_wild_type_one_line_says_so(tmp_path):
    file = write_assay(tmp_path / "a.csv", ["C2A,1"])
    with pytest.raises(UserError, match="line 2: give --sequence, the wild type"):
        proteins.read_assay(file, None)
