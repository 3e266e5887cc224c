import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvstored_client.engines.transformers_blocks import (  # noqa: E402
    CacheGeometry,
    UnsupportedCacheError,
    check_cache,
    check_tensors,
    fill_cache,
    join_layers,
    write_block,
)
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer, StaticLayer  # noqa: E402

CPU = torch.device("cpu")


def geometry(block_tokens=8, dtype=torch.float32):
    return CacheGeometry(layers=3, kv_heads=2, head_dim=4, block_tokens=block_tokens, dtype=dtype)


def random_cache(geo, tokens):
    shape = (1, geo.kv_heads, tokens, geo.head_dim)
    return DynamicCache(
        [(torch.randn(shape).to(geo.dtype), torch.randn(shape).to(geo.dtype)) for _ in range(geo.layers)]
    )


def export(cache, geo, count):
    buffers = [bytearray(geo.block_bytes) for _ in range(count)]
    for index, buffer in enumerate(buffers):
        write_block(cache, geo, index, memoryview(buffer))
    return buffers


def as_blocks(buffers, geo):
    return [torch.frombuffer(buffer, dtype=geo.dtype).view(geo.block_shape) for buffer in buffers]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("block_tokens", "count"), [(1, 5), (4, 1), (8, 3)])
def test_blocks_restore_the_very_bits_of_the_full_blocks(block_tokens, count, dtype):
    geo = geometry(block_tokens, dtype)
    cache = random_cache(geo, block_tokens * count + block_tokens // 2)
    restored = DynamicCache([])
    restored.layers = [DynamicLayer() for _ in range(geo.layers)]
    fill_cache(restored, join_layers(as_blocks(export(cache, geo, count), geo), CPU))
    assert restored.get_seq_length() == block_tokens * count
    for before, after in zip(cache.layers, restored.layers, strict=True):
        assert torch.equal(before.keys[:, :, : block_tokens * count], after.keys)
        assert torch.equal(before.values[:, :, : block_tokens * count], after.values)


def test_the_layout_is_layers_then_k_and_v_then_heads_tokens_dimensions():
    geo = geometry(block_tokens=2)
    cache = random_cache(geo, 4)
    second = as_blocks(export(cache, geo, 2), geo)[1]
    assert torch.equal(second[2, 1, 1], cache.layers[2].values[0, 1, 2:4])
    assert torch.equal(second[0, 0, 0], cache.layers[0].keys[0, 0, 2:4])


@pytest.mark.parametrize("count", [1, 2])
def test_joined_layers_are_copies_that_outlive_the_blocks(count):
    geo = geometry()
    buffers = export(random_cache(geo, geo.block_tokens * count), geo, count)
    layers = join_layers(as_blocks(buffers, geo), CPU)
    kept = layers[0][0].clone()
    for buffer in buffers:
        buffer[:] = bytes(len(buffer))
    assert torch.equal(layers[0][0], kept)


def test_a_cache_that_still_carries_gradients_can_be_written():
    geo = geometry()
    cache = random_cache(geo, geo.block_tokens)
    cache.layers[0].keys.requires_grad_()
    assert any(export(cache, geo, 1)[0])


@pytest.mark.parametrize("layer", [DynamicSlidingWindowLayer(sliding_window=4), StaticLayer(max_cache_len=4)])
def test_an_unknown_layer_is_refused_by_index_and_class_name(layer):
    cache = DynamicCache([])
    cache.layers = [DynamicLayer(), layer]
    with pytest.raises(UnsupportedCacheError, match=f"layer 1 is a {type(layer).__name__}"):
        check_cache(cache)


def test_an_unknown_kind_of_cache_is_refused_even_where_it_is_derived_from_a_known_one():
    class OtherCache(DynamicCache):
        pass

    with pytest.raises(UnsupportedCacheError, match="OtherCache"):
        check_cache(OtherCache())


def test_an_offloaded_cache_is_refused():
    cache = DynamicCache()
    cache.offloading = True
    with pytest.raises(UnsupportedCacheError, match="offloaded"):
        check_cache(cache)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, 2, 8, 4),  # batch
        torch.zeros(1, 3, 8, 4),  # heads
        torch.zeros(1, 2, 8, 5),  # dimensions of a head
        torch.zeros(1, 2, 7, 4),  # tokens
        torch.zeros(1, 2, 8, 4, dtype=torch.float16),
        None,
    ],
)
def test_tensors_that_differ_from_the_config_are_refused(wrong):
    geo = geometry()
    cache = random_cache(geo, 8)
    check_tensors(cache, geo)
    cache.layers[1].values = wrong
    with pytest.raises(UnsupportedCacheError, match="values of cache layer 1"):
        check_tensors(cache, geo)
