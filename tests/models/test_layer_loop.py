"""Folding layer lists into loops keeps every layer, once, in order."""

import jax
import jax.numpy as jnp
from hypothesis import given
from hypothesis import strategies as st

from uniprefill_jax.models.layer_loop import LayerLoop, LayerRun, group_layers, index_table, loop_layers


def test_gemma_12b_folds_into_one_pattern():
    kinds = (["sliding"] * 5 + ["full"]) * 8
    assert group_layers(kinds) == (LayerLoop((LayerRun("sliding", 5), LayerRun("full", 1)), 8),)
    assert group_layers(["full"] * 32) == (LayerRun("full", 32),)
    assert group_layers([]) == ()


@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=24))
def test_every_layer_runs_once_in_order(kinds):
    grouping = group_layers(kinds)
    assert sum(item.num_layers for item in grouping) == len(kinds)
    unfolded = []
    for item in grouping:
        body = (item,) if isinstance(item, LayerRun) else item.body * item.count
        unfolded += [kind for run in body for kind in [run.kind] * run.count]
    assert unfolded == kinds


def test_loops_visit_layers_with_their_kind():
    kinds = ["a", "a", "b"] * 3 + ["c", "a"]
    names = sorted(set(kinds))

    def visit(kind, layer, carry):
        order, count = carry
        return order.at[count].set(jnp.stack([jnp.asarray(layer), jnp.asarray(names.index(kind))])), count + 1

    order, count = jax.jit(
        lambda first: loop_layers(group_layers(kinds), first, visit, (jnp.zeros((len(kinds), 2), jnp.int32), 0))
    )(jnp.int32(5))
    assert int(count) == len(kinds)
    assert order[:, 0].tolist() == list(range(5, 5 + len(kinds)))
    assert [names[index] for index in order[:, 1].tolist()] == kinds


def test_index_table():
    assert index_table(["a", "b", "a", "a", "b"]).tolist() == [0, 0, 1, 2, 1]
