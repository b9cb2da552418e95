"""Models, inputs and measurements at the sizes people run: `ltx2_fastpath.bench.models` and the benchmark."""
