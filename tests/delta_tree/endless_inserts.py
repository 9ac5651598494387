"""
A program for the kill test: insert, evict and purge in a loop until killed.

Prints the number of changes made, after each of them, so that the test knows what must be there.
"""

import random
import sys
from pathlib import Path

from delta_tree import DeltaTree
from tests.delta_tree.fake_prompts import child_draft, count_segments_from, fresh_draft

if __name__ == "__main__":
    rng = random.Random(int(sys.argv[2]))
    count_segments_from((int(sys.argv[2]) + 1) * 10**9)
    with DeltaTree.open(Path(sys.argv[1]), identity="model") as tree:
        while True:
            nodes = tree.nodes()
            choice = rng.random()
            added = [rng.randrange(50_000) for _ in range(rng.randrange(1, 300))]
            if choice < 0.4 or not nodes:
                made: int = tree.insert(fresh_draft(added)).node.node_id
            elif choice < 0.8:
                parent = rng.choice(nodes)
                kept = rng.randrange(parent.num_tokens + 1)
                made = tree.insert(child_draft(parent, kept, added)).node.node_id
            elif choice < 0.997:
                evicted = rng.choice(nodes).node_id
                made = -evicted
                tree.evict(evicted)
            else:
                tree.purge_nodes(node.node_id for node in tree.nodes())
                made = 0
            sys.stdout.write(f"{made}\n")
            sys.stdout.flush()
