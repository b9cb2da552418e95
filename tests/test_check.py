"""The machine check: every operation that it judges, and what it says of machines that are not this one."""

import copy
import json
import logging
import types

import pytest
import torch

from ltx2_fastpath import __main__ as cli
from ltx2_fastpath import check, environment
from ltx2_fastpath.testing import models

ENVIRONMENT = {
    "gpu": "NVIDIA Example",
    "gpu_capability": [9, 0],
    "gpu_memory_gib": 80.0,
    "driver": "600.1",
    "cuda": "13.0",
    "hip": None,
    "system": "Linux",
    "python": "3.12.1",
    "ltx2_fastpath": "0.1.0",
    "torch": "2.13.0",
    "triton": "3.7.1",
    "diffusers": "0.42.1",
    "transformers": "5.17.0",
    "accelerate": "1.15.0",
    "peft": None,
    "cuda-core": "1.2.2",
    "triton_cache_writable": True,
}
FAST_LAYER = {"equal": True, "fast": 40, "stock": 0, "note": None}


def tried(implementation, ok=True, note="bit-equal on the live input"):
    return {"implementation": implementation, "candidate": None, "ok": ok, "note": note, "compile_s": 0.4}


def judged(operation, *candidates, width=4096):
    return {"operation": operation, "width": width, "candidates": list(candidates)}


def findings_of(*operations, layer=FAST_LAYER, **environment) -> dict:
    """Findings for a machine with a GPU, which differ from a good one in what is given."""
    found = {
        "schema": check.SCHEMA,
        "environment": ENVIRONMENT | environment,
        "triton_error": None,
        "host": {"error": None, "unknown": []},
        "operations": list(operations),
        "layer": layer,
        "seconds": 20.0,
    }
    return concluded(found)


def concluded(found: dict) -> dict:
    found["outcome"] = check.outcome(found)
    found["problems"] = [{"problem": what, "advice": todo} for what, todo in check.problems(found)]
    return found


GOOD = (
    judged("RMSNorm + modulate", tried(check.CUDA), tried(check.TRITON)),
    judged("RMSNorm + modulate", tried(check.CUDA), tried(check.TRITON), width=2048),
    judged("ada values", tried(check.TRITON)),
    judged("head gate", tried(check.CUDA)),
)


def said(found: dict) -> str:
    """The text of the findings; every problem's advice must be in it."""
    text = check.text(found)
    for entry in found["problems"]:
        assert entry["problem"] in text and entry["advice"] in text
    return text


# What the findings mean


def test_machine_with_everything():
    found = findings_of(*GOOD)
    assert found["outcome"] == {
        "active": True,
        "partial": False,
        "cuda": ["RMSNorm + modulate", "head gate"],
        "triton": ["ada values"],
        "stock": [],
        "equal": True,
    }
    assert found["problems"] == []
    text = said(found)
    assert "You will get the lossless fast path.\n  CUDA C++: RMSNorm + modulate, head gate\n  Triton: ada values" in text
    assert "NVIDIA Example, compute capability 9.0, 80.0 GiB" in text
    assert "bit-equal with stock diffusers; 40 calls fast, 0 stock" in text
    assert "What to do" not in text


@pytest.mark.parametrize("cuda, wheel", [("13.0", "'cuda-core[cu13]'"), ("12.8", "'cuda-core[cu12]'")])
def test_without_cuda_core_the_fast_path_is_active_in_triton_and_the_extra_is_named(cuda, wheel):
    found = findings_of(judged("RMSNorm + modulate", tried(check.TRITON)), **{"cuda-core": None, "cuda": cuda})
    assert found["outcome"]["active"] and found["outcome"]["triton"] == ["RMSNorm + modulate"]
    assert f"pip install {wheel}" in said(found)


def test_one_operation_that_does_not_verify_makes_it_partial():
    wrong = tried(check.CUDA, False, "candidate 'cuda' gave other bits than the eager chain")
    found = findings_of(*GOOD, judged("head gate", wrong, width=2048), judged("head gate", tried(check.CUDA)))
    outcome = found["outcome"]
    assert outcome["partial"] and not outcome["active"] and outcome["stock"] == ["head gate"]
    text = said(found)
    assert "in part" in text and "results are the same" in text
    assert "head gate at width 2048: stock, because candidate 'cuda' gave other bits than the eager chain" in text
    assert "python -m ltx2_fastpath --json" in text


def test_one_cause_of_many_failures_is_told_once():
    note = "PermissionError: [Errno 13] Permission denied"
    failures = [judged(name, tried(check.TRITON, False, note)) for name in ("head gate", "ada values")]
    (entry,) = findings_of(*failures)["problems"]
    assert entry["problem"].startswith("head gate at width 4096, ada values at width 4096: stock, because Permission")
    assert entry["advice"] == "Set TRITON_CACHE_DIR to a writable folder."


