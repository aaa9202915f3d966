"""Exports under transformers 4: the version is installed into a directory of its own and reads what we wrote.

Marked `network`, since pip fetches it; deselect with -m "not network".
"""

import subprocess
import sys

import pytest
import torch

from rope_ext import extend, save_extended
from rope_ext.export import portability
from rope_ext.plan import label
from rope_ext.registry import parse_method
from tests.conftest import IN_STOCK, LENGTH_DEPENDENT, WINDOW, logits_of, random_llama

VERSION = "4.57.6"
PINS = (f"transformers=={VERSION}", "tokenizers==0.22.2", "huggingface_hub==0.36.2")
SPELLED = (
    *IN_STOCK,
    LENGTH_DEPENDENT[2],
    "yarn:beta_fast=16:truncate=false",
    "yarn:attention_scale=1.1",
    "yarn:ramp=rotations",
    "resonance:over=yarn",
)
LENGTHS = (WINDOW, WINDOW + 1, 3 * WINDOW)
READ = f"""
import json, sys, torch, transformers
assert transformers.__version__ == "{VERSION}", transformers.__file__
ids = torch.load(sys.argv[1])
for path in sys.argv[2:]:
    found = {{}}
    try:
        for length in {LENGTHS}:  # a new module for each: that of version 4 keeps state too
            model = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
            with torch.no_grad():
                found[length] = model(input_ids=ids[:, :length]).logits
        rotary = model.model.rotary_emb
        found |= {{"inv_freq": rotary.inv_freq, "scale": float(rotary.attention_scaling)}}
    except KeyError as error:
        found = {{"error": str(error)}}
    torch.save(found, path + "/read.pt")
"""

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Write every export, have all read under transformers 4; return {spelled: (path, logits, plan, verdict)}."""
    root = tmp_path_factory.mktemp("v4")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*pip, "--target", str(root / "site"), *PINS], check=True)
    ids = torch.randint(0, 96, (1, 3 * WINDOW), generator=torch.Generator().manual_seed(1))
    torch.save(ids, root / "ids.pt")
    model, written = random_llama(), {}
    for number, spelled in enumerate(SPELLED):
        with extend(model, parse_method(spelled), factor=4) as patch:
            logits = {length: logits_of(model, ids[:, :length]) for length in LENGTHS}
            verdict = next(v for v in portability(model) if v.reader == "transformers 4.57")
            written[spelled] = (save_extended(model, root / str(number)), logits, patch.plan, verdict)
    paths = [str(path) for path, *_ in written.values()]
    subprocess.run(
        [sys.executable, "-c", READ, str(root / "ids.pt"), *paths],
        check=True,
        env={"PYTHONPATH": str(root / "site"), "PATH": "/usr/bin:/bin", "HF_HUB_OFFLINE": "1"},
    )
    return written


@pytest.mark.parametrize("spelled", SPELLED, ids=lambda s: label(parse_method(s)))
def test_version_4_reads_the_same_logits_or_refuses(exports, spelled):
    path, logits, plan, verdict = exports[spelled]
    found = torch.load(path / "read.pt")
    if parse_method(spelled).name in {"nope", "p-rope"}:
        assert found["error"] == "'proportional'"
        assert verdict.kind == "cannot"
        return
    assert verdict.kind == "exact"
    torch.testing.assert_close(found["inv_freq"], plan.inv_freq, rtol=1e-6, atol=0)
    assert found["scale"] == pytest.approx(plan.attention_scale, rel=1e-12)
    for length in LENGTHS:
        # logits of order 10; stock code rounds the same formula in other places
        torch.testing.assert_close(found[length], logits[length], rtol=0, atol=1e-3)
