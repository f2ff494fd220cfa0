"""Concepts taken away and exchanged on Birds, where it is known what decides."""

import re
import sys

import ablation


def test_true_kinds_change_the_class_where_they_decide_and_keep_it_where_they_do_not(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ablation.py", "--per-class", "10", "--methods", "true-kinds"])
    monkeypatch.setattr(ablation, "_EXCHANGED", 80)
    ablation.main()
    removed, elsewhere, _, exchanged = capsys.readouterr().out.splitlines()
    changed, kept = (float(share) for share in re.findall(r"class (\d\.\d+)", removed))
    assert kept >= 0.9
    assert changed >= 0.2  # the other deciding part often speaks for the class alone
    assert float(re.findall(r"other class (\d\.\d+)", elsewhere)[0]) <= 0.05
    as_it_must_be, kept = (float(share) for share in re.findall(r"(?:be|kept) (\d\.\d+)", exchanged))
    assert min(as_it_must_be, kept) >= 0.8
    assert (as_it_must_be + kept) / 2 >= 0.9