@pytest.mark.parametrize(
    "note, advice",
    [
        ("candidate 'cuda' failed (OutOfMemoryError: CUDA out of memory)", "Free GPU memory"),
        ("too little GPU memory", "Free GPU memory"),
        ("failed (RuntimeError: Failed to find C compiler)", "Install a C compiler"),
        ("failed (OSError: [Errno 30] Read-only file system)", "TRITON_CACHE_DIR"),
        ("failed (RuntimeError: what is this)", "report it"),
    ],
)
def test_every_kind_of_failure_has_its_advice(note, advice):
    (entry,) = findings_of(judged("head gate", tried(check.TRITON, False, note)))["problems"]
    assert advice in entry["advice"]


def test_other_bits_in_the_layer_are_not_called_a_fast_path():
    found = findings_of(*GOOD, layer=FAST_LAYER | {"equal": False})
    assert not found["outcome"]["active"] and not found["outcome"]["partial"]
    text = said(found)
    assert "NOT lossless" in text and "Do not use the fast path" in text and "You will get the lossless" not in text


@pytest.mark.parametrize(
    "layer", [{"equal": None, "fast": 0, "stock": 0, "note": "OutOfMemoryError: no"}, FAST_LAYER | {"fast": 0}]
)
def test_a_layer_that_did_not_run_fast_is_not_active(layer):
    found = findings_of(*GOOD, layer=layer)
    assert not found["outcome"]["active"]
    assert "You will get stock diffusers" in said(found)


@pytest.mark.parametrize(
    "change, problem, advice",
    [
        ({"gpu": None, "cuda": None}, "this build of torch has no CUDA", "pytorch.org"),
        ({"gpu": None}, "no CUDA device is available", "nvidia-smi"),
        ({"gpu_capability": [7, 5]}, "older than compute capability 8.0", "Ampere"),
        (
            {"triton_error": "ImportError: no", "triton": None},
            "Triton cannot be imported (ImportError: no)",
            "pip install triton",
        ),
        ({"triton_error": "OSError: DLL"}, "Triton cannot be imported (OSError: DLL)", "Reinstall"),
        ({"host": {"error": "ImportError: none", "unknown": None}}, "LTX-2 cannot be imported", "pip install 'diffusers"),
        (
            {"host": {"error": None, "unknown": ["RMSNorm.forward"]}},
            "not known: RMSNorm.forward differ",
            "pip install 'diffusers",
        ),
    ],
)
def test_what_keeps_the_fast_path_off(change, problem, advice):
    found = findings_of(layer=None)
    for key, value in change.items():
        (found["environment"] if key in ENVIRONMENT else found)[key] = value
    concluded(found)
    (entry,) = found["problems"]
    assert problem in entry["problem"] and advice in entry["advice"]
    assert not found["outcome"]["active"]
    text = said(found)
    assert "You will get stock diffusers" in text and "results are the same" in text


def test_unwritable_cache_folder():
    found = findings_of(*GOOD, triton_cache_writable=False)
    assert found["outcome"]["active"]
    assert "Set TRITON_CACHE_DIR" in said(found)


def test_the_nearest_folder_that_exists_decides_whether_the_cache_is_writable(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "not" / "yet"))
    monkeypatch.setattr(environment.os, "access", lambda folder, mode: asked.append(folder))
    assert not environment._triton_cache_writable()
    assert asked == [tmp_path]


# Judging


def stub_op(*candidates, refusal=None, launch=lambda candidate, x: x * 2):
    return types.SimpleNamespace(
        CANDIDATES=candidates,
        signature=lambda x: x.shape,
        refusal=lambda x: refusal,
        rehearsals=lambda x: (),
        eager=lambda x: x * 2,
        launch=launch,
    )


X = torch.arange(1.0, 5.0)


def test_every_implementation_is_tried_up_to_its_first_candidate_that_verifies():
    launched = []

    def launch(candidate, x):
        launched.append(candidate)
        if candidate == ("cuda", 0):
            raise RuntimeError("no such instruction\nand more")
        return x * 2 if candidate != ("cuda", 1) else x * 2 + 1e-6

    op = stub_op(("cuda", 0), ("cuda", 1), ("cuda", 2), ("cuda", 3), ("triton", 0), ("triton", 1), launch=launch)
    verdicts = check.judge(op, (X,))
    assert launched == [("cuda", 0), ("cuda", 1), ("cuda", 2), ("triton", 0)]
    assert [(v["implementation"], v["ok"]) for v in verdicts] == [
        (check.CUDA, False),
        (check.CUDA, False),
        (check.CUDA, True),
        (check.TRITON, True),
    ]
    assert "no such instruction" in verdicts[0]["note"] and "and more" not in verdicts[0]["note"]
    assert "other bits" in verdicts[1]["note"] and "bit-equal" in verdicts[2]["note"]
    assert all(v["compile_s"] >= 0 for v in verdicts)


