"""The methods that UniPrefill is compared with, a file each; `registry.py` has their names, `protocol.py` their roles.

A method has up to three parts, each of one role: tokens that leave (a `UniPrefillConfig`, or a `TokenChoice`), entries
of full attention that are not computed (a `SparseAttention`), cached rows that decoding no longer sees (a
`CacheCompression`). Parts of different roles go together, as in `uniprefill+snapkv`.
"""
