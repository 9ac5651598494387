"""
How one prompt's tokens become another's, and which stored KV that lets a new prompt reuse.

Edit scripts and alignment, the tree of prompts with their piece tables, the composition of a new
prompt from stored ones, and all of it on disk. Knows token ids and KV segments by number only:
no tensors, no HTTP, no vector index.
"""