def test_a_refusal_is_told_and_nothing_is_launched():
    op = stub_op("cuda", "triton", refusal="x: empty", launch=lambda *args: pytest.fail("launched"))
    assert check.judge(op, (X,)) == [
        {"implementation": None, "candidate": None, "ok": False, "note": "x: empty", "compile_s": None}
    ]


def test_too_little_memory_is_told():
    def launch(candidate, x):
        raise torch.OutOfMemoryError("CUDA out of memory")

    (verdict,) = check.judge(stub_op(None, launch=launch), (X,))
    assert not verdict["ok"] and verdict["note"] == "too little GPU memory"


@pytest.mark.interpreter
def test_all_operations_are_judged_and_verify(monkeypatch):
    """With real kernels, at sizes and in the dtype that the interpreter can do."""
    monkeypatch.setattr(check, "ROWS", 16)
    monkeypatch.setattr(check, "HEADS", 8)
    monkeypatch.setattr(check, "WIDTHS", {512: "both"})
    monkeypatch.setattr(check, "_DTYPE", torch.float16)
    names, ops = [], []
    with torch.no_grad():
        for name, width, op, args in check.cases(torch.device("cpu")):
            names.append(name)
            ops.append(op)
            monkeypatch.setattr(op, "rehearsals", lambda *args: ())
            assert width == (check.DECODER_WIDTH if "decoder" in name else 512)
            (verdict,) = check.judge(op, args)
            assert verdict["implementation"] == check.TRITON
            # The interpreter does not fuse the products and sums of a rotation, and its exponential is another, and so is the
            # order in which this CPU sums what the decoder norms; there the bits may differ.
            may_differ = any(word in name for word in ("RoPE", "SwiGLU", "MLP", "decoder: residual"))
            assert verdict["ok"] or (may_differ and "other bits" in verdict["note"]), (name, verdict["note"])
    from conftest import ops as all_ops

    assert {id(op) for op in ops} == {id(op) for op in all_ops().values()}
    assert len(set(names)) == len(names) == 13


def test_production_widths_and_rows():
    assert list(check.WIDTHS) == [4096, 2048] and check.ROWS >= 4096 and check._DTYPE is torch.bfloat16
    shapes = [models.CONFIGS["2.3"][f"{audio}num_attention_heads"] for audio in ("", "audio_")]
    assert shapes == [check.HEADS, check.HEADS]
    assert [check.HEADS * models.CONFIGS["2.3"][f"{a}attention_head_dim"] for a in ("", "audio_")] == list(check.WIDTHS)


# The layer


@torch.no_grad()
def test_layer_is_compared_and_counted(stand_ins, any_width, monkeypatch):
    transformer = models.tiny_transformer("2.3", num_layers=1)
    inputs = models.inputs(transformer, height=64, width=96, num_frames=9, text_tokens=16)
    before = dict(vars(transformer.transformer_blocks[0]))
    monkeypatch.setattr("ltx2_fastpath.patches.handle.why_unsupported", lambda room: None)
    monkeypatch.setattr("ltx2_fastpath.ops.support.DEVICE_TYPES", ("cuda", "cpu"))
    result = check.compare(transformer, inputs)
    assert result["equal"] is True and result["note"] is None
    assert result["fast"] > 20 and result["stock"] == 0 and sum(stand_ins.values()) > 20
    assert vars(transformer.transformer_blocks[0]) == before


@torch.no_grad()
def test_layer_says_why_the_fast_path_stayed_off(monkeypatch):
    transformer = models.tiny_transformer("2.3", num_layers=1)
    inputs = models.inputs(transformer, height=64, width=96, num_frames=9, text_tokens=16)
    monkeypatch.setattr("ltx2_fastpath.patches.handle.why_unsupported", lambda room: "because")
    assert check.compare(transformer, inputs) == {"equal": None, "fast": 0, "stock": 0, "note": "because"}


