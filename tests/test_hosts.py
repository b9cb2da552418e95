"""Releases of the host: the one that is installed is known, and one that is not stays stock, with one clear line."""

import logging
import shutil
from pathlib import Path

import check_hosts
import diffusers
import pytest
import setups
from diffusers.models import normalization
from diffusers.models.transformers import transformer_ltx2
from ltx2_fastpath.patches import ROOMS
from ltx2_fastpath.patches.host import source_hash, unknown_sources
from ltx2_fastpath.patches.transformer import host
from setups import Together

from ltx2_fastpath import disable, enable, report
from ltx2_fastpath.testing import models

INSTALLED = Path(diffusers.__file__).parent.parent


def release_of(folder: Path, changes: dict[str, tuple[str, str]] | None = None) -> Path:
    """A release unpacked in `folder`: the installed one, with {file: (old text, new text)} changed."""
    for file in check_hosts.FILES:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        text = (INSTALLED / file).read_text()
        if changes and file in changes:
            assert changes[file][0] in text
            text = text.replace(*changes[file])
        (folder / file).write_text(text)
    return folder


def test_installed_release_is_known_and_takes_the_fast_path(stand_ins, any_width, version):
    assert [unknown_sources(room) for room in ROOMS] == [[]] * len(ROOMS)
    both = Together(stand_ins, lambda: setups.pipeline_of(setups.tiny(version)))
    assert enable(both.ours).active
    both.check()


def test_sources_read_from_files_are_those_that_are_imported():
    found = check_hosts.hashes(INSTALLED, host.KNOWN)
    assert found == {name: source_hash(function) for name, function in host.methods().items()}
    assert all(found[name] in known for name, known in host.KNOWN.items())


BLOCKS, NORMS = check_hosts.FILES
PROCESSORS = {"LTX2AudioVideoAttnProcessor.__call__", "LTX2PerturbedAttnProcessor.__call__"}


@pytest.mark.parametrize(
    "file, change, unknown",
    [
        (BLOCKS, ("1 + scale_msa", "1 - scale_msa"), {"LTX2VideoTransformerBlock.forward"}),
        (BLOCKS, ("2.0 * torch.sigmoid", "1.0 * torch.sigmoid"), PROCESSORS),
        (BLOCKS, ("def apply_split_rotary_emb", "def apply_split_rotary_embedding"), {"apply_split_rotary_emb"}),
        (BLOCKS, ("class LTX2AdaLayerNormSingle", "class LTX2AdaLN"), {"LTX2AdaLayerNormSingle.forward"}),
        (NORMS, ("torch.rsqrt(variance + self.eps)", "torch.rsqrt(variance)"), {"RMSNorm.forward"}),
    ],
)
def test_release_with_other_sources_is_found_out(tmp_path, monkeypatch, capsys, file, change, unknown):
    monkeypatch.setattr(check_hosts, "download", lambda release, folder: release_of(tmp_path / release, {file: change}))
    monkeypatch.setattr("sys.argv", ["check_hosts.py", "99.0.0"])
    assert check_hosts.main() == 1
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith(f"| 99.0.0 | {len(host.KNOWN) - len(unknown)} of {len(host.KNOWN)} known |")
    assert {name for name in host.KNOWN if name in row} == unknown


def test_known_release_passes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(check_hosts, "download", lambda release, folder: release_of(tmp_path / release))
    monkeypatch.setattr(check_hosts, "releases", lambda: ["98.0.0", "99.0.0"])
    monkeypatch.setattr("sys.argv", ["check_hosts.py"])
    assert check_hosts.main() == 0
    assert [row.split("|")[1].strip() for row in capsys.readouterr().out.splitlines()[2:]] == ["98.0.0", "99.0.0"]


def test_release_without_ltx2_is_found_out(tmp_path):
    folder = release_of(tmp_path)
    shutil.rmtree(folder / "diffusers/models/transformers")
    found = check_hosts.hashes(folder, host.KNOWN)
    assert found["LTX2Attention.forward"] is None and found["RMSNorm.forward"] in host.KNOWN["RMSNorm.forward"]


@pytest.mark.parametrize(
    "owner, name",
    [
        (transformer_ltx2.LTX2VideoTransformerBlock, "forward"),
        (transformer_ltx2.LTX2PerturbedAttnProcessor, "__call__"),
        (normalization.RMSNorm, "forward"),
    ],
)
def test_unknown_release_stays_stock_with_one_line(stand_ins, any_width, monkeypatch, caplog, owner, name):
    both = Together(stand_ins, models.tiny_pipeline)
    stock = getattr(owner, name)

    def of_another_release(self, *args, **kwargs):
        return stock(self, *args, **kwargs)

    monkeypatch.setattr(owner, name, of_another_release)
    with caplog.at_level(logging.INFO, logger="ltx2_fastpath"):
        handle = enable(both.ours)
        assert enable(both.ours) is handle  # asked again, as servers do: the same handle, and nothing said again
        both.check(setups.generate, fast=False)
    (record,) = [record for record in caplog.records if record.name == "ltx2_fastpath"]
    assert f"{owner.__name__}.{name}" in record.getMessage() and "\n" not in record.getMessage()
    assert not handle.active and handle.reason in str(report(both.ours))
    both.check_restored()
    disable(both.ours)
    both.check_restored()


def test_release_that_becomes_known_again(stand_ins, any_width, monkeypatch):
    """Another library puts its own forward into the class and takes it out again."""
    both = Together(stand_ins)
    with monkeypatch.context() as patch:
        patch.setattr(transformer_ltx2.LTX2Attention, "forward", lambda self, *args, **kwargs: None)
        handle = enable(both.ours)
        assert not handle.active
    assert enable(both.ours) is handle and handle.active and handle.reason is None
    both.check()
    disable(both.ours)
    both.check_restored()
