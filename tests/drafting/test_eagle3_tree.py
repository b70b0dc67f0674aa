"""The drafter's tree against one that reads every branch alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from decoder.drafting.eagle3 import KV, Eagle3Head
from decoder.drafting.eagle3_tree import PAPER_TREE, TreeShape, grow
from decoder.drafting.tree import ROOT, DraftTree, chain
from tests.drafting.head import CONFIG

Path = tuple[int, ...]


def drafter(seed: int) -> tuple[Eagle3Head, nn.Embedding, torch.Tensor, KV]:
    """A random head, embeddings, and what it made of nine committed positions."""
    torch.manual_seed(seed)
    head = Eagle3Head(CONFIG).eval()
    for parameter in head.parameters():
        nn.init.normal_(parameter, std=0.3)
    head.set_vocabulary(torch.randperm(50)[:20].sort().values)
    embedding = nn.Embedding(50, 24)
    hidden, committed = head.extend(embedding, torch.randint(50, (9,)), torch.randn(9, 72), None)
    return head, embedding, hidden, committed


def children_of(
    head: Eagle3Head,
    embedding: nn.Embedding,
    hidden: torch.Tensor,
    committed: KV,
    path: Path,
    k: int,
) -> dict[int, float]:
    """The likeliest tokens after a branch, which is drafted token by token."""
    past, position = committed, committed.keys.shape[1] - 1
    for token in path:
        position += 1
        hidden, past = head.advance(
            embedding(torch.tensor([token])), hidden, torch.tensor([position]), past
        )
    best = head.logits(hidden)[0].log_softmax(-1).topk(k)
    ids = best.indices + head.d2t[best.indices]
    return dict(zip(ids.tolist(), best.values.tolist(), strict=True))


def naive_tree(
    head: Eagle3Head, embedding: nn.Embedding, hidden: torch.Tensor, committed: KV, shape: TreeShape
) -> set[Path]:
    scores: dict[Path, float] = {(): 0.0}
    level: list[Path] = [()]
    for _ in range(shape.depth):
        below: dict[Path, float] = {}
        for path in sorted(level, key=scores.__getitem__, reverse=True)[: shape.top_k]:
            found = children_of(head, embedding, hidden, committed, path, shape.top_k)
            below |= {(*path, token): scores[path] + p for token, p in found.items()}
        scores |= below
        level = list(below)
    del scores[()]
    return set(sorted(scores, key=scores.__getitem__, reverse=True)[: shape.tokens])


def paths(tree: DraftTree) -> list[Path]:
    return [tuple(tree.path(node)) for node in range(len(tree))]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "shape", [PAPER_TREE, TreeShape(60, 5, 6), TreeShape(7, 3, 2), TreeShape(3, 1, 4)]
)
@torch.inference_mode()
def test_the_tree_is_the_one_that_branches_alone_would_give(seed: int, shape: TreeShape) -> None:
    head, embedding, hidden, committed = drafter(seed)
    tree = grow(head, embedding, hidden, committed, shape)
    assert set(paths(tree)) == naive_tree(head, embedding, hidden, committed, shape)
    assert len(set(paths(tree))) == len(tree) <= shape.tokens
    assert max(tree.depths) <= shape.depth
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert committed.keys.shape[1] == 9


@torch.inference_mode()
def test_one_branch_wide_is_the_chain() -> None:
    head, embedding, hidden, committed = drafter(1)
    tree = grow(head, embedding, hidden, committed, TreeShape(6, 6, 1))
    assert tree.linear
    assert tree.tokens == head.chain(embedding, hidden, committed, 6)


def test_more_children_than_the_vocabulary_has() -> None:
    head, embedding, hidden, committed = drafter(2)
    tree = grow(head, embedding, hidden, committed, TreeShape(500, 2, 40))
    assert len(tree) == 20 + 20 * 20


def test_a_chain_is_a_tree() -> None:
    tree = chain([4, 9, 4])
    assert tree.linear and not DraftTree([1, 2], [ROOT, ROOT]).linear
    assert tree.parents == [ROOT, 0, 1]
    assert tree.depths == [1, 2, 3]
    assert tree.path(2) == [4, 9, 4]
    assert torch.equal(tree.ancestry(), torch.ones(3, 3, dtype=torch.bool).tril())
    assert chain([]).linear and len(chain([])) == 0


def test_a_node_sees_its_ancestors_only() -> None:
    tree = DraftTree([7, 8, 1, 2, 5], [ROOT, ROOT, 0, 1, 3])
    assert tree.ancestry().int().tolist() == [
        [1, 0, 0, 0, 0],
        [0, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [0, 1, 0, 1, 0],
        [0, 1, 0, 1, 1],
    ]
    assert tree.children == {ROOT: [0, 1], 0: [2], 1: [3], 3: [4]}
