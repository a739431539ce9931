"""What of a model is cut along which mesh axis: one object maps logical axes to mesh axes, for weights and caches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from uniprefill_jax.cache.pools import CachePools
from uniprefill_jax.errors import ConfigError
from uniprefill_jax.models.attention import AttentionCache
from uniprefill_jax.models.gated_delta_net import RecurrentCache
from uniprefill_jax.models.parameters import ParameterSpec
from uniprefill_jax.parallel.mesh import TENSOR

# Every logical axis that a parameter may have. What is None lies whole on every shard: besides what no one would cut,
# the router and the convolution of Gated DeltaNet. The router decides on all experts and is small. The convolution's
# channels lie in the order queries, keys, values, so that shards of whole heads are no slices of them; it is small too.
MESH_AXES: Mapping[str, str | None] = {
    "heads": TENSOR,
    "kv_heads": TENSOR,
    "held_kv_heads": TENSOR,  # of the engine's pages: never fewer than shards
    "key_heads": TENSOR,
    "value_heads": TENSOR,
    "mlp": TENSOR,
    "experts": TENSOR,
    "vocab": TENSOR,
    "layers": None,
    "embed": None,
    "head_dim": None,
    "group": None,
    "choices": None,
    "expert_mlp": None,
    "one": None,
    "channels": None,
    "conv_width": None,
}
_NAMES = {
    "heads": "attention heads",
    "kv_heads": "KV heads",
    "key_heads": "linear-attention key heads",
    "value_heads": "linear-attention value heads",
    "mlp": "feed-forward width",
    "experts": "experts",
    "vocab": "vocabulary",
}


@dataclass(frozen=True)
class ShardingRules:
    """Placement of one model on one mesh.

    Attributes:
        mesh: see `make_mesh`.
        mesh_axes: mesh axis of every logical axis; None lies whole on every shard.
    """

    mesh: Mesh
    mesh_axes: Mapping[str, str | None]

    @classmethod
    def of(cls, specs: Mapping[str, ParameterSpec], mesh: Mesh) -> "ShardingRules":
        """The rules for a model with these parameters.

        KV heads lie whole on every shard where they are fewer than shards, each shard then reading the one it needs.
        Raises ConfigError, naming the numbers, if the mesh does not divide the model.
        """
        sizes: dict[str, set[int]] = {}
        for spec in specs.values():
            for axis, size in zip(spec.full_axes, spec.full_shape, strict=True):
                sizes.setdefault(axis, set()).add(size)
        unknown = sizes.keys() - MESH_AXES.keys()
        if unknown:
            raise AssertionError(f"no rule for the logical axes {', '.join(sorted(unknown))}")
        cut = {axis: sizes[axis] for axis in _NAMES if axis in sizes}
        shards = mesh.shape[TENSOR]
        wrong = [
            f"{size} {_NAMES[axis]}" if axis != "mlp" and axis != "vocab" else f"a {_NAMES[axis]} of {size}"
            for axis, found in cut.items()
            for size in sorted(found)
            if not _divides(axis, size, shards)
        ]
        if wrong:
            possible = [
                str(number)
                for number in range(1, max(cut["heads"]) + 1)
                if all(_divides(axis, size, number) for axis, found in cut.items() for size in found)
            ]
            raise ConfigError(
                f"the mesh cuts the model in {shards} shards, which do not divide {' and '.join(wrong)}; "
                f"use a tensor_parallel_size of {', '.join(possible)}"
            )
        whole = {"kv_heads": None} if any(size % shards for size in cut.get("kv_heads", ())) else {}
        return cls(mesh, {**MESH_AXES, **whole})

    def partition(self, *axes: str | None) -> PartitionSpec:
        """How an array with these logical axes is cut."""
        return PartitionSpec(*(None if axis is None else self.mesh_axes[axis] for axis in axes))

    def parameter(self, path: str, spec: ParameterSpec) -> NamedSharding:
        """Placement of a parameter (what `load_parameters` asks for)."""
        del path
        return NamedSharding(self.mesh, self.partition(*spec.full_axes))

    def caches(self, caches: dict[str, Any]) -> dict[str, Any]:
        """Placement of caches by layer kind, of a prompt or of generated tokens: cut like the heads that fill them."""

        def cut(array: jax.Array, axis: str, place: int) -> NamedSharding:
            names: list[str | None] = [None] * array.ndim
            names[place] = axis
            return NamedSharding(self.mesh, self.partition(*names))

        placements: dict[str, Any] = {}
        for kind, cache in caches.items():
            if isinstance(cache, AttentionCache):
                placements[kind] = AttentionCache(*(cut(array, "kv_heads", -2) for array in cache))  # pyright: ignore
            else:
                assert isinstance(cache, RecurrentCache)
                # The inputs of the convolution lie in key-head groups.
                conv_state = cut(cache.conv_state, "key_heads", -1)
                recurrent_state = cut(cache.recurrent_state, "value_heads", -3)
                placements[kind] = RecurrentCache(conv_state, recurrent_state)  # pyright: ignore
        return placements

    def constrain_caches(self, caches: dict[str, Any]) -> dict[str, Any]:
        """Caches where `caches` places them."""
        return jax.tree.map(jax.lax.with_sharding_constraint, caches, self.caches(caches))

    def pools(self) -> CachePools:
        """Placement of the engine's pools."""

        def cut(*axes: str | None) -> NamedSharding:
            return NamedSharding(self.mesh, self.partition(*axes))

        pages = cut(None, "held_kv_heads")
        placements = dict(
            keys=pages,
            values=pages,
            # The inputs of the convolution lie in key-head groups.
            conv=cut(None, None, None, "key_heads"),
            recurrent=cut(None, None, "value_heads"),
        )
        return CachePools(**placements)  # pyright: ignore[reportArgumentType]

    def constrain_logits(self, logits: jax.Array) -> jax.Array:
        """Logits [B, vocab] on every shard: gathered as such, or the compiler gathers the weights of the head."""
        cut = NamedSharding(self.mesh, self.partition(None, "vocab"))
        return self.constrain_replicated(jax.lax.with_sharding_constraint(logits, cut))

    def constrain_steps[Tree](self, outputs: Tree) -> Tree:
        """What a program of the engine returns: pools as they are placed, all else on every shard."""

        def is_pools(part: Any) -> bool:
            return isinstance(part, CachePools)

        def place(part: Any) -> Any:
            if is_pools(part):
                return jax.tree.map(jax.lax.with_sharding_constraint, part, self.pools())
            return self.constrain_replicated(part)

        return jax.tree.map(place, outputs, is_leaf=is_pools)

    def constrain_replicated[Tree](self, arrays: Tree) -> Tree:
        """Arrays that every shard holds whole."""
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda array: jax.lax.with_sharding_constraint(array, sharding), arrays)


def _divides(axis: str, size: int, shards: int) -> bool:
    return size % shards == 0 or (axis == "kv_heads" and shards % size == 0)
