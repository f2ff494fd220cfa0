"""The script that sets an EM pass beside those of other libraries runs as a whole, on the paper's model."""

import sys
from types import ModuleType

import em_pass
import pytest
import torch


def lloyd(x, k, max_iters, tol, init_centroids):
    for _ in range(max_iters):
        owner = torch.cdist(x, init_centroids).argmin(2)
    return owner


@pytest.mark.parametrize("against", ["sklearn", "kmeans"])
def test_a_pass_is_set_beside_another_librarys(against, monkeypatch, capsys):
    library = ModuleType("flash_kmeans.torch_fallback")
    monkeypatch.setattr(library, "batch_kmeans_Euclid_torch_native", lloyd, raising=False)
    monkeypatch.setitem(sys.modules, "flash_kmeans", ModuleType("flash_kmeans"))
    monkeypatch.setitem(sys.modules, library.__name__, library)
    monkeypatch.setattr(em_pass, "_BESIDE_KMEANS", {"cpu": ((8, 4000),)})
    monkeypatch.setattr(em_pass, "_POINTS", {"full": ((80, 4000),)})  # more dimensions than tell kinds
    monkeypatch.setattr(em_pass, "_PAUSE", 0)
    monkeypatch.setattr(em_pass.torch, "set_num_threads", lambda number: None)  # it would hold for all later tests
    monkeypatch.setattr("sys.argv", ["em_pass.py", "--concepts", "12", "--repeats", "1", "--against", against])
    em_pass.main()
    row = next(line for line in capsys.readouterr().out.splitlines() if line[2:3].isdigit() or "| full |" in line)
    assert row.count("|") == 10
