"""The full-size transformer with its blocks compiled by Inductor: one graph, our opaque op in it, no further from stock eager."""

import torch

import ltx2_fastpath
from ltx2_fastpath.testing import models

LARGE = dict(height=512, width=768, num_frames=121)
ATTENTIONS = 6  # of a layer


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def distances(outputs, expected) -> list[float]:
    """The mean difference, of video and of audio."""
    return [(a.double() - b.double()).abs().mean().item() for a, b in zip(outputs, expected)]


@torch.no_grad()
def test_full_size_blocks(full_size):
    """The graph is not stock's, so its bits need not be those of stock's compiled graph; it may not be further from eager."""
    transformer = full_size("2.3")
    kwargs = models.inputs(transformer, **LARGE)
    expected = transformer(**kwargs)
    ours = models.twin(transformer)
    handle = ltx2_fastpath.enable(ours)
    compiled, differences = {}, {}
    for name, instance in (("stock", models.twin(transformer)), ("ours", ours)):
        torch._dynamo.reset()
        before = graphs()
        instance.compile_repeated_blocks(fullgraph=True, dynamic=False)
        for _ in range(2):
            outputs = instance(**kwargs)
        compiled[name] = graphs() - before
        differences[name] = distances(outputs, expected)
    print(f"graphs {compiled}, mean differences from eager (video, audio) {differences}")
    assert compiled == {"stock": 1, "ours": 1}
    assert all(0 < mine <= 1.1 * host for mine, host in zip(differences["ours"], differences["stock"]))
    opaque = [site for name, site in handle.sites.items() if name.endswith("qk_norm_split_rope")]
    layers = len(ours.transformer_blocks)
    assert len(opaque) == ATTENTIONS and all((site.fast, site.stock) == (2 * layers - 1, 1) for site in opaque)

    before = graphs()
    with ltx2_fastpath.disabled(ours):
        for _ in range(2):
            stock = ours(**kwargs)
    assert graphs() - before == 1  # one more, for both calls
    assert distances(stock, expected) == differences["stock"]
    torch._dynamo.reset()
