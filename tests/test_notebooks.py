"""The notebooks run, on the tiny pipeline, and are kept with their outputs."""

import json
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from test_readme import document, forward_section, kernels_section, pipeline_section, results_table

NOTEBOOKS = Path(__file__).resolve().parent.parent / "examples" / "notebooks"
#: What must be printed when a notebook runs without a GPU.
SAYS = {
    "quickstart": ["video: 165,888 values, same bits: True", "sound: 15,840 samples, same bits: True", "active (lossless)"],
    "bit_exactness": ["0 and 0 of 768 elements differ", "0 and 0 of 36 elements differ", "gave other bits", "same bits: True"],
    "living_together": [
        "plain: same bits: True",
        "LoRA: same bits: True",
        "the adapter changes the clip: True",
        "offloaded: same bits: True",
        "all of them in the other thread",
        "active (high)",
        "high beside lossless: largest difference",
        "6 forwards without their text mask",
        "lossless after high: same bits: True",
        "unknown quality 'good enough'",
        "compiled beside eager",
        "weights in eight bits: same bits: True",
        "the casting changes the clip: True",
    ],
    "benchmark": [],
}


def said(notebook) -> str:
    """All text that the cells gave out."""
    texts = []
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            texts += [output.get("text", ""), data.get("text/plain", ""), data.get("text/markdown", "")]
    return "\n".join(texts)


def run(name: str, monkeypatch, **environment):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MODEL", raising=False)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    return notebook


def test_every_notebook_is_tested():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == set(SAYS)


@pytest.mark.parametrize("name", [name for name, says in SAYS.items() if says])
def test_notebook_runs(name, monkeypatch):
    text = said(run(name, monkeypatch))
    for expected in SAYS[name]:
        assert expected in text
    assert "same bits: False" not in text
    ran_fast = [int(count) for count in re.findall(r"(\d+) operations ran fast", text)]
    assert all(count > 0 for count in ran_fast) and (ran_fast or name != "living_together")


def test_benchmark_notebook_draws_results_and_says_where_there_are_none(monkeypatch, tmp_path):
    assert "No results are committed yet" in said(run("benchmark", monkeypatch, RESULTS=str(tmp_path)))
    unequal = forward_section(equal=False)
    (tmp_path / "a.json").write_text(json.dumps(document(forward_section(), unequal, kernels_section(), pipeline_section())))
    (tmp_path / "b.json").write_text(json.dumps(document(forward_section(), complete=False)))
    notebook = run("benchmark", monkeypatch, RESULTS=str(tmp_path))
    assert "a.json: Example GPU" in said(notebook) and "b.json" not in said(notebook)
    pictures = [output for cell in notebook.cells for output in cell.get("outputs", ()) if "image/png" in output.get("data", {})]
    assert len(pictures) == 2  # the document's, and the one equal section's parts
    if folder := os.environ.get("KEEP_NOTEBOOKS"):  # to look at
        nbformat.write(notebook, Path(folder) / "benchmark.ipynb")


def test_benchmark_notebook_is_kept_with_the_committed_results():
    text = said(nbformat.read(NOTEBOOKS / "benchmark.ipynb", as_version=4))
    committed = results_table.documents()
    assert all(f"{name}: {run['environment']['gpu']}" in text for name, run in committed.items()), "run `make notebooks`"
    assert ("No results are committed yet" in text) == (not committed)


@pytest.mark.parametrize("name", SAYS)
def test_notebook_is_kept_with_its_outputs(name):
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert not any(output.output_type == "error" for cell in cells for output in cell.outputs)
    text = said(notebook)
    assert all(expected in text for expected in SAYS[name])
    assert sum(bool(cell.outputs) for cell in cells) >= len(cells) - 1
    # Nothing of the machine that it ran on.
    assert not re.search(r"(/home/|/root/|/tmp/|site-packages|Warning: )", text)
    assert all(len(line) <= 100 for cell in cells for line in cell.source.splitlines())
    assert (NOTEBOOKS / f"{name}.ipynb").stat().st_size < 1_000_000
