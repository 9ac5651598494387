"""The tree under several threads, as the server uses it."""

import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from delta_tree import DeltaTree, InvalidNodeError, UnknownNodeError, compose, token_ids
from tests.delta_tree.fake_prompts import NAMESPACE, child_draft, fresh_draft


def test_threads_may_insert_evict_and_ask_at_once(tmp_path: Path) -> None:
    """Whatever the interleaving, the tree stays whole, and so does what is on disk."""
    path = tmp_path / "tree.sqlite"
    tree = DeltaTree.open(path, identity="model")
    tree.insert(fresh_draft(list(range(60))))

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            nodes = tree.nodes(NAMESPACE)
            ids = [rng.randrange(9) for _ in range(rng.randrange(1, 30))]
            node = rng.choice(nodes) if nodes else tree.insert(fresh_draft(ids)).node
            try:
                if rng.random() < 0.3:
                    tree.evict(node.node_id)
                else:
                    tree.insert(child_draft(node, rng.randrange(node.num_tokens + 1), ids))
                    tree.touch(node.node_id)
            except (UnknownNodeError, InvalidNodeError):
                pass  # another thread evicted it first
            target = token_ids(node.token_ids.tolist() + ids)
            compose(
                target,
                nodes[:4],
                tree.segment,
                min_run=4,
                max_donors=4,
                max_generation=2,
                allow_approximate=True,
            )
            tree.find(NAMESPACE, target)
            tree.stats()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    before = tree.stats()
    tree.close()
    with DeltaTree.open(path, identity="model", read_only=True) as again:
        assert again.stats() == before
