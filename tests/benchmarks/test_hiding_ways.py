"""The script that compares four ways to hide patches runs as a whole."""

import re

import hiding
import pytest


@pytest.mark.filterwarnings("ignore:the bound still rises")
def test_every_method_with_a_patch_level_has_an_effect_in_every_way(tmp_path, monkeypatch, capsys):
    few = ["--limit", "12", "--hidden-images", "3", "--concepts", "4", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["hiding.py", "--methods", "kmeans", "gmm", "majority", *few])
    hiding.main()
    said = capsys.readouterr().out
    assert "color, the ViT shipped for Color, 3 test images" in said
    rows = re.findall(r"^\| (k-means|Gaussian mixture|Majority class) \|(.*)\|$", said, re.M)
    assert [name for name, _ in rows] == ["k-means", "Gaussian mixture"]  # the third has no patches
    for _, cells in rows:
        assert len(re.findall(r"-?\d\.\d{3} \(-?\d\.\d{3}\)", cells)) == 4
    taus = re.findall(r"^\| [a-z ]+, [a-z ]+ \| (.*) \|$", said, re.M)
    assert len(taus) == 6
    assert all(tau == "nan" or -1 <= float(tau) <= 1 for tau in taus)