def test_layer_that_cannot_be_built_is_told(monkeypatch):
    def build(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate")

    monkeypatch.setattr(models, "build_transformer", build)
    assert check.layer(torch.device("cpu"))["note"] == "OutOfMemoryError: CUDA out of memory."


# The command


@pytest.fixture
def machine_with_gpu(monkeypatch):
    """A machine on which two operations are judged; its environment is `ENVIRONMENT`."""
    monkeypatch.setattr(check, "environment", lambda: copy.deepcopy(ENVIRONMENT))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    wrong = stub_op("triton", launch=lambda candidate, x: x)
    listed = [("head gate", 4096, stub_op("cuda", "triton"), (X,)), ("ada values", 4096, wrong, (X,))]
    monkeypatch.setattr(check, "cases", lambda device: iter(listed))
    monkeypatch.setattr(check, "layer", lambda device: FAST_LAYER)
    return listed


def test_command_exits_with_1_where_an_operation_is_stock(machine_with_gpu, capsys, caplog):
    with caplog.at_level(logging.DEBUG):
        assert cli.main(["--json"]) == 1
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert found["outcome"]["partial"] and found["outcome"]["stock"] == ["ada values"]
    assert "head gate, width 4096" in err and "one layer" in err
    assert not caplog.records  # the verdicts are in the findings
    assert not logging.getLogger("ltx2_fastpath").disabled


def test_command_exits_with_0_where_all_is_fast(machine_with_gpu, capsys):
    machine_with_gpu.pop()
    assert cli.main([]) == 0
    out, _ = capsys.readouterr()
    assert "You will get the lossless fast path.\n  CUDA C++: head gate" in out
    assert f"{4096:,} rows" in out


def test_command_without_cuda(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(check, "judge", lambda *args: pytest.fail("judged without a GPU"))
    assert cli.main(["--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["environment"]["gpu"] is None and found["operations"] == [] and found["layer"] is None
    assert found["host"] == {"error": None, "unknown": []}
    assert torch.__version__.startswith(found["environment"]["torch"])  # which may go on: +cpu, +cu130
    assert any("CUDA" in entry["problem"] for entry in found["problems"])


def test_command_with_an_unknown_diffusers(monkeypatch, capsys):
    from ltx2_fastpath.patches.transformer import host

    monkeypatch.setitem(host.KNOWN, "RMSNorm.forward", set())
    assert cli.main([]) == 1
    assert "this diffusers release is not known: RMSNorm.forward differ" in capsys.readouterr().out


WITHOUT_TRITON_AND_DIFFUSERS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "diffusers"):
            raise ModuleNotFoundError(f"No module named {name!r}")
sys.meta_path.insert(0, Missing())
from ltx2_fastpath import __main__
assert __main__.main([]) == 1
"""


def test_command_without_triton_and_diffusers(run_python):
    out = run_python(WITHOUT_TRITON_AND_DIFFUSERS)
    assert "Triton cannot be imported (ModuleNotFoundError: No module named 'triton')" in out
    assert "LTX-2 cannot be imported from diffusers (ModuleNotFoundError: No module named 'diffusers')" in out
    assert "You will get stock diffusers" in out


WITHOUT_TORCH = """
import runpy, sys
sys.stderr = sys.stdout
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import ltx2_fastpath
try:
    ltx2_fastpath.enable
except ImportError as error:
    print(error)
sys.argv = ["ltx2_fastpath", "--json"]
try:
    runpy.run_module("ltx2_fastpath", run_name="__main__")
except SystemExit as end:
    print("exit", end.code)
"""

TOLD = "torch cannot be imported (No module named 'torch'): https://pytorch.org says how to install it."


def test_command_without_torch_says_so(run_python):
    said = run_python(WITHOUT_TORCH).splitlines()
    assert said == ["ltx2_fastpath needs torch: https://pytorch.org says how to install it", TOLD, "exit 1"]


def test_findings_hold_no_paths(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    found = json.dumps(check.findings())
    assert str(tmp_path) not in found and "/" not in found.replace("w/o", "")


# Messages


def test_warnings_say_what_happened_what_it_means_and_what_to_do(caplog, monkeypatch):
    from ltx2_fastpath.first_sight import FirstSight

    monkeypatch.setattr("ltx2_fastpath.patches.handle.why_unsupported", lambda room: "no CUDA device is available")
    check.api.enable(models.tiny_transformer("2.3", num_layers=1))
    FirstSight("norm1", stub_op("triton", launch=lambda candidate, x: x))(X)
    off, fallen_back = (record.getMessage() for record in caplog.records if record.name == "ltx2_fastpath")
    assert "no CUDA device is available" in off and "runs as before" in off and "`python -m ltx2_fastpath`" in off
    assert "at norm1" in fallen_back and "results are not affected" in fallen_back and "`python -m ltx2_fastpath`" in fallen_back


@torch.no_grad()
def test_nothing_is_logged_while_all_is_well(stand_ins, any_width, monkeypatch, caplog):
    monkeypatch.setattr("ltx2_fastpath.patches.handle.why_unsupported", lambda room: None)
    monkeypatch.setattr("ltx2_fastpath.ops.support.DEVICE_TYPES", ("cuda", "cpu"))
    transformer = models.tiny_transformer("2.3", num_layers=1)
    with caplog.at_level(logging.DEBUG, logger="ltx2_fastpath"):
        handle = check.api.enable(transformer)
        for _ in range(2):
            transformer(**models.inputs(transformer, height=64, width=96, num_frames=9, text_tokens=16))
        check.api.disable(transformer)
    assert sum(site.fast for site in handle.sites.values()) > 20 and not caplog.records
