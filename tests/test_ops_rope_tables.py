"""rope_tables: do compact tables hold the bits of the host's full ones, and does anybody get tables of other coordinates?"""

import pytest
import torch
from diffusers.models.transformers.transformer_ltx2 import LTX2AudioVideoRotaryPosEmbed

from ltx2_fastpath.ops import rope_tables
from ltx2_fastpath.ops.rope_tables import CompactTables, Rope, compact_tables
from ltx2_fastpath.testing import models

pytestmark = pytest.mark.interpreter


def bits(tables):
    return [table.view(torch.int32) for table in tables]


def assert_equal_bits(actual, expected):
    for mine, host in zip(bits(actual), bits(expected)):
        assert torch.equal(mine, host) and mine.shape == host.shape


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("dim, heads", [(64, 2), (128, 4), (96, 3)])  # 64 and 128 are padded, 96 is not: three axes, 2 a pair
def test_video_tables_unite_to_the_hosts(batch, dim, heads):
    embed = LTX2AudioVideoRotaryPosEmbed(dim, modality="video", rope_type="split", num_attention_heads=heads)
    coords = embed.prepare_video_coords(batch, 3, 5, 4, torch.device("cpu"), fps=24.0)
    compact = compact_tables(coords, embed)
    assert compact.rows.shape == (2, batch, 60) and compact.rows.dtype == torch.int32 and compact.heads == heads
    assert compact.cos.shape == compact.sin.shape == (15, dim // 2)  # (frame, row) pairs
    assert compact.columns.shape == (4, dim // 8, 4)
    assert_equal_bits(compact.full(), embed(coords))
    # No channel depends on the column but those that are taken from its row.
    assert_equal_bits(
        compact._replace(cos=torch.zeros_like(compact.cos), sin=torch.zeros_like(compact.sin)).full(),
        [torch.where(last_axis(dim // 2).view(1, heads, 1, -1), table, 0.0) for table in embed(coords)],
    )


def last_axis(channels):
    """Which channels the host gives to the last of three axes, or pads before the first with what depends on none."""
    return (torch.arange(channels) - channels % 3) % 3 == 2


@pytest.mark.parametrize("batch", [1, 2])
def test_audio_tables_are_the_hosts_rows(batch):
    embed = LTX2AudioVideoRotaryPosEmbed(
        32, modality="audio", rope_type="split", num_attention_heads=4, scale_factors=[4], double_precision=False
    )
    coords = embed.prepare_audio_coords(batch, 9, torch.device("cpu"))
    compact = compact_tables(coords, embed)
    assert compact.rows.shape == (1, batch, 9) and compact.cos.shape == (9, 16) and compact.columns is None
    assert_equal_bits(compact.full(), embed(coords))


@pytest.mark.parametrize("name", ["rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope"])
@pytest.mark.parametrize("version", models.CONFIGS)
def test_tables_of_the_models_own_embeddings(version, name):
    transformer = models.tiny_transformer(version)
    kwargs = models.inputs(transformer, height=64, width=96, num_frames=17, batch_size=2)
    coords = kwargs["audio_coords" if "audio" in name else "video_coords"]
    if name.startswith("cross"):
        coords = coords[:, :1]
    embed = getattr(transformer, name)
    compact = compact_tables(coords, embed)
    assert_equal_bits(compact.full(), embed(coords))
    assert len(compact.cos) < coords.shape[0] * coords.shape[2]


def test_rows_of_the_batch_may_lie_elsewhere():
    embed = LTX2AudioVideoRotaryPosEmbed(64, modality="video", rope_type="split", num_attention_heads=2)
    coords = embed.prepare_video_coords(2, 2, 3, 4, torch.device("cpu"))
    coords[1, 0] += 0.5
    coords[1, 2] *= 3
    compact = compact_tables(coords, embed)
    assert_equal_bits(compact.full(), embed(coords))
    assert not torch.equal(embed(coords)[0][0], embed(coords)[0][1])


def test_midpoints_instead_of_bounds():
    embed = LTX2AudioVideoRotaryPosEmbed(64, modality="video", rope_type="split", num_attention_heads=2)
    coords = embed.prepare_video_coords(1, 2, 3, 4, torch.device("cpu")).mean(-1)
    assert_equal_bits(compact_tables(coords, embed).full(), embed(coords))


def test_none_where_coordinates_do_not_repeat(monkeypatch):
    monkeypatch.setattr(rope_tables, "_FEW_ROWS", 0)
    embed = LTX2AudioVideoRotaryPosEmbed(64, modality="video", rope_type="split", num_attention_heads=2)
    coords = torch.rand(1, 3, 60, 2, generator=torch.Generator().manual_seed(0))
    assert compact_tables(coords, embed) is None
    assert compact_tables(embed.prepare_video_coords(1, 3, 5, 4, torch.device("cpu")), embed) is not None


def test_none_where_the_bits_would_differ():
    """An embedding whose channels depend on more than one axis, or on the neighbours, is not one that tables can hold."""
    coords = LTX2AudioVideoRotaryPosEmbed(64).prepare_video_coords(1, 3, 5, 4, torch.device("cpu"))

    def mixed(at):
        angle = at[..., 0].sum(1)[:, None, :, None] * torch.arange(1.0, 13.0)  # [B, 1, S, 12], of all axes together
        return angle.cos(), angle.sin()

    def relative(at):
        angle = (at[:, 0, :, 0] - at[:, 0, :, 0].mean())[:, None, :, None].expand(-1, 1, -1, 12)
        return angle.cos(), angle.sin()

    assert compact_tables(coords, mixed) is None
    assert compact_tables(coords, relative) is None


def test_none_for_channels_that_are_not_quads():
    embed = LTX2AudioVideoRotaryPosEmbed(36, modality="video", rope_type="split", num_attention_heads=3)
    coords = embed.prepare_video_coords(1, 3, 5, 4, torch.device("cpu"))
    assert embed(coords)[0].shape == (1, 3, 60, 6) and compact_tables(coords, embed) is None


def test_none_for_other_axes():
    assert compact_tables(torch.zeros(1, 2, 6, 2), lambda at: pytest.fail("embedded")) is None


def test_rope_unpacks_into_the_full_tables_once(monkeypatch):
    embed = LTX2AudioVideoRotaryPosEmbed(64, modality="video", rope_type="split", num_attention_heads=2)
    coords = embed.prepare_video_coords(1, 2, 3, 4, torch.device("cpu"))
    rope = Rope(compact_tables(coords, embed))
    full, calls = CompactTables.full, []
    monkeypatch.setattr(CompactTables, "full", lambda self: calls.append(self) or full(self))
    cos, sin = rope
    assert_equal_bits((cos, sin), embed(coords))
    assert rope[0] is cos and rope[1] is sin and len(rope) == 2 and len(calls) == 1
    assert cos.stride() == embed(coords)[0].stride()


class Embedding:
    """The host's embedding, counting its calls."""

    def __init__(self):
        self.stock = LTX2AudioVideoRotaryPosEmbed(64, modality="video", rope_type="split", num_attention_heads=2)
        self.coords = self.stock.prepare_video_coords(1, 2, 3, 4, torch.device("cpu"))
        self.calls = 0

    def __call__(self, coords):
        self.calls += 1
        return self.stock(coords)


@pytest.fixture
def cache():
    from ltx2_fastpath.patches.transformer.rope import TableCache

    return TableCache("rope.tables")


def found(cache, coords, embed):
    """The tables that the cache gives for `coords`, seen to be the host's."""
    tables = cache.find(coords, (), embed)
    assert_equal_bits(tables.compact.full(), embed.stock(coords))
    return tables


def test_cache_answers_the_same_and_equal_coordinates(cache):
    embed = Embedding()
    first = found(cache, embed.coords, embed)
    calls = embed.calls
    assert found(cache, embed.coords, embed) is first
    assert found(cache, embed.coords.clone(), embed) is first
    assert embed.calls == calls and (cache.fast, cache.stock) == (2, 1)
    assert "24 tokens are 10 table rows" in cache.notes[0]


def test_cache_tells_other_coordinates_apart(cache):
    embed = Embedding()
    for other in (embed.coords, embed.coords + 1, embed.coords[:, :, :12], embed.coords.expand(2, -1, -1, -1)):
        for _ in range(2):
            found(cache, other, embed)
    assert (cache.fast, cache.stock) == (4, 4)


def test_cache_does_not_answer_for_coordinates_that_were_changed_in_place(cache):
    embed = Embedding()
    coords = embed.coords.clone()
    first = found(cache, coords, embed)
    coords += 1
    assert found(cache, coords, embed) is not first
    coords -= 1
    found(cache, coords.clone(), embed)


def test_cache_does_not_answer_for_another_dtype(cache):
    embed = Embedding()
    first = found(cache, embed.coords, embed)
    assert found(cache, embed.coords.double(), embed) is not first


def test_cache_in_inference_mode(cache):
    embed = Embedding()
    with torch.inference_mode():
        coords = embed.coords.clone()
        first = found(cache, coords, embed)
        assert found(cache, coords, embed) is first
        coords += 1  # no version counter tells
        assert found(cache, coords, embed) is not first


def test_cache_remembers_coordinates_that_do_not_repeat(cache, monkeypatch):
    monkeypatch.setattr(rope_tables, "_FEW_ROWS", 0)
    coords = torch.rand(1, 3, 60, 2, generator=torch.Generator().manual_seed(0))
    embed = Embedding()
    assert cache.find(coords, (), embed).compact is None and cache.find(coords, (), embed).compact is None
    assert embed.calls == 0 and "do not repeat" in cache.notes[0]


def test_cache_compares_the_coordinates_of_a_new_request_once(cache, monkeypatch):
    """A comparison waits for the GPU, so only the first forward of a request may make one."""
    embed = Embedding()
    first, compared = found(cache, embed.coords, embed), []
    equal = torch.equal
    monkeypatch.setattr(torch, "equal", lambda a, b: compared.append(a) or equal(a, b))
    for _ in range(3):
        again = embed.coords.clone()
        for _ in range(4):
            assert cache.find(again, (), embed) is first
    assert len(compared) == 3


def test_cache_forgets_what_was_not_asked_for_the_longest(cache):
    embed = Embedding()
    first = found(cache, embed.coords, embed)
    for shift in range(1, 40):
        found(cache, embed.coords + shift, embed)
        assert found(cache, embed.coords, embed) is first
    assert len(cache._entries) == 16 and embed.calls == 2 * 40
