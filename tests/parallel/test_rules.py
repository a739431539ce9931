"""What is cut along the mesh, from the shapes of published models; no devices are needed."""

import json

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from tests.conftest import PUBLISHED_CONFIGS
from tests.parallel.models import CONFIGS
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.models.causal_lm import CausalLM
from uniprefill_jax.models.config import read_model_config
from uniprefill_jax.models.parameters import parameter_specs
from uniprefill_jax.parallel.replicas import deal, on_each
from uniprefill_jax.parallel.rules import ShardingRules


def rules_of(config: dict, shards: int) -> tuple[ShardingRules, dict[str, PartitionSpec]]:
    """Rules and every parameter's partition on a mesh of so many shards."""
    specs = parameter_specs(CausalLM(read_model_config(config), jnp.dtype(jnp.bfloat16)))
    mesh = AbstractMesh((1, shards), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    rules = ShardingRules.of(specs, mesh)  # type: ignore[arg-type]
    return rules, {path: rules.partition(*spec.full_axes) for path, spec in specs.items()}


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
@pytest.mark.parametrize("name", sorted(json.loads(PUBLISHED_CONFIGS.read_text())))
def test_published_models_are_cut_or_refused_by_name(name: str, shards: int) -> None:
    config = json.loads(PUBLISHED_CONFIGS.read_text())[name]
    try:
        _, partitions = rules_of(config, shards)
    except ConfigError as error:
        assert f"{shards} shards, which do not divide" in str(error) and "use a tensor_parallel_size of 1" in str(error)
        return
    heads = [partition for path, partition in partitions.items() if path.endswith(("q_proj", "up_proj", "embedding"))]
    assert heads and all("tensor" in partition for partition in heads)
    assert all(partition.count("tensor") <= 1 for partition in partitions.values())


def test_fewer_kv_heads_than_shards_lie_whole_on_each() -> None:
    for shards, cut in ((2, True), (4, False), (8, False)):
        _, partitions = rules_of(CONFIGS["qwen"], shards)
        kind = next(path for path in partitions if path.endswith("mixer.k_proj"))
        assert ("tensor" in partitions[kind]) == cut


def test_gated_delta_net_is_cut_in_groups_and_its_convolution_is_whole() -> None:
    _, partitions = rules_of(CONFIGS["qwen"], 8)
    last = {path.rsplit(".", 1)[-1]: partition for path, partition in partitions.items() if ".linear" in path}
    assert last["in_proj_qkvz"] == PartitionSpec(None, None, "tensor", None)
    assert last["in_proj_ba"] == PartitionSpec(None, None, "tensor", None)
    assert last["conv"] == PartitionSpec(None, None, None)
    assert last["router"] == PartitionSpec(None, None, None)
    assert last["a_log"] == PartitionSpec(None, "tensor")


@pytest.mark.parametrize(
    ("change", "shards", "words"),
    [
        ({"num_attention_heads": 12, "num_key_value_heads": 6}, 4, "4 shards, which do not divide 6 KV heads"),
        ({"vocab_size": 129}, 2, "2 shards, which do not divide a vocabulary of 129"),
        ({"intermediate_size": 60}, 8, "8 shards, which do not divide a feed-forward width of 60"),
    ],
)
def test_sizes_that_the_mesh_does_not_divide_are_named(change: dict, shards: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rules_of(CONFIGS["llama"] | change, shards)


def test_experts_that_the_mesh_does_not_divide_are_named() -> None:
    with pytest.raises(ConfigError, match="do not divide 6 experts.*use a tensor_parallel_size of 1, 2$"):
        rules_of(CONFIGS["qwen"] | {"num_experts": 6}, 8)


def test_requests_are_dealt_by_length_and_results_keep_their_order() -> None:
    assert deal([5, 100, 40, 30, 20], 2) == [[1], [0, 2, 3, 4]]
    assert deal([7], 3) == [[0], [], []]
    shares = deal([3, 1, 2], 2)
    assert on_each([0, 1], shares, lambda replica, share: [(replica, number) for number in share]) == [
        (0, 0),
        (1, 1),
        (1, 2),
    ]
