"""Models and inputs with random weights at the sizes people run, for tests, demo, notebooks, check and benchmark."""
